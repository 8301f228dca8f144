"""The registry: names, options, pairs, and what is refused."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from cases import unchecked
from tiny import tiny_lm

from tca_jax import methods
from tca_jax.lab.rivals.duoattention import duoattention
from tca_jax.methods.base import Heads
from tca_jax.methods.registry import _FACTORIES, with_known
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: methods.get("nope"),
            r"method 'nope' is not registered: must be one of \['adakv', 'adakv-expected-attention', ",
        ),
        (lambda: methods.get("full+nope"), r"method 'nope' is not registered"),
        (lambda: methods.get("full+full+full"), r"at most two methods can be joined"),
        (lambda: methods.get("streaming", sink=3), r"options of method 'streaming': .*'sink'; it takes \(sinks: "),
        (lambda: methods.get("tca"), r"options of method 'tca': missing a required argument: 'candidates'"),
        (lambda: methods.get("full+streaming", sinks=3), r"has no part 'sinks'"),
        (lambda: methods.get("full+streaming", streaming=3), r"streaming = 3: options of a part"),
        (lambda: methods.get("streaming", sinks=-1), r"sinks = -1: must be an integer of at least 0"),
        (
            lambda: methods.get("streaming", window=100),
            r"window = 100: must be a positive multiple of block_size = 128",
        ),
        (lambda: methods.get("streaming", block_size=96), r"block_size = 96: must be a power of two"),
        (lambda: methods.get("random", share=0), r"share = 0: must lie in \(0, 1\]"),
        (lambda: methods.get("random", share=True), r"share = True: must be a finite number"),
        (lambda: methods.get("random", seed=2**32), r"seed = 4294967296: must lie in \[0, 2\^32\)"),
        (lambda: methods.get("cake"), r"options of method 'cake': missing a required argument: 'preferences'"),
        (
            lambda: methods.get("snapkv", capacity=128),
            r"capacity = 128: must be more than window = 128, which counts in",
        ),
        (lambda: methods.get("snapkv", capacity=0), r"capacity = 0: must be an integer of at least 1"),
        (lambda: methods.get("snapkv", share=1.5), r"share = 1.5: must lie in \(0, 1\]"),
        (lambda: methods.get("snapkv", observation=129), r"observation = 129: must be at most window = 128, whose"),
        (lambda: methods.get("snapkv", kernel=4), r"kernel = 4: must be odd"),
        (lambda: methods.get("snapkv", pooling="sum"), r"pooling = 'sum': must be one of \['avg', 'max'\]"),
        (lambda: methods.get("adakv", safeguard=1.5), r"safeguard = 1.5: must lie in \[0, 1\]"),
        (lambda: methods.get("pyramidkv", beta=0.5), r"beta = 0.5: must be a finite number of at least 1"),
        (lambda: unchecked(duoattention)([[1]], dense_prefill=0), r"dense_prefill = 0: must be True or False"),
        (lambda: methods.get("expected-attention", future=0), r"future = 0: must be an integer of at least 1"),
        (lambda: methods.get("expected-attention", sinks=-1), r"sinks = -1: must be an integer of at least 0"),
        (lambda: methods.get("expected-attention", epsilon=-1), r"epsilon = -1: must be a finite number of at least 0"),
        (lambda: methods.get("uniform", candidate=15), r"candidates = 15: must lie in \[0, 14\]"),
        (lambda: methods.get("tca", candidates=[[0, 15]]), r"candidates\[0\]\[1\] = 15: must lie in \[0, 14\]"),
        (lambda: methods.register("full", methods.get), r"name = 'full' is registered already; pass replace=True"),
        (lambda: methods.register("a+b", methods.get), r"name = 'a\+b': must be a non-empty string without '\+'"),
        (
            lambda: tiny_lm().with_method("tca", candidates=[[0, 0]] * 3),
            r"candidates has 3 layers of 2 KV heads: must be 2 of 2",
        ),
    ],
)
def test_what_is_not_allowed_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


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
