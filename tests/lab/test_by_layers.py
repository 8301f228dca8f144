"""Methods by masks, a layer at a time, against the engine: contexts and their answers."""

import numpy as np
import pytest
from profiles import make_worth_profile
from tiny import random_prompt, tiny_lm

import tca_jax
from tca_jax.engine.score import score_answers
from tca_jax.errors import UserError
from tca_jax.lab.by_layers import ask, read_by, read_full

SIZES = {"window": 32, "block_size": 16}
DOCUMENT = random_prompt(0, 227)  # 14 blocks and 3 tokens, of which 12 blocks are ranked
#: No token of these starts a block behind the document, so none pushes a block out of the window: 3 tokens plus those
#: of a question and its answer are at most a block.
SHORT = [(random_prompt(1, 7), random_prompt(2, 5)), (random_prompt(3, 2), random_prompt(4, 11))]
#: Past three edges of blocks, for methods that keep all blocks which leave the window behind a prompt.
LONG = [(random_prompt(5, 30), random_prompt(6, 25)), (random_prompt(7, 3), random_prompt(8, 20))]

CONFIG = tca_jax.TCAConfig(**SIZES, reserve=5, observation=8, spread=2)
TCA = {"candidates": [[2, 9], [CONFIG.num_candidates, 0]], "config": CONFIG}
#: Whether a method drops what leaves the window behind a prompt, and its options.
METHODS = {
    "full": (False, {}),
    "snapkv": (False, {**SIZES, "share": 0.3, "observation": 8}),
    "adakv-expected-attention": (False, {**SIZES, "share": 0.3}),
    "kvzip": (False, {**SIZES, "share": 0.3, "chunk": 90}),
    "duoattention": (True, {**SIZES, "sinks": 20, "gates": [[0.9, 0.1], [0.3, 0.6]], "dense_prefill": True}),
    "streaming": (True, {**SIZES, "sinks": 20}),
    "tca": (True, TCA),
}
HEAVY = ("adakv-expected-attention", "kvzip", "tca")
NAMES = [pytest.param(name, marks=pytest.mark.integration) if name in HEAVY else name for name in METHODS]


@pytest.fixture(scope="module")
def model():
    return tiny_lm()


@pytest.fixture(scope="module")
def full(model):
    return read_full(model, DOCUMENT)


def rows_of(pairs):
    rows = np.zeros((len(pairs), 64), np.int32)
    for row, (question, answer) in zip(rows, pairs, strict=True):
        row[: len(question) + len(answer)] = [*question, *answer]
    return rows


@pytest.mark.parametrize("name", NAMES)
def test_contexts_answer_as_the_engines(model, full, name):
    leaving, options = METHODS[name]
    lm, pairs = model.with_method(name, **options), SHORT if leaving else LONG
    read = read_by(lm, full)
    found = ask(lm, read, rows_of(pairs))
    context = tca_jax.prefill(lm, DOCUMENT)
    questions, answers = zip(*pairs, strict=True)
    expected = score_answers(lm, questions, [[answer] for answer in answers], context=context)
    for row, (question, answer) in enumerate(pairs):
        part = slice(len(question) - 1, len(question) + len(answer) - 1)
        np.testing.assert_allclose(-found.losses[row, part], expected.logprobs[row][0], atol=1e-4)
        assert found.right[row, part].all() == expected.greedy[row][0]
    assert read.kept_share == pytest.approx(context.stats.kept_share, abs=1e-6)
    assert read.attended_share == pytest.approx(context.stats.attended_share, rel=1e-5)
    assert read.kept_share == pytest.approx(1) if name == "full" else read.kept_share < 0.7


def test_predicted_worth_answers_as_the_engines(model):
    lm, ids = model.with_profile(make_worth_profile().with_kept(0.7)), random_prompt(9, 900)
    read, context = read_by(lm, read_full(lm, ids)), tca_jax.prefill(lm, ids)
    (question, answer) = SHORT[0]
    found = ask(lm, read, rows_of(SHORT[:1]))
    expected = score_answers(lm, [question], [[answer]], context=context)
    part = slice(len(question) - 1, len(question) + len(answer) - 1)
    np.testing.assert_allclose(-found.losses[0, part], expected.logprobs[0][0], atol=1e-4)
    assert read.attended_share == pytest.approx(context.stats.attended_share, rel=1e-5)
    assert read.kept_share == pytest.approx(context.stats.kept_share, abs=1e-6)
    assert read.kept_share < read.kv_share < 1


def test_methods_without_masks_are_refused(model, full):
    with pytest.raises(UserError, match="quest chooses what each step attends to"):
        read_by(model.with_method("quest"), full)
