"""Reading and decoding by predicted worth: one program for every layer, one for a step (DESIGN section 5).

Reading is a loop of the host over layers. A step is one program for all layers and rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int, Int32

from tca_jax.calibration.predicted_worth import WorthMaps
from tca_jax.engine.lm import LM
from tca_jax.engine.pages import Allocator, FreePages, PageTable, Pool, append, evict, write_layer
from tca_jax.engine.prompts import pad_tokens
from tca_jax.methods.worth import FIRST, ReadSettings, attend_by_worth, block_means, select_by_worth
from tca_jax.models.decoder import Decoder
from tca_jax.pallas_kernels.numerics import cdiv
from tca_jax.pallas_kernels.paged_attention import paged_attention


class Settings(NamedTuple):
    """What a profile says of all layers; all data."""

    maps: Float32[Array, "layers Hkv D1"]
    theta: Float32[Array, ""]  # of what stays
    read: ReadSettings


def settings_of(maps: WorthMaps, kept: float, read: float, mass: float = 0.1) -> Settings:
    """Settings of shares of the tokens that stay and that prompts select."""
    reading = ReadSettings(jnp.float32(maps.threshold(read)), jnp.float32(mass), jnp.asarray(True))
    return Settings(jnp.asarray(maps.maps), jnp.float32(maps.threshold(kept)), reading)


@dataclasses.dataclass
class Runtime:
    """A model, its pages, and rows of answers."""

    lm: LM
    settings: Settings
    pool: Pool
    table: PageTable
    allocator: Allocator
    window: int = 256
    stride: int = 16

    @classmethod
    def create(cls, lm: LM, settings: Settings, *, rows: int, pages: int, columns: int, window: int = 256) -> Runtime:
        """An empty pool."""
        c, b = lm.config, 128
        pool = Pool.empty(pages, b, c.head_dim, lm.cache_dtype)
        table = PageTable.empty(c.num_layers, rows, c.num_kv_heads, columns, window // b + 1, cdiv(columns, b), b)
        return cls(lm, settings, pool, table, Allocator(pages), window)

    def read(self, row: int, ids: Sequence[int]) -> Float32[Array, " V"]:
        """Reads a prompt into a row; the logits of the token after it."""
        tokens, lengths = map(jnp.asarray, pad_tokens([list(ids)]))
        tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % self.pool.page_size)))
        layers = [nnx.split(layer) for layer in self.lm.decoder.layers]
        x, cos, sin = _embed(*_parts(self.lm.decoder), tokens, lengths)
        most = self._most_pages(tokens.shape[1])
        free = self._free_pages(min(most, self.allocator.free))
        for number, (graphdef, weights) in enumerate(layers):
            x, self.pool, self.table, free = _read_layer(
                graphdef,
                weights,
                x,
                cos,
                sin,
                self.settings.maps[number],
                self.settings.theta,
                self.settings.read,
                lengths,
                self.pool,
                self.table,
                free,
                jnp.int32(number),
                jnp.int32(row),
                window=self.window,
                stride=self.stride,
            )
        self._put_back(free)
        return _logits(*_parts(self.lm.decoder), x, lengths)

    def step(self, tokens: Int32[np.ndarray, " R"]) -> Float32[Array, "R V"]:
        """Feeds one token to every row; the logits of the next ones."""
        b = self.pool.page_size
        length, start = (np.asarray(x) for x in (self.table.length, self.table.start))
        if (length - start >= self.window + b).any():
            free = self._free_pages(2 * self.table.kept.size)
            self.pool, self.table, free = evict(self.pool, self.table, free, self.settings.theta)
            self._put_back(free)
        logits, self.pool, self.table = _step(
            *_parts(self.lm.decoder), self.settings.maps, jnp.asarray(tokens), self.pool, self.table, window=self.window
        )
        return logits

    def _most_pages(self, length: int) -> int:
        c, b = self.lm.config, self.pool.page_size
        return c.num_layers * c.num_kv_heads * (cdiv(length, b) + cdiv(length, b * b) + self.window // b + 1)

    def _free_pages(self, count: int) -> FreePages:
        return FreePages(jnp.asarray(self.allocator.take(count), jnp.int32), jnp.int32(0))

    def _put_back(self, free: FreePages) -> None:
        self.allocator.release(np.asarray(free.numbers)[int(free.taken) :].tolist())


def _parts(decoder: Decoder) -> tuple[Any, Any]:
    return nnx.split(decoder)


@functools.partial(jax.jit, static_argnums=0)
def _embed(graphdef: Any, weights: Any, tokens: Array, lengths: Array) -> tuple[Array, Array, Array]:
    decoder = nnx.merge(graphdef, weights)
    return decoder.embed(tokens), *decoder.angles(jnp.minimum(jnp.arange(tokens.shape[1]), lengths[:, None] - 1))


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef: Any, weights: Any, x: Float[Array, "1 L D"], lengths: Array) -> Float32[Array, " V"]:
    decoder = nnx.merge(graphdef, weights)
    return decoder.logits(decoder.final_norm(x[0, lengths[0] - 1]))


def predict(maps: Float32[Array, "Hkv D1"], x: Float[Array, "*t D"]) -> Float32[Array, "*t Hkv"]:
    """Predicted worth."""
    return x.astype(jnp.float32) @ maps[:, :-1].T + maps[:, -1]


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=("window", "stride"), donate_argnames=("x", "pool", "table")
)
def _read_layer(
    graphdef: Any,
    weights: Any,
    x: Float[Array, "1 L D"],
    cos: Array,
    sin: Array,
    maps: Float32[Array, "Hkv D1"],
    theta: Array,
    read: ReadSettings,
    lengths: Int[Array, " 1"],
    pool: Pool,
    table: PageTable,
    free: FreePages,
    layer: Int[Array, ""],
    row: Int[Array, ""],
    *,
    window: int,
    stride: int,
) -> tuple[Array, Pool, PageTable, FreePages]:
    """One layer of a prompt: the stream after it, and its tokens in pages of the row."""
    module, b = nnx.merge(graphdef, weights), pool.page_size
    worth = predict(maps, module.attention_norm(x)).swapaxes(1, 2)  # [1, Hkv, L]
    worth = jnp.where(jnp.arange(x.shape[1]) < FIRST, jnp.inf, worth)  # which stay

    def attention(q: Array, k: Array, v: Array, _: None) -> tuple[Array, tuple[Pool, PageTable, FreePages]]:
        sizes = {"block_size": b, "window": window}
        out, _ = attend_by_worth(
            q, k, v, worth, lengths, read, **sizes, stride=stride, capacity=k.shape[1] * k.shape[2]
        )
        selected = select_by_worth(k, v, worth, lengths, theta, **sizes)
        means = tuple(x[0] for x in block_means(k, v, worth, worth < theta, b))  # of whole blocks
        return out, write_layer(pool, table, free, layer, row, selected, k[0], v[0], worth[0], means, lengths[0])

    x, (pool, table, free), _ = module(x, cos, sin, attention, None)
    return x, pool, table, free


@functools.partial(jax.jit, static_argnums=0, static_argnames="window", donate_argnames=("pool", "table"))
def _step(
    graphdef: Any,
    weights: Any,
    maps: Float32[Array, "layers Hkv D1"],
    tokens: Int[Array, " R"],
    pool: Pool,
    table: PageTable,
    *,
    window: int,
) -> tuple[Float32[Array, "R V"], Pool, PageTable]:
    decoder = nnx.merge(graphdef, weights)
    position = table.length
    x = decoder.embed(tokens[:, None])
    cos, sin = decoder.angles(position[:, None])
    for number, module in enumerate(decoder.layers):
        worth = predict(maps[number], module.attention_norm(x))[:, 0]

        attention = functools.partial(_attend_token, number, worth, window)
        x, (pool, table), _ = module(x, cos, sin, attention, (pool, table))
    return decoder.logits(decoder.final_norm(x[:, 0])), pool, table._replace(length=position + 1)


def _attend_token(
    layer: int,
    worth: Float32[Array, "R Hkv"],
    window: int,
    q: Float[Array, "R 1 Hq d"],
    k: Float[Array, "R 1 Hkv d"],
    v: Float[Array, "R 1 Hkv d"],
    state: tuple[Pool, PageTable],
) -> tuple[Array, tuple[Pool, PageTable]]:
    pool, table = append(*state, layer, k[:, 0], v[:, 0], worth)
    tokens, means = table.of_layer(pool, layer)
    caches = dataclasses.replace(tokens, end=table.length + 1), means
    out, _ = paged_attention(q, caches, table.length, table.length, window=window)
    return out, (pool, table)
