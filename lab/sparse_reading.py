"""Reading a prompt by predicted worth, in plain XLA: selected tokens, fetched blocks, means of the rest (DESIGN 2.5).

All settings are data: one program serves every variant.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from tca_jax.calibration.predicted_worth import WorthMaps, predict
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.errors import require
from tca_jax.layer_passes import TextPass, layer_program
from tca_jax.methods.pairs import causal_pairs
from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores

BLOCK = 128
FIRST = 4  # first tokens, which every query sees


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a query sees beside the first tokens."""

    window: int = 1_024  # a multiple of `BLOCK`
    selected: float | None = None  # share of tokens selected by predicted worth; None for none
    mass: float = math.inf  # least mass of a block, times the head's weight, in a sampled query of the tile
    weighted: bool = True  # whether heads have their weights
    means: bool = False  # whether the other tokens of a block are seen as their mean
    mean_weights: bool = False  # whether predicted worth weights them in it
    stride: int = 16  # every which query of a tile is sampled

    @property
    def label(self) -> str:
        """Name in tables."""
        parts = [f"window {self.window}"]
        parts += [f"worth {self.selected:.0%}"] if self.selected is not None else []
        blocks = "weighted blocks" if self.weighted else "blocks"
        parts += [f"{blocks} {self.mass:g}"] if math.isfinite(self.mass) else []
        parts += [mean_label(self.mean_weights)] * self.means
        parts += [f"every query of {self.stride}"] if self.stride != Reading.stride else []
        return "read by " + ", ".join(parts)


def mean_label(weighted: bool) -> str:
    """Name of means in tables."""
    return "means by worth" if weighted else "means"


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
    require(reading.window % BLOCK == 0, f"window = {reading.window}: must be a multiple of {BLOCK}")
    passed = TextPass(lm, ids)
    theta = math.inf if reading.selected is None else maps.threshold(reading.selected)
    settings = theta, reading.mass, reading.window, reading.means
    scalars = tuple(map(jnp.float32, (*settings, reading.mean_weights)))

    def arrays(number: int) -> tuple[Any, ...]:
        weight = maps.head_weights[number]
        return maps.maps[number], weight if reading.weighted else np.ones_like(weight), *scalars

    return passed, passed.layers(_read_layer, arrays, stride=reading.stride)


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
    weight: Float32[Array, " Hkv"],
    theta: Array,
    mass: Array,
    window: Array,
    means: Array,
    mean_weights: Array,
    lengths: Int[Array, " 1"],
    *,
    stride: int,
) -> tuple[Array, LayerRead]:
    predicted = predict(maps, module.attention_norm(x))

    def attention(q: Array, k: Array, v: Array, _: None) -> tuple[Array, LayerRead]:
        settings = (weight, mass, window.astype(jnp.int32), means > 0, mean_weights * predicted)
        out, pairs = _attend(q[0], k[0], v[0], predicted >= theta, lengths[0], *settings, stride)
        return out[None], LayerRead(k, v, predicted, pairs)

    return module(x, cos, sin, attention, None)[:2]


def block_means(
    k: Float[Array, "L Hkv d"],
    v: Float[Array, "L Hkv d"],
    members: Bool[Array, "Hkv L"],
    log_weights: Float32[Array, "Hkv L"],
    size: int = BLOCK,
) -> tuple[Float32[Array, "blocks Hkv d"], Float32[Array, "blocks Hkv d"], Float32[Array, "Hkv blocks"]]:
    """Weighted mean key and value of the members of each block, and the entropy of the weights; -inf without members.

    With p the weights, a query's log sum of exp(q.k_j) is at least q.(sum p_j k_j) + entropy(p), whatever p is; equal
    weights give log n.
    """
    logits = jnp.where(members, log_weights, MASKED).reshape(members.shape[0], -1, size)
    there = members.reshape(logits.shape)
    p = jnp.where(there, jax.nn.softmax(logits, axis=-1), 0)
    entropy = jnp.where(there.any(axis=-1), -jnp.where(p > 0, p * jnp.log(p), 0).sum(axis=-1), -jnp.inf)
    mean_k, mean_v = (
        jnp.einsum("htb,tbhd->thd", p, x.astype(jnp.float32).reshape(-1, size, *x.shape[1:])) for x in (k, v)
    )
    return mean_k, mean_v, entropy


def _attend(
    q: Float[Array, "L Hq d"],
    k: Float[Array, "L Hkv d"],
    v: Float[Array, "L Hkv d"],
    selected: Bool[Array, "Hkv L"],
    length: Int[Array, ""],
    weight: Float32[Array, " Hkv"],
    mass: Array,
    window: Int32[Array, ""],
    means: Bool[Array, ""],
    mean_logits: Float32[Array, "Hkv L"],
    stride: int,
) -> tuple[Float[Array, "L Hq d"], Float32[Array, " Hkv"]]:
    tokens, kv_heads, size = k.shape
    place, block = jnp.arange(tokens), jnp.arange(tokens // BLOCK)
    selected |= place < FIRST
    rest = ~selected & (place < length)
    mean_k, mean_v, entropy = block_means(k, v, rest, mean_logits)
    tiles = q.reshape(-1, BLOCK, kv_heads, q.shape[1] // kv_heads, size)

    def of_tile(part: tuple[Array, Array]) -> tuple[Array, Array]:
        tile, q = part
        query = tile * BLOCK + jnp.arange(BLOCK)
        first = jnp.maximum(tile * BLOCK - window, 0)
        sampled = query[stride - 1 :: stride]
        estimate = scaled_scores("nhgd,lhd->hgnl", q[stride - 1 :: stride], k)
        p = jax.nn.softmax(jnp.where(place <= sampled[:, None], estimate, MASKED), axis=-1)
        of_block = p.reshape(*p.shape[:-1], -1, BLOCK).sum(axis=-1).max(axis=(1, 2)) * weight[:, None]
        before = (block + 1) * BLOCK <= first
        fetched = before & (of_block >= mass)
        seen = selected | (place >= first) | jnp.repeat(fetched, BLOCK, axis=-1)
        mask = seen[:, None] & (place <= query[:, None])
        scores = jnp.where(mask[:, None], scaled_scores("nhgd,lhd->hgnl", q, k), MASKED)
        there = means & before & ~fetched & jnp.isfinite(entropy)
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
