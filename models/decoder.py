"""The decoder of LLaMA, Qwen2 and Qwen3 in Flax NNX. The caller passes the attention as a function."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tca_jax.errors import require
from tca_jax.models.config import ModelConfig
from tca_jax.models.names import MODEL
from tca_jax.models.projections import Linear, by_chunks, is_quantized, precision_of
from tca_jax.models.rope import apply_rope, rope_cos_sin

# (layer, q [B, L, Hq, d], k [B, L, Hkv, d], v [B, L, Hkv, d], state) -> (out [B, L, Hq, d], new state)
Attention = Callable[[int, Array, Array, Array, Any], tuple[Array, Any]]

_INIT_STD = 0.02
_SMALL_SUM = 2**18  # bytes; XLA computes sums up to this size in one kernel, in which each device reads all the others
_CHUNK_ELEMENTS = 2**27  # of the widest intermediate times the tokens of a chunk: 256 MiB in bfloat16


def chunk_size(width: int) -> int:
    """Tokens that a layer processes at a time where its widest intermediate has `width` features.

    A power of two, because padded lengths are multiples of one: the last chunk is then rarely a shorter one.
    """
    return 2 ** int(math.log2(max(1, _CHUNK_ELEMENTS // width)))


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32; the result has the dtype of x.

    Not `nnx.RMSNorm`: where the model computes in bfloat16, it rounds float32 scales (in training) to bfloat16 before
    they are used, and a quarter of the results are then not the nearest bfloat16.
    """

    def __init__(self, features: int, *, eps: float, param_dtype: DTypeLike) -> None:
        self.scale = nnx.Param(jnp.ones(features, param_dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32)).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Makes the modules of a decoder."""

    config: ModelConfig
    dtype: DTypeLike
    param_dtype: DTypeLike
    sharded: bool
    rngs: nnx.Rngs

    @property
    def outer_dtype(self) -> DTypeLike:
        """Dtype of norms, embedding, head and biases beside projections in `param_dtype`."""
        return self.dtype if is_quantized(self.param_dtype) else self.param_dtype

    def norm(self, features: int) -> RMSNorm:
        return RMSNorm(features, eps=self.config.rms_norm_eps, param_dtype=self.outer_dtype)

    def linear(
        self, in_features: int, out_features: int | tuple[int, ...], *, sums: bool = False, **options: Any
    ) -> Linear:
        """A projection, computed in `dtype`; with `sums`, x and W may be parts, whose products are summed."""
        defaults = {"dtype": self.dtype, "param_dtype": self.param_dtype, "rngs": self.rngs, "bias": False}
        finish = sum_parts if sums and self.sharded else _unchanged
        return Linear(in_features, out_features, finish=finish, **{"init": _normal} | defaults | options)

    def into_residual(self, in_features: int, *, bias: bool) -> Linear:
        """A projection into the residual stream, so that its variance does not grow with depth (GPT-2)."""
        init = functools.partial(_normal, std=_INIT_STD / math.sqrt(2 * self.config.num_layers))
        return self.linear(in_features, self.config.hidden_size, bias=bias, init=init, sums=True)


class SelfAttention(nnx.Module):
    """Projections, QK norm (Qwen3) and RoPE before the attention, and the output projection.

    One product gives queries, keys and values; of a single token, three products take longer. Its kernel is
    `[D, H_kv, G + 2, d]`: each KV head's G query heads, its key head and its value head.
    """

    def __init__(self, make: _Maker) -> None:
        c = make.config
        self.head_dim = c.head_dim
        by_kv_head = (c.num_kv_heads, c.num_heads // c.num_kv_heads + 2, c.head_dim)
        self.qkv = make.linear(c.hidden_size, by_kv_head, bias=c.qkv_bias)
        # Rows in the order of the query heads, so those of a KV head are neighbours: axis 0 can be split by KV head.
        self.o = make.into_residual(c.num_heads * c.head_dim, bias=c.o_bias)
        self.q_norm = make.norm(c.head_dim) if c.qk_norm else None
        self.k_norm = make.norm(c.head_dim) if c.qk_norm else None

    def project(
        self, x: Float[Array, "*tokens D"], cos: Float[Array, "*tokens half"], sin: Float[Array, "*tokens half"]
    ) -> tuple[Float[Array, "*tokens Hq d"], Float[Array, "*tokens Hkv d"], Float[Array, "*tokens Hkv d"]]:
        """Queries, keys and values of the tokens, with QK norm and RoPE applied."""
        with jax.named_scope("qkv"):
            by_kv_head = self.qkv(x)
            q = by_kv_head[..., :-2, :].reshape(*x.shape[:-1], -1, self.head_dim)
            k, v = by_kv_head[..., -2, :], by_kv_head[..., -1, :]
        if self.q_norm is not None and self.k_norm is not None:
            with jax.named_scope("qk_norm"):
                q, k = self.q_norm(q), self.k_norm(k)
        with jax.named_scope("rope"):
            return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def output(self, out: Float[Array, "*tokens Hq d"]) -> Float[Array, "*tokens D"]:
        """The output projection, back to the residual stream."""
        with jax.named_scope("o_proj"):
            return self.o(out.reshape(*out.shape[:-2], -1))


class GatedMLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)).

    One product gives gate and up: of a single token, it is faster than two. Its kernel is `[D, 2, I]`.
    """

    def __init__(self, make: _Maker) -> None:
        c = make.config
        self.gate_up = make.linear(c.hidden_size, (2, c.intermediate_size), bias=c.mlp_bias)
        self.down = make.into_residual(c.intermediate_size, bias=c.mlp_bias)

    def __call__(self, x: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
        gate_up = self.gate_up(x)
        return self.down(jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :])


