"""Contexts, scores and answers over a mesh, and contexts that move between meshes and one device."""

from __future__ import annotations

import numpy as np
import pytest
from meshes import lm_of, mesh_of, needs_8_devices, with_tca
from tiny import random_prompt

import tca_jax
from tca_jax.engine.score import score_answers

pytestmark = needs_8_devices

DOCUMENTS = [random_prompt(0, 61), random_prompt(1, 44)]
QUESTIONS = [random_prompt(2, 9), random_prompt(3, 14)]


def dressed(shape=None) -> tca_jax.LM:
    return with_tca(lm_of(None if shape is None else mesh_of(shape)))


def ask(lm: tca_jax.LM, context: tca_jax.Context) -> list[list[int]]:
    return tca_jax.generate(lm, QUESTIONS, context=context, max_new_tokens=20, stop_token_ids=()).tokens


@pytest.fixture(scope="module")
def read() -> tca_jax.Context:
    return tca_jax.prefill(dressed(), DOCUMENTS)


@pytest.fixture(scope="module")
def expected(read) -> list[list[int]]:
    return ask(dressed(), read)


def test_contexts_grow_as_on_one_device():
    answers = []
    for lm in (dressed(), dressed((1, 2))):
        context = tca_jax.prefill(lm, DOCUMENTS[0])
        for part in (random_prompt(4, 30), random_prompt(5, 50)):
            context = tca_jax.prefill(lm, part, context=context)
        answers.append(ask(lm, context))
    assert answers[0] == answers[1]


def test_a_saved_context_returns_to_its_mesh_alone(tmp_path, read, expected):
    lm = dressed((2, 2))
    context = tca_jax.prefill(lm, DOCUMENTS)
    assert ask(lm, context) == expected
    assert context.stats.devices == 4
    assert context.stats.kept_share == pytest.approx(read.stats.kept_share)
    context.save(tmp_path)
    loaded = tca_jax.Context.load(tmp_path)
    assert ask(lm, loaded) == expected
    there = loaded.on(lm)
    assert there.on(lm) is there
    assert ask(lm, there.to_host()) == expected
    moved = with_tca(lm_of(mesh_of((2, 2)), rows=((14, 0, 0, 14), (14, 0, 14, 0))))
    assert moved.head_orders != lm.head_orders
    for other, context in ((dressed(), loaded), (dressed((1, 2)), loaded), (moved, loaded), (lm, read)):
        with pytest.raises(ValueError, match=r"context was made on .x., and 'tiny' is on .x. devices on 'data' x 'mod"):
            ask(other, context)


def test_scores_are_those_of_one_device():
    answers = [[random_prompt(6, 5), random_prompt(7, 12)], [random_prompt(8, 3), random_prompt(9, 1)]]
    lms = dressed(), dressed((2, 2))
    one, many = (np.concatenate(tca_jax.score(lm, DOCUMENTS).logprobs) for lm in lms)
    np.testing.assert_allclose(many, one, atol=2e-4)
    one, many = (score_answers(lm, DOCUMENTS, answers) for lm in lms)
    for i, j in np.ndindex(2, 2):
        np.testing.assert_allclose(many.logprobs[i][j], one.logprobs[i][j], atol=2e-4)
    assert many.greedy == one.greedy
