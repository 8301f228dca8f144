"""The registry: names, options, pairs, and what is refused."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_lm

from tca_jax import methods
from tca_jax.methods.base import Heads
from tca_jax.methods.registry import _FACTORIES, current_types, describe_method, with_known
from tca_jax.models.rope import RopeConfig


@pytest.fixture
def registry(monkeypatch):
    """A registry that forgets what a test puts into it."""
    monkeypatch.setattr("tca_jax.methods.registry._FACTORIES", dict(_FACTORIES))


def test_every_member_is_made_by_its_name_and_is_hashable():
    needed = {"tca": {"candidates": 3}, "cake": {"preferences": [1, 2]}, "duoattention": {"gates": [[1, 0], [0, 1]]}}
    needed |= {"kvzip-heads": {"head_scores": [[1, 0], [0, 1]]}}
    for name in methods.names():
        method = methods.get(name, **needed.get(name, {}))
        assert method.name == name
        assert hash(method) == hash(dataclasses.replace(method))


def test_a_pair_has_the_prefill_of_the_first_and_the_cache_of_the_second():
    pair = methods.get("full+streaming", streaming={"sinks": 9})
    assert pair.name == "full+streaming"
    assert pair.prefill == methods.get("full").prefill
    assert pair.cache == methods.get("streaming", sinks=9).cache
    assert not pair.prefill_reads_cache
    assert methods.get("full").prefill_reads_cache
    assert methods.get("streaming").prefill_reads_cache
    assert not methods.get("uniform+streaming").prefill_reads_cache


def test_what_is_known_of_a_model_goes_to_the_options_that_take_it_and_gives_way_to_what_is_given():
    known = {"window": 32, "candidates": [[1]], "share": 0.5}
    assert with_known("random", known, {"share": 0.25}) == {"window": 32, "share": 0.25}
    assert with_known("full+random", known, {"random": {"seed": 1}}) == {
        "full": {},
        "random": {"window": 32, "share": 0.5, "seed": 1},
    }
    assert with_known("tca", known, {}) == {"candidates": [[1]]}
    with pytest.raises(ValueError, match="has no part 'window'"):
        with_known("full+random", known, {"window": 8})


def test_a_registered_method_is_found_by_name(registry):
    mine = dataclasses.replace(methods.get("random"), name="mine")
    methods.register("mine", lambda: mine)
    assert methods.get("mine") is mine
    assert methods.get("full+mine").cache == mine.cache
    assert tiny_lm().with_method("mine").method is mine


def test_a_factory_that_returns_no_method_is_refused(registry):
    methods.register("broken", lambda: 3)
    with pytest.raises(ValueError, match=r"method 'broken': its factory returned a int, must be a Method"):
        methods.get("broken")


def test_with_method_takes_a_method_or_a_name_and_nothing_else():
    lm = tiny_lm()
    with pytest.raises(TypeError, match=r"options \['sinks'\] go with a method's name"):
        lm.with_method(methods.get("full"), sinks=3)
    streaming = lm.with_method("streaming", sinks=3)
    assert streaming.method == methods.get("streaming", sinks=3)
    assert streaming.with_profile(None).method == methods.BASELINE
    assert "streaming" in repr(streaming)


def test_a_model_gives_its_rotation_to_the_methods_that_need_it():
    lm = tiny_lm()
    bare = methods.get("expected-attention")
    with pytest.raises(ValueError, match=r"frequencies = None: must be the model's; lm.with_method puts them in"):
        bare.cache.select(0, Heads.all(2), *[jnp.zeros((1, 256, 2, 16))] * 3, jnp.array([256]), "xla")
    given = lm.with_method(bare).method.cache.frequencies
    np.testing.assert_allclose(given, 10_000.0 ** -(np.arange(8) / 8), rtol=1e-6)
    sparse = methods.Method("sparse", methods.SparsePrefill(bare.cache), methods.get("full").cache)
    assert lm.with_method(sparse).method.prefill.selector.frequencies == given
    rope = RopeConfig(type="dynamic", factor=2.0, original_max_positions=4096)
    dynamic = dataclasses.replace(lm, config=dataclasses.replace(lm.config, rope=rope))
    with pytest.raises(ValueError, match=r"this model's RoPE changes with the length \(dynamic\)"):
        dynamic.with_method(bare)


def test_a_taken_or_joined_name_is_refused():
    with pytest.raises(ValueError, match="name = 'full' is registered already; pass replace=True"):
        methods.register("full", methods.get)
    with pytest.raises(ValueError, match=r"name = 'a\+b': must be a non-empty string without '\+'"):
        methods.register("a+b", methods.get)


def test_descriptions_of_moved_methods_stay_readable():
    pair = methods.get("tca+kvzip", tca={"candidates": 3}, kvzip={"share": 0.5})
    described = describe_method(pair)
    before = described.replace("tca_jax.lab.rivals", "tca_jax.methods")
    assert before != described == current_types(before) == current_types(described)
