"""The decoder of LLaMA, Qwen2 and Qwen3 in Flax NNX. Attention is not its part: callers hand it in."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tca_jax.models.config import ModelConfig
from tca_jax.models.rope import apply_rope, rope_cos_sin

# (layer, q [B, L, Hq, d], k [B, L, Hkv, d], v [B, L, Hkv, d], state) -> (out [B, L, Hq, d], new state)
Attention = Callable[[int, Array, Array, Array, Any], tuple[Array, Any]]
_Projections = tuple[Array, Array, Array]  # q [B, L, Hq, d], k and v [B, L, Hkv, d]

_INIT_STD = 0.02
_CHUNK_ELEMENTS = 2**27  # of the MLP's inner width times the tokens of a chunk: 256 MiB in bfloat16


def _matmul(x: Float[Array, "*batch In"], kernel: Float[Array, "In Out"]) -> Float[Array, "*batch Out"]:
    """x W, computed in the dtype of x."""
    return jnp.matmul(x, kernel.astype(x.dtype), precision=_precision(x.dtype))


def _precision(dtype: DTypeLike) -> jax.lax.Precision | None:
    """float32 means float32, not the TF32 that GPUs default to."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


class Linear(nnx.Module):
    """y = x W + b with W stored `[in, out]`, so that XLA gets a plain GEMM. Computes in the dtype of x."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        std: float = _INIT_STD,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.kernel = nnx.Param(_normal(rngs, (in_features, out_features), std, param_dtype))
        self.bias = nnx.Param(jnp.zeros(out_features, param_dtype)) if bias else None

    def __call__(self, x: Float[Array, "*batch In"]) -> Float[Array, "*batch Out"]:
        y = _matmul(x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32; the result has the dtype of x."""

    def __init__(self, features: int, *, eps: float, param_dtype: DTypeLike) -> None:
        self.scale = nnx.Param(jnp.ones(features, param_dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class SelfAttention(nnx.Module):
    """Projections, QK norm (Qwen3) and RoPE around the attention that is handed in.

    One product gives queries, keys and values, as three cost more time when they are of a single token. Its output
    is ordered by KV head, each one's G query heads, its key head and its value head: `[H_kv, G + 2, d]`, flattened.
    """

    def __init__(self, config: ModelConfig, *, param_dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        c = config
        self.num_heads, self.num_kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        q_dim, qkv_dim = c.num_heads * c.head_dim, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        self.qkv = Linear(c.hidden_size, qkv_dim, bias=c.qkv_bias, param_dtype=param_dtype, rngs=rngs)
        std = _residual_std(c)
        self.o = Linear(q_dim, c.hidden_size, bias=c.o_bias, std=std, param_dtype=param_dtype, rngs=rngs)
        eps = c.rms_norm_eps
        self.q_norm = RMSNorm(c.head_dim, eps=eps, param_dtype=param_dtype) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, eps=eps, param_dtype=param_dtype) if c.qk_norm else None

    def project(
        self,
        x: Float[Array, "*tokens D"],
        cos: Float[Array, "*tokens half"],
        sin: Float[Array, "*tokens half"],
    ) -> _Projections:
        """Queries, keys and values of the tokens, with QK norm and RoPE applied."""
        tokens = x.shape[:-1]
        with jax.named_scope("qkv"):
            by_head = self.qkv(x).reshape(*tokens, self.num_kv_heads, -1, self.head_dim)
            q = by_head[..., :-2, :].reshape(*tokens, self.num_heads, self.head_dim)
            k, v = by_head[..., -2, :], by_head[..., -1, :]
        if self.q_norm is not None and self.k_norm is not None:
            with jax.named_scope("qk_norm"):
                q, k = self.q_norm(q), self.k_norm(k)
        with jax.named_scope("rope"):
            return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def output(self, out: Float[Array, "*tokens Hq d"]) -> Float[Array, "*tokens D"]:
        """Back to the residual stream."""
        with jax.named_scope("o_proj"):
            return self.o(out.reshape(*out.shape[:-2], self.num_heads * self.head_dim))


class GatedMLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)).

    One product gives gate and up, `[gate, up]` along its output: of a single token, it is faster than two.
    """

    def __init__(self, config: ModelConfig, *, param_dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(width, 2 * inner, bias=bias, param_dtype=param_dtype, rngs=rngs)
        std = _residual_std(config)
        self.down = Linear(inner, width, bias=bias, std=std, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class DecoderLayer(nnx.Module):
    """Pre-norm transformer layer. All but attention runs in chunks of tokens when there are many."""

    def __init__(self, config: ModelConfig, *, param_dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        width, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(width, eps=eps, param_dtype=param_dtype)
        self.attention = SelfAttention(config, param_dtype=param_dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(width, eps=eps, param_dtype=param_dtype)
        self.mlp = GatedMLP(config, param_dtype=param_dtype, rngs=rngs)
        # A power of two, as lengths are multiples of one: the last chunk is then rarely a ragged one.
        self.chunk = 2 ** int(math.log2(max(1, _CHUNK_ELEMENTS // config.intermediate_size)))

    def __call__(
        self,
        x: Float[Array, "B L D"],
        cos: Float[Array, "B L half"],
        sin: Float[Array, "B L half"],
        attend: Callable[[Array, Array, Array, Any], tuple[Array, Any]],
        state: Any,
        buffers: _Projections | None = None,
    ) -> tuple[Float[Array, "B L D"], Any, _Projections]:
        """Runs the layer; `buffers` are the queries, keys and values of the layer before, to be overwritten.

        Returns:
            The new residual stream, the new state, and the layer's queries, keys and values for the next to overwrite.
        """
        q, k, v = _by_chunks(self._before_attention, self.chunk, buffers, x, cos, sin)
        with jax.named_scope("attention"):
            out, state = attend(q, k, v, state)
        return _by_chunks(self._after_attention, self.chunk, x, out.astype(x.dtype)), state, (q, k, v)

    def _before_attention(self, _: Any, x: Array, cos: Array, sin: Array) -> _Projections:
        return self.attention.project(self.attention_norm(x), cos, sin)

    def _after_attention(self, x: Array, out: Array) -> Array:
        x = x + self.attention.output(out)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x))


def _by_chunks(function: Callable[..., Any], chunk: int, old: Any, *inputs: Array) -> Any:
    """function(old, *inputs), which acts on each token alone, `chunk` tokens at a time.

    At 128K tokens the intermediates of the MLP would outweigh the weights. Results are written over `old`, in place
    where nothing else needs it: with fresh buffers the compiler makes those of all layers at the start, and a model of
    32 layers takes 90 GB more than it needs.

    Args:
        function: Takes and returns arrays with any leading token axes; its results have the shapes of `old`.
        chunk: Tokens at once.
        old: Pytree of `[B, L, ...]`, or None for fresh buffers (the function then gets None).
        inputs: `[B, L, ...]`.
    """
    batch, length = inputs[0].shape[:2]
    tokens = batch * length
    if tokens <= chunk:
        return function(old, *inputs)
    flat = functools.partial(jax.tree.map, lambda x: x.reshape(tokens, *x.shape[2:]))

    def cut(arrays: Any, start: Any, size: int) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), arrays)

    def write(start: Any, size: int, results: Any) -> Any:
        part = function(cut(results, start, size) if old is not None else None, *cut(flat_inputs, start, size))
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, 0), results, part)

    flat_inputs = flat(inputs)
    if old is None:
        shapes = jax.eval_shape(lambda: function(None, *inputs))
        # Zeros like an input vary over the mesh axes that it varies over, as a loop under `shard_map` asks.
        results = flat(jax.tree.map(lambda x: jax.lax.full_like(inputs[0], 0, x.dtype, x.shape), shapes))
    else:
        results = flat(old)
    whole = tokens // chunk
    results = jax.lax.fori_loop(0, whole, lambda i, results: write(i * chunk, chunk, results), results)
    if tokens % chunk:
        results = write(whole * chunk, tokens % chunk, results)
    return jax.tree.map(lambda x: x.reshape(batch, length, *x.shape[1:]), results)


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head of a LLaMA, Qwen2 or Qwen3 model.

    Args:
        config: The model's shape and options.
        dtype: Dtype of the residual stream and of matrix products. Norms, RoPE and logits are float32 anyway.
        param_dtype: Dtype that the weights are stored in; they are cast to `dtype` where they are used.
        rngs: Keys of the random initialisation: normal(0.02), projections into the residual stream scaled by
            1 / sqrt(2 layers).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs,
    ) -> None:
        self.config = config
        self.dtype = jnp.dtype(dtype)
        vocab, width = config.vocab_size, config.hidden_size
        self.embedding = nnx.Param(_normal(rngs, (vocab, width), _INIT_STD, param_dtype))
        self.layers = nnx.List(
            [DecoderLayer(config, param_dtype=param_dtype, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.norm = RMSNorm(width, eps=config.rms_norm_eps, param_dtype=param_dtype)
        tied = config.tie_embeddings
        self.head = None if tied else Linear(width, vocab, param_dtype=param_dtype, rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, "B L"],
        positions: Int[Array, "B L"],
        attention: Attention,
        states: Sequence[Any],
        *,
        remat: bool = False,
    ) -> tuple[Float[Array, "B L D"], tuple[Any, ...]]:
        """Run all layers, unrolled.

        Args:
            tokens: `[B, L]` token ids; ids outside the vocabulary (padding) are clipped into it.
            positions: `[B, L]` position of each token in its row. Padding repeats the row's last position (it
                counts only for dynamic RoPE, whose frequencies follow the row's length so far).
            attention: Called once a layer as `attention(layer, q [B, L, Hq, d], k [B, L, Hkv, d],
                v [B, L, Hkv, d], state)`, with RoPE applied and queries unscaled (1 / sqrt(d) is attention's
                part); returns `(out [B, L, Hq, d], new state)`.
            states: What each layer's attention gets as `state`, one entry a layer: a pytree, or None.
            remat: Recompute each layer in the backward pass instead of keeping its activations (training).

        Returns:
            `[B, L, D]` hidden states after the final norm, and the layers' new states.

        Raises:
            ValueError: `states` has not one entry a layer.
        """
        if len(states) != self.config.num_layers:
            raise ValueError(
                f"states has {len(states)} entries: must be one for each of {self.config.num_layers} layers"
            )
        x = self.embed(tokens)
        cos, sin = self.angles(positions)
        new_states, buffers = [], None
        for index, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            run = _bind(layer, index, attention)
            with jax.named_scope(f"layer_{index}"):
                if remat:  # what a layer is given is kept for the backward pass: nothing but its inputs
                    x, state, _ = jax.checkpoint(run)(x, cos, sin, state, None)
                else:
                    x, state, buffers = run(x, cos, sin, state, buffers)
            new_states.append(state)
        with jax.named_scope("final_norm"):
            return self.norm(x), tuple(new_states)

    def embed(self, tokens: Int[Array, "B L"]) -> Float[Array, "B L D"]:
        """The residual stream that the first layer gets; ids outside the vocabulary are clipped into it."""
        with jax.named_scope("embed"):
            return self.embedding[...].at[tokens].get(mode="clip").astype(self.dtype)

    def angles(self, positions: Int[Array, "B L"]) -> tuple[Float[Array, "B L half"], Float[Array, "B L half"]]:
        """Cosines and sines of RoPE, which every layer gets."""
        with jax.named_scope("rope_angles"):
            return rope_cos_sin(positions, self.config.head_dim, self.config.rope)

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Scores of the next token.

        Args:
            hidden: `[..., D]` hidden states after the final norm.

        Returns:
            `[..., V]` float32.
        """
        # The tied head contracts the embedding's second axis: no transposed copy of it.
        if self.head is None:
            weights, axis = self.embedding[...], 1
        else:
            weights, axis = self.head.kernel[...], 0
        with jax.named_scope("logits"):
            return jax.lax.dot_general(
                hidden,
                weights.astype(hidden.dtype),
                (((hidden.ndim - 1,), (axis,)), ((), ())),
                precision=_precision(hidden.dtype),
                preferred_element_type=jnp.float32,
            )


def _bind(layer: DecoderLayer, index: int, attention: Attention) -> Callable[..., tuple[Array, Any, _Projections]]:
    """The layer as a function of arrays only, which is what `jax.checkpoint` takes."""

    def run(
        x: Array, cos: Array, sin: Array, state: Any, buffers: _Projections | None
    ) -> tuple[Array, Any, _Projections]:
        return layer(x, cos, sin, lambda q, k, v, s: attention(index, q, k, v, s), state, buffers)

    return run


def _residual_std(config: ModelConfig) -> float:
    """Std of projections into the residual stream, so that its variance does not grow with depth (GPT-2)."""
    return _INIT_STD / math.sqrt(2 * config.num_layers)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, dtype: DTypeLike) -> Array:
    return (std * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)
