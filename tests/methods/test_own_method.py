"""A method of a user's own, defined here alone: what the interface promises, with no file of the package touched."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from cases import unchecked
from tiny import random_prompt, tiny_lm, write_checkpoint

import tca_jax
from tca_jax import methods
from tca_jax.lab.plots import inspection
from tca_jax.pallas_kernels.select_tokens import select_tokens


@dataclasses.dataclass(frozen=True)
class LoudKeys(methods.CachePolicy):
    """Keeps keys of a large norm: more of them in even layers, and as many of a block as stand out there."""

    threshold: float = 1.0
    block_size: int = 8
    window: int = 16

    def capacities(self, layer, prompt_tokens):
        blocks = self.num_ranked_blocks(prompt_tokens)
        return (blocks * self.most(layer), blocks)  # KV heads may differ

    def most(self, layer):
        return 6 if layer % 2 == 0 else 2

    def select(self, layer, heads, q, k, v, lengths, backend):
        norms = jnp.linalg.norm(k.astype(jnp.float32), axis=-1).swapaxes(1, 2)  # [B, Hkv, L]
        batch, heads, tokens = norms.shape
        blocks = tokens // self.block_size
        by_block = norms[..., : blocks * self.block_size].reshape(batch, heads, blocks, self.block_size)
        loud = (by_block > self.threshold * by_block.mean(axis=-1, keepdims=True)).sum(axis=-1)
        most = jnp.array([self.most(layer), 1])[:, None]
        ranked = jnp.arange(blocks) < self.num_ranked_blocks(lengths)[:, None, None]
        return methods.Selection(norms, jnp.where(ranked, jnp.minimum(loud, most), 0).astype(jnp.int32))


def loud_keys(threshold: float = 1.0) -> methods.Method:
    policy = LoudKeys(threshold)
    return methods.Method("loud-keys", methods.SparsePrefill(policy), policy)


@pytest.fixture(scope="module", autouse=True)
def registered():
    methods.register("loud-keys", loud_keys, replace=True)
    yield
    del methods.registry._FACTORIES["loud-keys"]  # of tests in the same process


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("own") / "tiny")
    return tca_jax.load(folder)


def test_what_it_keeps_depends_on_layer_head_and_data():
    mine = tiny_lm().with_method("loud-keys")
    counts = [inspection.kept_tokens(mine, random_prompt(seed, 120)).sum(axis=-1) - 16 for seed in range(3)]
    assert all((count[:, 1] == 13).all() for count in counts)  # one of each ranked block
    assert all(count[0, 0] > count[1, 0] for count in counts)
    assert len({int(count[0, 0]) for count in counts}) > 1


def test_text_is_scored_under_it(lm):
    text = "for i in range(10): print(i)\n" * 6
    full = tca_jax.score(lm, text).logprobs[0]
    mine = tca_jax.score(lm.with_method("loud-keys"), text).logprobs[0]
    assert mine.shape == full.shape == (len(text) - 1,)
    np.testing.assert_allclose(mine[:15], full[:15], atol=1e-4)  # inside the window nothing is dropped
    assert np.abs(mine - full).max() > 1e-3


def test_capacities_of_another_number_of_heads_are_refused():
    lm = tiny_lm()

    class Three(LoudKeys):
        def capacities(self, layer, prompt_tokens):
            return (1, 1, 1)

    model = lm.with_method(methods.Method("three", methods.SparsePrefill(Three()), Three()))
    with pytest.raises(ValueError, match=r"Three.capacities\(0, .*\) = \(1, 1, 1\): must be one number, or 2"):
        tca_jax.generate(model, random_prompt(0, 50), max_new_tokens=2)


def test_wrong_scores_are_named():
    k, budgets, offsets = jnp.zeros((1, 64, 2, 16)), jnp.zeros((1, 2, 4), jnp.int32), jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"^scores has shape \(1, 2, 8\): must be \[B = 1, Hkv = 2, L = 64\]"):
        unchecked(select_tokens)(jnp.zeros((1, 2, 8)), budgets, k, k, offsets, block_size=16, pool_tokens=64)
