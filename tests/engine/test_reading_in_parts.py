"""Prompts that are read in several programs, each of some layers, are read as in one."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from tiny import CONFIG, random_prompt, tiny_lm, with_candidates

from tca_jax.engine.prompts import pad_tokens
from tca_jax.engine.read import begin_reading, end_reading, read_layers, read_prompts

LAYERS = 3


@pytest.fixture(scope="module")
def lm():
    return tiny_lm(config=dataclasses.replace(CONFIG, num_layers=LAYERS))


def with_method(lm, name):
    if name == "tca":
        return with_candidates(lm, [[0, 5], [9, 13], [14, 2]])
    options = {"adakv": {"share": 0.4, "observation": 16, "block_size": 8, "window": 16}}
    return lm.with_method(name, **options.get(name, {}))


@pytest.mark.parametrize(
    "method",
    ["tca", pytest.param("full", marks=pytest.mark.integration), pytest.param("adakv", marks=pytest.mark.slow)],
)
def test_parts_give_what_one_program_gives(lm, method):
    lm = with_method(lm, method)
    tokens, lengths = pad_tokens([random_prompt(0, 90), random_prompt(1, 61)])
    layout = lm.cache_layout(*tokens.shape)
    whole = jax.jit(functools.partial(read_prompts, layout=layout))(lm, tokens, lengths)
    begun = jax.jit(functools.partial(begin_reading, layout=layout))(lm, tokens, lengths)
    for layers in ((0, 1), (1, LAYERS)):
        begun = jax.jit(functools.partial(read_layers, layers=layers, layout=layout))(lm, *begun)
    parts = jax.jit(end_reading)(lm, *begun)
    assert (parts.attended_share < 1).all() == (method == "tca")
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), parts, whole)
