"""The registry: names, options, pairs, and methods as written."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_prompt, tiny_lm

import tca_jax
from tca_jax import methods
from tca_jax.methods.base import Heads
from tca_jax.methods.registry import with_known
from tca_jax.methods.written import joined, parse_parts
from tca_jax.models.rope import RopeConfig


def test_pairs_join_prefill_and_cache():
    pair = methods.get("full+streaming", streaming={"sinks": 9})
    assert pair.name == "full+streaming"
    assert pair.prefill == methods.get("full").prefill
    assert pair.cache == methods.get("streaming", sinks=9).cache
    assert not pair.prefill_reads_cache
    assert methods.get("full").prefill_reads_cache
    assert methods.get("streaming").prefill_reads_cache
    assert not methods.get("uniform+streaming").prefill_reads_cache


def test_known_values_fill_options_not_given():
    known = {"window": 32, "candidates": [[1]], "share": 0.5}
    assert with_known("random", known, {"share": 0.25}) == {"window": 32, "share": 0.25}
    assert with_known("full+random", known, {"random": {"seed": 1}}) == {
        "full": {},
        "random": {"window": 32, "share": 0.5, "seed": 1},
    }
    assert with_known("tca", known, {}) == {"candidates": [[1]]}


def test_models_give_their_rotation_to_methods():
    lm = tiny_lm()
    bare = methods.get("expected-attention")
    with pytest.raises(ValueError, match=r"frequencies = None: must be the model's; lm.with_method puts them in"):
        bare.cache.select(0, Heads.all(2), *[jnp.zeros((1, 256, 2, 16))] * 3, jnp.array([256]))
    given = lm.with_method(bare).method.cache.frequencies
    np.testing.assert_allclose(given, 10_000.0 ** -(np.arange(8) / 8), rtol=1e-6)
    sparse = methods.Method("sparse", methods.SparsePrefill(bare.cache), methods.get("full").cache)
    assert lm.with_method(sparse).method.prefill.selector.frequencies == given
    rope = RopeConfig(type="dynamic", factor=2.0, original_max_positions=4096)
    dynamic = dataclasses.replace(lm, config=dataclasses.replace(lm.config, rope=rope))
    with pytest.raises(ValueError, match=r"this model's RoPE changes with the length \(dynamic\)"):
        dynamic.with_method(bare)


# As written on a command line


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("full", (("full", {}),)),
        ("streaming:window=512,sinks=8", (("streaming", {"window": 512, "sinks": 8}),)),
        ("full+random:share=0.25", (("full", {}), ("random", {"share": 0.25}))),
        ("snapkv:pooling=max,capacity=null", (("snapkv", {"pooling": "max", "capacity": None}),)),
        ("mine+full", (("mine", {}), ("full", {}))),
    ],
)
def test_parts_have_names_and_option_values(text, parts):
    assert parse_parts(text, "--method", {"mine": ()}) == parts


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("random:share=0.5", "random", {"share": 0.5}),
        ("full+random:share=0.5", "full+random", {"random": {"share": 0.5}}),
        ("random:share=0.5+random:share=0.5", "random+random", {"random": {"share": 0.5}}),
    ],
)
def test_pairs_have_options_by_part_names(text, name, options):
    assert joined(parse_parts(text, "--method"), "--method") == (name, options)


def test_capacities_of_another_number_of_heads_are_refused():
    class Three(type(methods.get("streaming").cache)):
        def capacities(self, layer, prompt_tokens):
            return (1, 1, 1)

    model = tiny_lm().with_method(methods.Method("three", methods.get("full").prefill, Three()))
    with pytest.raises(ValueError, match=r"Three.capacities\(0, .*\) = \(1, 1, 1\): must be one number, or 2"):
        tca_jax.generate(model, random_prompt(0, 50), max_new_tokens=2)
