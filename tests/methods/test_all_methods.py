"""What all methods of the registry promise, and pairs of them: batches, short prompts, contexts, statistics, meshes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from meshes import ROWS, lm_of, mesh_of, needs_8_devices
from tiny import TCA, random_prompt

import tca_jax
from tca_jax import methods

GEOMETRY = {"block_size": 8, "window": 16}
PROMPTS = [random_prompt(0, 90), random_prompt(1, 61), random_prompt(2, 5)]
ANSWER = {"max_new_tokens": 12, "stop_token_ids": ()}
GATES = [[0.9, 0.8, 0.1, 0.2], [0.1, 0.7, 0.95, 0.3]]
KINDS = ("vertical_slash", "a_shape", "block_sparse")
PATTERNS = [[[KINDS[(layer + head) % 3], 9 + head, 11 + layer] for head in range(8)] for layer in range(2)]
BLOCKS = {"block_size": 16, "dense_tokens": 16}
SHARE = {"share": 0.3, **GEOMETRY}
OBSERVED = {**SHARE, "observation": 4}
DUO = {"gates": GATES, "sinks": 3, **GEOMETRY}
PATTERNED = {**BLOCKS, "patterns": PATTERNS, "blocks": 2}
BUDGETS = {"candidates": ROWS, "config": TCA}
OPTIONS = {
    "adakv": OBSERVED,
    "adakv-expected-attention": {"future": 16, **SHARE},
    "cake": {"preferences": [0.3, 0.7], **OBSERVED},
    "duoattention": DUO,
    "expected-attention": {"future": 16, **SHARE},
    "flexprefill": {"block_size": 16, "min_budget": 32},
    "full": {},
    "h2o": SHARE,
    "keydiff": SHARE,
    "kvzip": {"chunk": 32, **SHARE},
    "kvzip-heads": {"head_scores": GATES, "sinks": 3, **GEOMETRY},
    "minference": PATTERNED,
    "pyramidkv": OBSERVED,
    "quest": {"budget": 32, "dense_layers": 1, **GEOMETRY},
    "random": {"share": 0.4, **GEOMETRY},
    "snapkv": OBSERVED,
    "streaming": {"sinks": 3, **GEOMETRY},
    "tca": BUDGETS,
    "tova": SHARE,
    "uniform": {"candidate": 4, "config": TCA},
    "xattention": {**BLOCKS, "threshold": 0.6, "stride": 4},
    "xattention+keydiff": {
        "xattention": {**BLOCKS, "threshold": [[0.3 + 0.08 * head for head in range(8)]] * 2, "stride": 4, "chunk": 32},
        "keydiff": SHARE,
    },
    "minference+tca": {"minference": PATTERNED, "tca": BUDGETS},
    "duoattention+kvzip": {"duoattention": DUO, "kvzip": {"level": "layer", "chunk": 32, **GEOMETRY}},
    "duoattention+snapkv": {"duoattention": DUO, "snapkv": OBSERVED},
}
DRAWN = {"candidates": ROWS, "config": dataclasses.replace(TCA, density="random", reserve=0)}  # by a head's number
CASES = {name: (name, options) for name, options in OPTIONS.items()}
CASES |= {"tca by chance": ("tca", DRAWN)}


QUICK = ("adakv", "duoattention+snapkv", "kvzip", "quest", "tca")  # the others are slow


def quick_or_slow(quick):
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


def under(case, lm):
    name, options = CASES[case]
    return lm.with_method(name, **options)


def test_every_method_is_tried():
    assert {name for name in OPTIONS if "+" not in name} == set(methods.names())


@pytest.mark.parametrize("case", quick_or_slow(QUICK))
def test_batches_are_their_rows_and_contexts_repeat(case):
    lm = under(case, lm_of())
    out = tca_jax.generate(lm, PROMPTS, **ANSWER)
    assert out.tokens == [tca_jax.generate(lm, [prompt] * 3, **ANSWER).tokens[0] for prompt in PROMPTS]
    assert out.tokens[2] == tca_jax.generate(lm_of(), PROMPTS, **ANSWER).tokens[2]  # it fits the window
    context = tca_jax.prefill(lm, PROMPTS[0])
    assert 0 < context.stats.attended_share <= 1
    question, other = random_prompt(3, 7), random_prompt(4, 7)
    answers = tca_jax.generate(lm, [question, question, other], context=context, **ANSWER).tokens
    assert answers[0] == answers[1] != answers[2]


@needs_8_devices
@pytest.mark.parametrize("case", quick_or_slow(("minference", "streaming", "tca", "tca by chance")))
def test_a_mesh_answers_as_one_device(case):
    prompts = PROMPTS[:2]
    one, many = (under(case, lm) for lm in (lm_of(), lm_of(mesh_of((2, 2)))))
    expected, out = (tca_jax.generate(lm, prompts, logprobs=True, **ANSWER) for lm in (one, many))
    assert out.tokens == expected.tokens
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=2e-4)
    assert out.stats.attended_share == pytest.approx(expected.stats.attended_share, rel=1e-5)
    assert out.stats.kept_share == pytest.approx(expected.stats.kept_share)
    assert many.head_orders[0] != (0, 1, 2, 3) or not case.startswith("tca")
