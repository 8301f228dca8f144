"""Reading a prompt by predicted worth, in plain XLA: selected tokens, fetched blocks, means of the rest (DESIGN 2.5).

All settings are data: one program serves every variant.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.calibration.predicted_worth import WorthMaps, predict
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.layer_passes import TextPass, layer_program
from tca_jax.methods.pairs import causal_pairs
from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores

BLOCK = 128
FIRST = 4  # first tokens, which every query sees
WINDOW = 256  # a multiple of `BLOCK`


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a query sees beside the window and the first tokens."""

    selected: float = 0.05  # share of tokens selected by predicted worth
    mass: float = 0.1  # least mass of a block in a sampled query of the tile
    stride: int = 16  # every which query of a tile is sampled

    @property
    def label(self) -> str:
        """Name in tables."""
        sampled = [f"every query of {self.stride}"] if self.stride != Reading.stride else []
        parts = [f"window {WINDOW}", f"worth {self.selected:.0%}", f"blocks {self.mass:g}", "means by worth", *sampled]
        return "read by " + ", ".join(parts)


class LayerRead(NamedTuple):
    """A layer of a prompt that was read."""

    k: Float[Array, "1 L Hkv d"]
    v: Float[Array, "1 L Hkv d"]
    predicted: Float32[Array, "Hkv L"]
    pairs: Float32[Array, " Hkv"]  # attended by each head's queries, one query head


def read_sparsely(
    lm: LM, ids: Sequence[int], maps: WorthMaps, reading: Reading
) -> tuple[TextPass, Iterator[LayerRead]]:
    """A pass of a prompt, whose layers are read as they are drawn from the iterator."""
    passed = TextPass(lm, ids)
    settings = jnp.float32(maps.threshold(reading.selected)), jnp.float32(reading.mass)
    return passed, passed.layers(_read_layer, lambda number: (maps.maps[number], *settings), stride=reading.stride)


def attended_share(layers: Sequence[LayerRead], length: int) -> float:
    """Share of causal pairs that were attended to."""
    pairs = np.mean([on_host(layer.pairs) for layer in layers])
    return float(pairs / on_host(causal_pairs(jnp.asarray([length])))[0])


@functools.partial(layer_program, static=("stride",))
def _read_layer(
    module: Any,
    x: Float[Array, "1 L D"],
    cos: Array,
    sin: Array,
    maps: Float32[Array, "Hkv D1"],
    theta: Array,
    mass: Array,
    lengths: Int[Array, " 1"],
    *,
    stride: int,
) -> tuple[Array, LayerRead]:
    predicted = predict(maps, module.attention_norm(x))

    def attention(q: Array, k: Array, v: Array, _: None) -> tuple[Array, LayerRead]:
        out, pairs = _attend(q[0], k[0], v[0], predicted >= theta, predicted, lengths[0], mass, stride)
        return out[None], LayerRead(k, v, predicted, pairs)

    return module(x, cos, sin, attention, None)[:2]


def block_means(
    k: Float[Array, "L Hkv d"],
    v: Float[Array, "L Hkv d"],
    members: Bool[Array, "Hkv L"],
    log_weights: Float32[Array, "Hkv L"],
) -> tuple[Float32[Array, "blocks Hkv d"], Float32[Array, "blocks Hkv d"], Float32[Array, "Hkv blocks"]]:
    """Weighted mean key and value of the members of each block, and the entropy of the weights; -inf without members.

    With p the weights, a query's log sum of exp(q.k_j) is at least q.(sum p_j k_j) + entropy(p), whatever p is; equal
    weights give log n.
    """
    logits = jnp.where(members, log_weights, MASKED).reshape(members.shape[0], -1, BLOCK)
    there = members.reshape(logits.shape)
    p = jnp.where(there, jax.nn.softmax(logits, axis=-1), 0)
    entropy = jnp.where(there.any(axis=-1), -jnp.where(p > 0, p * jnp.log(p), 0).sum(axis=-1), -jnp.inf)
    mean_k, mean_v = (
        jnp.einsum("htb,tbhd->thd", p, x.astype(jnp.float32).reshape(-1, BLOCK, *x.shape[1:])) for x in (k, v)
    )
    return mean_k, mean_v, entropy


def _attend(
    q: Float[Array, "L Hq d"],
    k: Float[Array, "L Hkv d"],
    v: Float[Array, "L Hkv d"],
    selected: Bool[Array, "Hkv L"],
    worth: Float32[Array, "Hkv L"],  # predicted
    length: Int[Array, ""],
    mass: Array,
    stride: int,
) -> tuple[Float[Array, "L Hq d"], Float32[Array, " Hkv"]]:
    tokens, kv_heads, size = k.shape
    place, block = jnp.arange(tokens), jnp.arange(tokens // BLOCK)
    selected |= place < FIRST
    rest = ~selected & (place < length)
    mean_k, mean_v, entropy = block_means(k, v, rest, worth)
    tiles = q.reshape(-1, BLOCK, kv_heads, q.shape[1] // kv_heads, size)

    def of_tile(part: tuple[Array, Array]) -> tuple[Array, Array]:
        tile, q = part
        query = tile * BLOCK + jnp.arange(BLOCK)
        first = jnp.maximum(tile * BLOCK - WINDOW, 0)
        sampled = query[stride - 1 :: stride]
        estimate = scaled_scores("nhgd,lhd->hgnl", q[stride - 1 :: stride], k)
        p = jax.nn.softmax(jnp.where(place <= sampled[:, None], estimate, MASKED), axis=-1)
        of_block = p.reshape(*p.shape[:-1], -1, BLOCK).sum(axis=-1).max(axis=(1, 2))
        before = (block + 1) * BLOCK <= first
        fetched = before & (of_block >= mass)
        seen = selected | (place >= first) | jnp.repeat(fetched, BLOCK, axis=-1)
        mask = seen[:, None] & (place <= query[:, None])
        scores = jnp.where(mask[:, None], scaled_scores("nhgd,lhd->hgnl", q, k), MASKED)
        there = before & ~fetched & jnp.isfinite(entropy)
        logits = scaled_scores("nhgd,thd->hgnt", q.astype(jnp.float32), mean_k)
        logits = jnp.where(there[:, None, None], logits + entropy[:, None, None], MASKED)
        p = jax.nn.softmax(jnp.concatenate([scores, logits], axis=-1), axis=-1)
        out = jnp.einsum("hgnl,lhd->nhgd", p[..., :tokens].astype(v.dtype), v)
        out += jnp.einsum("hgnt,thd->nhgd", p[..., tokens:], mean_v).astype(v.dtype)
        real = (query < length)[:, None]
        pairs = (mask & real).sum(axis=(1, 2)) + there.sum(axis=-1) * real.sum()
        return out.reshape(BLOCK, -1, size), pairs.astype(jnp.float32)

    out, pairs = jax.lax.map(of_tile, (block, tiles))
    return out.reshape(q.shape), pairs.sum(axis=0)