class DecoderLayer(nnx.Module):
    """Pre-norm transformer layer. Everything but attention runs in chunks of tokens (`by_chunks`)."""

    def __init__(self, make: _Maker, chunks: tuple[int, ...]) -> None:
        c = make.config
        self.attention_norm = make.norm(c.hidden_size)
        self.attention = SelfAttention(make)
        self.mlp_norm = make.norm(c.hidden_size)
        self.mlp = GatedMLP(make)
        self.chunks = chunks
        self.projected = (chunk_size((c.num_heads + 2 * c.num_kv_heads) * c.head_dim),)  # chunks of the first half

    def __call__(self, x: Float[Array, "B L D"], *of_attention: Any) -> tuple[Float[Array, "B L D"], Any]:
        """The new residual stream and state; arguments are those of `attend`."""
        out, state = self.attend(x, *of_attention)
        return self.after_attention(x, out), state

    def attend(
        self,
        x: Float[Array, "B L D"],
        cos: Float[Array, "B L half"],
        sin: Float[Array, "B L half"],
        attention: Callable[[Array, Array, Array, Any], tuple[Array, Any]],
        state: Any,
        room: int = 0,  # tokens that queries, keys and values of one row have past L, zeros
    ) -> tuple[Float[Array, "B C Hq d"], Any]:
        """The first half of the layer: `attention(q, k, v, state)` returns the attention and the new state."""

        def project(x: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
            return self.attention.project(self.attention_norm(x), cos, sin)

        q, k, v = by_chunks(project, self.projected, x, cos, sin, room=room)
        with jax.named_scope("attention"):
            out, state = attention(q, k, v, state)
        return out.astype(x.dtype), state

    def after_attention(self, x: Float[Array, "B L D"], out: Float[Array, "B L Hq d"]) -> Float[Array, "B L D"]:
        """The second half: the new residual stream, from the old one and attention's output."""

        def function(x: Array, out: Array) -> Array:
            x = x + self.attention.output(out)
            with jax.named_scope("mlp"):
                return x + self.mlp(self.mlp_norm(x))

        return by_chunks(function, self.chunks, x, out, in_place=True)


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head of a LLaMA, Qwen2 or Qwen3 model.

    Args:
        config: The model's shape and options.
        dtype: Dtype of the residual stream and of matrix products. Norms, RoPE and logits are float32 anyway.
        param_dtype: Dtype that the weights are stored in; they are cast to `dtype` where they are used. An eight-bit
            one is that of projections and MLP, with scales (`models.projections`); all others are in `dtype`.
        chunks: Tokens of the chunks in one step of the loop of a layer's second half; None for those of one device.
        sharded: Whether the weights are a shard of the model's, under `jax.shard_map` (`models.sharding`).
        rngs: Keys of the random initialisation: normal(0.02), projections into the residual stream scaled by
            1 / sqrt(2 layers).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.bfloat16,
        chunks: tuple[int, ...] | None = None,
        sharded: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        self.config, self.sharded = config, sharded
        self.dtype, self.param_dtype = jnp.dtype(dtype), jnp.dtype(param_dtype)
        make, width = _Maker(config, self.dtype, self.param_dtype, sharded, rngs), config.hidden_size
        self.embedding = nnx.Param(_normal(rngs.params(), (config.vocab_size, width), make.outer_dtype))
        of_layer = chunks or (chunk_size(config.intermediate_size),)
        self.layers = nnx.List([DecoderLayer(make, of_layer) for _ in range(config.num_layers)])
        self.norm = make.norm(width)
        of_head = {"sums": True, "param_dtype": make.outer_dtype, "preferred_element_type": jnp.float32}
        self.head = None if config.tie_embeddings else make.linear(width, config.vocab_size, **of_head)

    def __call__(
        self, tokens: Int[Array, "B L"], positions: Int[Array, "B L"], attention: Attention, states: Sequence[Any]
    ) -> tuple[Float[Array, "B L D"], tuple[Any, ...]]:
        """Runs all layers, unrolled; hidden states after the final norm, and the layers' new states.

        Args:
            tokens: Ids; those outside the vocabulary (padding) are clipped into it.
            positions: Of each token in its row. Padding repeats the row's last position (this matters for dynamic RoPE
                only, whose frequencies follow the row's length so far).
            attention: Called once per layer, with RoPE applied and queries unscaled: it multiplies by 1 / sqrt(d).
            states: What each layer's attention gets as `state`: a pytree, or None. ValueError unless each has one.
        """
        must = f"must be one for each of {self.config.num_layers} layers"
        require(len(states) == self.config.num_layers, f"states has {len(states)} entries: {must}")
        x, new_states = self.embed(tokens), []
        cos, sin = self.angles(positions)
        for index, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            with jax.named_scope(f"layer_{index}"):
                x, state = layer(x, cos, sin, functools.partial(attention, index), state)
            new_states.append(state)
        return self.final_norm(x), tuple(new_states)

    def final_norm(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Hidden states, from the residual stream after the last layer."""
        with jax.named_scope("final_norm"):
            return self.norm(x)

    def embed(self, tokens: Int[Array, "B L"]) -> Float[Array, "B L D"]:
        """The residual stream that the first layer gets; ids outside the vocabulary are clipped into it."""
        with jax.named_scope("embed"):
            rows = self.embedding[...].at[tokens].get(mode="clip").astype(self.dtype)
            return gather_width(rows) if self.sharded else rows

    def angles(self, positions: Int[Array, "B L"]) -> tuple[Float[Array, "B L half"], Float[Array, "B L half"]]:
        """Cosines and sines of RoPE, which every layer gets."""
        with jax.named_scope("rope_angles"):
            return rope_cos_sin(positions, self.config.head_dim, self.config.rope)

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Scores of the next token, float32, from hidden states after the final norm."""
        with jax.named_scope("logits"):
            hidden = slice_width(hidden) if self.sharded else hidden
            if self.head is not None:
                return self.head(hidden)
            # The embedding's second axis is contracted: no transposed copy of it (`nnx.Embed.attend` makes one, and
            # gives logits in the decoder's dtype).
            embedding, contracted = self.embedding[...].astype(hidden.dtype), (((hidden.ndim - 1,), (1,)), ((), ()))
            options: Any = {"precision": precision_of(hidden.dtype), "preferred_element_type": jnp.float32}
            scores = jax.lax.dot_general(hidden, embedding, contracted, **options)
            return sum_parts(scores) if self.sharded else scores


def _normal(key: Array, shape: tuple[int, ...], dtype: DTypeLike, std: float = _INIT_STD) -> Array:
    """normal(std), drawn in float32: an initialiser in Flax's form."""
    return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def _unchanged(x: Array) -> Array:
    return x


def sum_parts(product: Array) -> Array:
    """The product over a contracted axis of which each device has a part."""
    return jax.lax.psum(product, MODEL)


def gather_width(x: Float[Array, "*tokens part"]) -> Float[Array, "*tokens D"]:
    """All features of tokens of which each device on "model" has a part.

    For few tokens the devices sum their parts, padded with zeros: XLA has a kernel of its own for small sums. Gathers
    are NCCL's; the host takes longer to launch one than for the rest of the beginning of a decoding step.
    """
    devices = jax.lax.axis_size(MODEL)
    if devices * x.size * x.dtype.itemsize > _SMALL_SUM:
        return jax.lax.all_gather(x, MODEL, axis=x.ndim - 1, tiled=True)
    mine = jnp.arange(devices)[:, None] == jax.lax.axis_index(MODEL)
    parts = jnp.where(mine, x[..., None, :], 0)
    return jax.lax.psum(parts.reshape(*x.shape[:-1], -1), MODEL)


def slice_width(x: Float[Array, "*tokens D"]) -> Float[Array, "*tokens part"]:
    """This device's part of features that all devices on "model" have."""
    width = x.shape[-1] // jax.lax.axis_size(MODEL)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(MODEL) * width, width, axis=-1)
