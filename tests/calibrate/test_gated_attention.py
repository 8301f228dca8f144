"""Attention under both readings of a head, and its derivatives, against masks that are held constant."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import poison, qkv
from reading_oracle import read

from tca_jax.calibration import gated_attention
from tca_jax.methods.base import Heads
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.tca import tca

CONFIG = TCAConfig(block_size=8, window=16, reserve=3, observation=6, spread=2, fetch=2, fetch_stride=4)
#: Heads of a group, KV heads, tokens, and what these are padded to.
SHAPES = [(1, 3, 101, 112), (2, 2, 128, 128), (7, 1, 77, 77)]
NOISE = 1e-5


def operands(group, kv_heads, length, columns, padding=np.nan):
    """q, k, v with something past the length, the length, and the heads' numbers."""
    q, k, v = qkv(group, 1, columns, group * kv_heads, kv_heads, 16, 0.8)
    given = (np.asarray(poison(x, [length], padding)) for x in (q, k, v))
    return (*given, np.array([length], np.int32)), np.arange(kv_heads)


def gates_of(kv_heads):
    return np.asarray(np.arange(kv_heads) % 2 == 0, np.float32)


read_both = jax.jit(gated_attention.read_both, static_argnums=5)
attend_gated = jax.jit(gated_attention.attend_gated, static_argnums=6)


@functools.partial(jax.jit, static_argnums=7)
def gated_gradients(q, k, v, gates, heads, lengths, cotangent, config):
    """The output, and what its cotangent pulls back to."""
    out, pullback = jax.vjp(lambda *x: gated_attention.attend_gated(*x, gates, heads, lengths, config), q, k, v)
    return out, pullback(cotangent)


def masks_of(q, k, length, gates):
    """Of each KV head [Hkv, L, L]: blocks at a gate of 1, sparse at 0."""
    group, masks = q.shape[2] // k.shape[2], []
    for head, gate in enumerate(gates):
        queries = np.asarray(q[0, :length, head * group : (head + 1) * group], np.float64)
        reading = "blocks" if gate else "sparse"
        mask, margin = read(queries, np.asarray(k[0, :length, head], np.float64), reading, 0, CONFIG)
        assert margin > NOISE
        masks.append(mask)
    return np.stack(masks)


def masked(q, k, v, masks):
    """Attention of q [L, Hq, d], k and v [L, Hkv, d], by masks [Hkv, L, L]."""
    length, kv_heads, dim = k.shape
    queries = q.reshape(length, kv_heads, -1, dim)
    scores = jnp.einsum("ihgd,jhd->hgij", queries, k, precision="highest") / np.sqrt(dim)
    weights = jax.nn.softmax(jnp.where(masks[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("hgij,jhd->ihgd", weights, v, precision="highest").reshape(q.shape)


@jax.jit
def masked_gradients(q, k, v, masks, cotangent):
    out, pullback = jax.vjp(lambda *x: masked(*x, masks), q, k, v)
    return out, pullback(cotangent)


@functools.partial(jax.jit, static_argnums=0)
def read_as(reading, q, k, v, lengths):
    """As the method reads, without derivatives."""
    prefill = tca(0, CONFIG, readings=reading).prefill
    return prefill.attend(0, Heads.all(k.shape[2]), q, k, v, lengths, None, "xla")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_readings_are_those_of_the_method(shape):
    (q, k, v, lengths), heads = operands(*shape)
    both = read_both(q, k, v, heads, lengths, CONFIG)
    for number, reading in enumerate(("sparse", "blocks")):
        expected = read_as(reading, q, k, v, lengths)
        np.testing.assert_allclose(getattr(both, reading), expected.out, atol=1e-6)
        np.testing.assert_allclose(both.pairs[:, number].mean(), expected.pairs[0], rtol=1e-6)
    assert np.abs(np.asarray(both.sparse - both.blocks)).max() > 0.05


@pytest.mark.parametrize("all_gates", [0.0, 1.0, None], ids=["sparse", "blocks", "mixed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_equal_attention_by_masks(shape, all_gates):
    length = shape[2]
    (q, k, v, lengths), heads = operands(*shape)
    gates = gates_of(shape[1]) if all_gates is None else np.full(shape[1], all_gates, np.float32)
    cotangent = np.random.default_rng(0).standard_normal(q.shape).astype(np.float32)
    out, found = gated_gradients(q, k, v, gates, heads, lengths, cotangent, CONFIG)
    own = [x[0, :length] for x in (q, k, v)]
    masks = masks_of(q, k, length, gates)
    expected_out, expected = masked_gradients(*own, masks, cotangent[0, :length])
    np.testing.assert_allclose(out[0, :length], expected_out, atol=1e-5)
    for name, mine, theirs in zip("qkv", found, expected, strict=True):
        np.testing.assert_allclose(mine[0, :length], theirs, atol=2e-5, err_msg=name)
        assert not np.asarray(mine[0, length:]).any(), name


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_gate_derivatives_are_slopes(shape):
    (q, k, v, lengths), heads = operands(*shape)
    both, gates = read_both(q, k, v, heads, lengths, CONFIG), gates_of(shape[1])
    weights = np.random.default_rng(1).standard_normal(q.shape).astype(np.float32)

    def loss(out):
        return (jnp.sin(3 * out) * weights).sum()

    @jax.jit
    def loss_of(gates):
        return loss(both.mixed(gates))

    found = jax.jit(jax.grad(lambda gates: loss(attend_gated(q, k, v, gates, heads, lengths, CONFIG))))(gates)
    step = 1e-2
    for head in range(shape[1]):
        beside = [loss_of(gates + sign * step * (heads == head)) for sign in (1, -1)]
        assert float(found[head]) == pytest.approx(float(beside[0] - beside[1]) / (2 * step), rel=5e-3, abs=5e-2)
    assert np.abs(found).min() > 0.1


def test_gradients_take_linear_memory():
    """No array of the backward pass is as large as all pairs of tokens."""

    def largest(tokens):
        x, lengths = jnp.zeros((1, tokens, 2, 8)), jnp.array([tokens])
        gates, heads = jnp.array([0.0, 1.0]), jnp.arange(2)

        def slope(q):
            return jax.grad(lambda q: attend_gated(q, x, x, gates, heads, lengths, CONFIG).sum())(q)

        return max(sizes(jax.make_jaxpr(slope)(x).jaxpr))

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (int(np.prod(getattr(out.aval, "shape", ()))) for out in equation.outvars)
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                    yield from sizes(getattr(inner, "jaxpr", inner))

    # A bool or a float of each pair of tiles is allowed: L^2 / b^2 is little. All pairs of tokens are not.
    assert largest(4096) < 4096**2 / 8
