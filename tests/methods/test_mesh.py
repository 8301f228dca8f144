"""Every method of the registry and pairs of them, over a mesh: the answers of one device; and every kind of kernel."""

from __future__ import annotations

import numpy as np
import pytest
from meshes import ROWS, lm_of, mesh_of, needs_8_devices, with_tca
from tiny import TCA, random_prompt

import tca_jax
from tca_jax import methods
from tca_jax.lab.equal_bytes import with_bytes
from tca_jax.lab.plots import inspection

pytestmark = needs_8_devices

GEOMETRY = {"block_size": 8, "window": 16}
PROMPTS = [random_prompt(0, 90), random_prompt(1, 61)]
GATES = [[0.9, 0.8, 0.1, 0.2], [0.1, 0.7, 0.95, 0.3]]
KINDS = ("vertical_slash", "a_shape", "block_sparse")
PATTERNS = [[[KINDS[(layer + head) % 3], 9 + head, 11 + layer] for head in range(8)] for layer in range(2)]
BLOCKS = {"block_size": 16, "dense_tokens": 16}
OPTIONS = {
    "adakv": {"share": 0.3, "observation": 4, **GEOMETRY},
    "adakv-expected-attention": {"share": 0.3, "future": 16, **GEOMETRY},
    "cake": {"preferences": [0.3, 0.7], "share": 0.3, "observation": 4, **GEOMETRY},
    "duoattention": {"gates": GATES, "sinks": 3, **GEOMETRY},
    "expected-attention": {"share": 0.3, "future": 16, **GEOMETRY},
    "flexprefill": {"block_size": 16, "min_budget": 32},
    "full": {},
    "h2o": {"share": 0.3, **GEOMETRY},
    "keydiff": {"share": 0.3, **GEOMETRY},
    "kvzip": {"share": 0.3, "chunk": 32, **GEOMETRY},
    "kvzip-heads": {"head_scores": GATES, "sinks": 3, **GEOMETRY},
    "minference": {**BLOCKS, "patterns": PATTERNS, "blocks": 2},
    "pyramidkv": {"share": 0.3, "observation": 4, **GEOMETRY},
    "quest": {"budget": 32, "dense_layers": 1, **GEOMETRY},
    "random": {"share": 0.4, **GEOMETRY},
    "snapkv": {"share": 0.3, "observation": 4, **GEOMETRY},
    "streaming": {"sinks": 3, **GEOMETRY},
    "tca": {"candidates": ROWS, "config": TCA, "prefill_candidates": [[0, 2, 0, 1], [3, 0, 1, 2]]},
    "tova": {"share": 0.3, **GEOMETRY},
    "uniform": {"candidate": 4, "config": TCA},
    "xattention": {**BLOCKS, "threshold": 0.6, "stride": 4},
    "xattention+keydiff": {
        "xattention": {**BLOCKS, "threshold": [[0.3 + 0.08 * head for head in range(8)]] * 2, "stride": 4, "chunk": 32},
        "keydiff": {"share": 0.3, **GEOMETRY},
    },
    "minference+tca": {
        "minference": {**BLOCKS, "patterns": PATTERNS, "blocks": 2},
        "tca": {"candidates": ROWS, "config": TCA},
    },
    "duoattention+kvzip": {
        "duoattention": {"gates": GATES, "sinks": 3, **GEOMETRY},
        "kvzip": {"level": "layer", "chunk": 32, **GEOMETRY},
    },
    "duoattention+snapkv": {
        "duoattention": {"gates": GATES, "sinks": 3, **GEOMETRY},
        "snapkv": {"share": 0.3, "observation": 4, **GEOMETRY},
    },
}
#: The others are slow.
QUICK = ("streaming", "tca")


def test_every_method_is_tried():
    assert {name for name in OPTIONS if "+" not in name} == set(methods.names())


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS]
)
def test_answers_are_those_of_one_device(name):
    one, many = (lm.with_method(name, **OPTIONS[name]) for lm in (lm_of(), lm_of(mesh_of((2, 2)))))
    options = {"max_new_tokens": 12, "stop_token_ids": (), "logprobs": True}
    expected, out = (tca_jax.generate(lm, PROMPTS, **options) for lm in (one, many))
    assert out.tokens == expected.tokens
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=2e-4)


def test_random_densities_are_drawn_by_the_number_of_a_head():
    config = tca_jax.TCAConfig(block_size=8, window=16, density="random", reserve=0)
    one, many = (lm.with_method("tca", candidates=ROWS, config=config) for lm in (lm_of(), lm_of(mesh_of((1, 2)))))
    assert many.head_orders[0] != (0, 1, 2, 3)
    expected, out = (tca_jax.generate(lm, PROMPTS, max_new_tokens=8, stop_token_ids=()) for lm in (one, many))
    assert out.tokens == expected.tokens


def test_kept_tokens_are_told_in_the_models_own_order():
    one, many = with_tca(lm_of()), with_tca(lm_of(mesh_of((1, 2))))
    np.testing.assert_array_equal(inspection.kept_tokens(many, PROMPTS[0]), inspection.kept_tokens(one, PROMPTS[0]))


@pytest.mark.slow
@pytest.mark.parametrize("level", ["pair", "layer"])
def test_heads_that_were_moved_share_budgets_as_in_the_models_own_order(level):
    options = {"level": level, "chunk": 32, **GEOMETRY}
    one, many = (with_tca(lm).with_method("kvzip", **options) for lm in (lm_of(), lm_of(mesh_of((1, 2)))))
    assert many.head_orders[0] != (0, 1, 2, 3)
    kept = inspection.kept_tokens(one, PROMPTS[0])
    np.testing.assert_array_equal(inspection.kept_tokens(many, PROMPTS[0]), kept)
    assert len(set(kept.sum(axis=-1).ravel().tolist())) > 1
    options = {"max_new_tokens": 8, "stop_token_ids": ()}
    assert tca_jax.generate(many, PROMPTS, **options).tokens == tca_jax.generate(one, PROMPTS, **options).tokens


def test_a_budget_is_found_for_a_model_on_a_mesh():
    found = [
        with_bytes(lm, "snapkv", 0.5, 3000, 64, observation=4, **GEOMETRY) for lm in (lm_of(), lm_of(mesh_of((1, 2))))
    ]
    assert found[0].method == found[1].method
