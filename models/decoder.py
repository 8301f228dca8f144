"""The decoder of LLaMA, Qwen2 and Qwen3 in Flax NNX. Attention is not its part: callers hand it in."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tca_jax.errors import UserError
from tca_jax.models.config import ModelConfig
from tca_jax.models.matmul import dot_general
from tca_jax.models.parallel import exchange_width, join_width, part_of_width, scattering
from tca_jax.models.rope import apply_rope, rope_cos_sin
from tca_jax.models.sequence_parallel import TokenParts

# (layer, q [B, L, Hq, d], k [B, L, Hkv, d], v [B, L, Hkv, d], state) -> (out [B, L, Hq, d], new state)
Attention = Callable[[int, Array, Array, Array, Any], tuple[Array, Any]]
_Projections = tuple[Array, Array, Array]  # q [B, L, Hq, d], k and v [B, L, Hkv, d]

_INIT_STD = 0.02
_OVERLAPPING = (14, 18, 15, 17)  # sixteenths of a chunk: four of them between the devices of a mesh
_CHUNK_ELEMENTS = 2**27  # of the MLP's inner width times the tokens of a chunk: 256 MiB in bfloat16


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


class SelfAttention(nnx.Module):
    """Projections, QK norm (Qwen3) and RoPE around the attention that is handed in.

    One product gives queries, keys and values, as three cost more time when they are of a single token. Its kernel is
    `[D, H_kv, G + 2, d]`: each KV head's G query heads, its key head and its value head.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        c, linear = config, functools.partial(_linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.head_dim = c.head_dim
        by_kv_head = (c.num_kv_heads, c.num_heads // c.num_kv_heads + 2, c.head_dim)
        self.qkv = linear(c.hidden_size, by_kv_head, bias=c.qkv_bias)
        # Rows in the order of the query heads, so those of a KV head are neighbours: axis 0 can be cut by KV head.
        self.o = linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.o_bias, std=_residual_std(c))
        norm = functools.partial(RMSNorm, c.head_dim, eps=c.rms_norm_eps, param_dtype=param_dtype)
        self.q_norm = norm() if c.qk_norm else None
        self.k_norm = norm() if c.qk_norm else None

    def project(
        self,
        x: Float[Array, "*tokens D"],
        cos: Float[Array, "*tokens half"],
        sin: Float[Array, "*tokens half"],
    ) -> _Projections:
        """Queries, keys and values of the tokens, with QK norm and RoPE applied."""
        with jax.named_scope("qkv"):
            by_kv_head = self.qkv(x)
            q = by_kv_head[..., :-2, :].reshape(*x.shape[:-1], -1, self.head_dim)
            k, v = by_kv_head[..., -2, :], by_kv_head[..., -1, :]
        return _norm_and_rotate(q, self.q_norm, cos, sin), _norm_and_rotate(k, self.k_norm, cos, sin), v

    def keys_and_values(
        self,
        weights: tuple[Float[Array, "D Hkv 2 d"], Float[Array, "Hkv 2 d"] | None],
        x: Float[Array, "*tokens D"],
        cos: Float[Array, "*tokens half"],
        sin: Float[Array, "*tokens half"],
    ) -> tuple[Float[Array, "*tokens Hkv d"], Float[Array, "*tokens Hkv d"]]:
        """`project` without queries; `weights` as `key_value_weights` gives them."""
        kernel, bias = weights
        with jax.named_scope("kv"):
            y = jnp.einsum("...D,Dhpd->...hpd", x, kernel, precision=_precision(x.dtype))
            y = y if bias is None else y + bias
        return _norm_and_rotate(y[..., 0, :], self.k_norm, cos, sin), y[..., 1, :]

    def key_value_weights(self, dtype: DTypeLike) -> tuple[Array, Array | None]:
        """The keys' and values' share of the kernel and of the bias: a copy."""
        kernel = self.qkv.kernel[...][..., -2:, :].astype(dtype)
        return kernel, None if self.qkv.bias is None else self.qkv.bias[...][..., -2:, :].astype(dtype)

    def output(self, out: Float[Array, "*tokens Hq d"]) -> Float[Array, "*summed D"]:
        """Back to the residual stream: of the tokens, or of this device's part of them (`parallel.scattering`)."""
        with jax.named_scope("o_proj"):
            return self.o(out.reshape(*out.shape[:-2], -1))


class GatedMLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)).

    One product gives gate and up: of a single token, it is faster than two. Its kernel is `[D, 2, I]`.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        linear = functools.partial(_linear, bias=bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.gate_up = linear(width, (2, inner))
        self.down = linear(inner, width, std=_residual_std(config))

    def __call__(self, x: Float[Array, "*tokens D"]) -> Float[Array, "*summed D"]:
        gate_up = self.gate_up(x)
        return self.down(jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :])


class DecoderLayer(nnx.Module):
    """Pre-norm transformer layer. All but attention runs in chunks of tokens when there are many."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        norm = functools.partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps, param_dtype=param_dtype)
        self.attention_norm = norm()
        self.attention = SelfAttention(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.mlp_norm = norm()
        self.mlp = GatedMLP(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        # A power of two, as lengths are multiples of one: the last chunk is then rarely a ragged one.
        self.chunk = 2 ** int(math.log2(max(1, _CHUNK_ELEMENTS // config.intermediate_size)))
        self.axis: str | None = None  # of a mesh, whose devices add up what they have behind attention and the MLP

    @property
    def chunks(self) -> tuple[int, ...]:
        """Tokens of the chunks that do not wait for each other.

        On a mesh there are some: while a chunk's sum travels another one is computed. They are of different sizes, or
        XLA would fuse their additions, which then wait for all sums.
        """
        return (self.chunk,) if self.axis is None else tuple(max(1, part * self.chunk // 16) for part in _OVERLAPPING)

    def __call__(
        self,
        x: Float[Array, "_ _ D"],
        cos: Float[Array, "B L half"],
        sin: Float[Array, "B L half"],
        attend: Callable[[Array, Array, Array, Any], tuple[Array, Any]],
        state: Any,
        buffers: _Projections | None = None,
        places: Int[Array, "B m"] | None = None,
        parts: TokenParts | None = None,
    ) -> tuple[Float[Array, "_ _ D"], Any, _Projections]:
        """Runs the layer.

        Args:
            x: The residual stream, `[B, L, D]`; with `parts` this device's part of it, `[1, part, D]`.
            cos: Cosine of each token's rotation.
            sin: Its sine.
            attend: `(q, k, v, state) -> (out, new state)`.
            state: What `attend` gets.
            buffers: Queries, keys and values of the layer before, to be overwritten.
            places: The tokens of each row whose results are wanted; None for all. Others get keys and values only.
            parts: How the devices of a mesh share the tokens; None where each has all of them.

        Returns:
            The new residual stream, as `x` lies or `[B, m, D]`, the new state, and the layer's queries, keys and
            values for the next to overwrite.
        """
        if places is None:
            q, k, v = self._project(parts, buffers, x, cos, sin)
        else:
            k, v = self._keys_and_values(parts, buffers, x, cos, sin)
            x = _some_tokens(x, places) if parts is None else parts.take(x[0], _among_all(places, cos.shape[1]))
            parts = None
            q, _, _ = self._project(parts, None, x, _some_tokens(cos, places), _some_tokens(sin, places))
        with jax.named_scope("attention"):
            out, state = attend(q, k, v, state)
        return self._after_attention(parts, x, out.astype(x.dtype)), state, (q, k, v)

    def _project(
        self, parts: TokenParts | None, buffers: _Projections | None, x: Array, cos: Array, sin: Array
    ) -> _Projections:
        """Queries, keys and values of all tokens, written over those of the layer before."""

        def function(_: Any, x: Array, cos: Array, sin: Array) -> _Projections:
            return self.attention.project(_joined(self.attention_norm(x), parts), cos, sin)

        return _by_chunks(function, self._sizes(parts), buffers, x, cos, sin)

    def _keys_and_values(
        self, parts: TokenParts | None, buffers: _Projections | None, x: Array, cos: Array, sin: Array
    ) -> tuple[Array, Array]:
        """`_project` without queries."""
        weights = self.attention.key_value_weights(x.dtype)  # outside of the loop over chunks

        def function(_: Any, x: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
            return self.attention.keys_and_values(weights, _joined(self.attention_norm(x), parts), cos, sin)

        return _by_chunks(function, self._sizes(parts), None if buffers is None else buffers[1:], x, cos, sin)

    def _after_attention(self, parts: TokenParts | None, x: Array, out: Array) -> Array:
        layer = self if parts is None else scattering(self, parts.axis)

        def function(x: Array, out: Array) -> Array:
            x = x + layer.attention.output(out)
            with jax.named_scope("mlp"):
                return x + layer.mlp(_joined(layer.mlp_norm(x), parts))

        return _by_chunks(function, self.chunks, x, out)

    def _sizes(self, parts: TokenParts | None) -> tuple[int, ...]:
        """Tokens of the chunks of what nothing is summed of."""
        return (self.chunk,) if parts is None else self.chunks


def _joined(x: Array, parts: TokenParts | None) -> Array:
    """What products take: all tokens of a chunk."""
    return x if parts is None else parts.join(x)


def _some_tokens(x: Float[Array, "B L _"], places: Int[Array, "B m"]) -> Float[Array, "B m _"]:
    return jnp.take_along_axis(x, places[..., None], axis=1)


def _among_all(places: Int[Array, "B m"], length: int) -> Int[Array, "B m"]:
    """Places in rows as places among the tokens of all rows."""
    return places + length * jnp.arange(len(places))[:, None]


def _by_chunks(function: Callable[..., Any], sizes: tuple[int, ...], old: Any, *inputs: Array) -> Any:
    """function(old, *inputs), which acts on each token alone, some tokens at a time.

    At 128K tokens the intermediates of the MLP would outweigh the weights. Results are written over `old`, in place
    where nothing else needs it: with fresh buffers the compiler makes those of all layers at the start, and a model of
    32 layers takes 90 GB more than it needs.

    Args:
        function: Takes and returns arrays with any leading token axes; its results have the shapes of `old`.
        sizes: Tokens of the chunks of a step of the loop, which do not wait for each other.
        old: Pytree of `[B, L, ...]`, or None for fresh buffers (the function then gets None).
        inputs: The last is `[B, L, ...]`. Others and `old` are, too, or have an n-th of every chunk: a device's part,
            `[1, B L / n, ...]` (`models.sequence_parallel`).
    """
    batch, length = inputs[-1].shape[:2]
    tokens, step = batch * length, sum(sizes)
    if tokens <= max(sizes):
        return function(old, *inputs)
    flat = functools.partial(jax.tree.map, lambda x: x.reshape(-1, *x.shape[2:]))

    def devices(x: Array) -> int:
        """Over which its tokens are shared."""
        assert tokens % len(x) == 0
        return tokens // len(x)

    def cut(arrays: Any, start: Any, size: int) -> Any:
        def of_chunk(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start // devices(x), size // devices(x))

        return jax.tree.map(of_chunk, arrays)

    def put(x: Array, part: Array, start: Any) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, part, start // devices(x), axis=0)

    def write(start: Any, sizes: Sequence[int], results: Any) -> Any:
        starts = list(itertools.accumulate(sizes[:-1], initial=start))
        chunks = list(zip(starts, sizes, strict=True))
        before = [None if old is None else cut(results, *chunk) for chunk in chunks]
        parts = [function(x, *cut(flat_inputs, *chunk)) for chunk, x in zip(chunks, before, strict=True)]
        for start, part in zip(starts, parts, strict=True):
            results = jax.tree.map(functools.partial(put, start=start), results, part)
        return results

    flat_inputs = flat(inputs)
    if old is None:
        shapes = jax.eval_shape(lambda: function(None, *flat_inputs))
        # Zeros like an input vary over the mesh axes that it varies over, as a loop under `shard_map` asks.
        results = jax.tree.map(lambda x: jax.lax.full_like(inputs[0], 0, x.dtype, x.shape), shapes)
    else:
        results = flat(old)
    steps = tokens // step
    results = jax.lax.fori_loop(0, steps, lambda i, results: write(i * step, sizes, results), results)
    if rest := tokens - steps * step:
        filled = list(itertools.takewhile(lambda end: end < rest, itertools.accumulate(sizes)))
        results = write(steps * step, [*sizes[: len(filled)], rest - sum(sizes[: len(filled)])], results)
    if old is None:
        return jax.tree.map(lambda x: x.reshape(batch, length, *x.shape[1:]), results)
    return jax.tree.map(lambda x, like: x.reshape(like.shape), results, old)


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
        self.dtype, param_dtype = jnp.dtype(dtype), jnp.dtype(param_dtype)
        vocab, width = config.vocab_size, config.hidden_size
        made = {"dtype": self.dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.embedding = nnx.Param(_normal(rngs.params(), (vocab, width), param_dtype))
        self.layers = nnx.List([DecoderLayer(config, **made) for _ in range(config.num_layers)])
        self.norm = RMSNorm(width, eps=config.rms_norm_eps, param_dtype=param_dtype)
        self.head = None if config.tie_embeddings else _linear(width, vocab, preferred=jnp.float32, **made)
        self.axis: str | None = None  # of a mesh whose devices hold parts of the weights: see `models.parallel`

    def __call__(
        self,
        tokens: Int[Array, "B L"],
        positions: Int[Array, "B L"],
        attention: Attention,
        states: Sequence[Any],
        *,
        lengths: Int[Array, " B"] | None = None,
        tail: int | None = None,
        alone: bool = False,
        remat: bool = False,
    ) -> tuple[Float[Array, "B _ D"], tuple[Any, ...]]:
        """Run all layers, unrolled.

        Args:
            tokens: `[B, L]` token ids; ids outside the vocabulary (padding) are clipped into it.
            positions: `[B, L]` position of each token in its row. Padding repeats the row's last position (it
                counts only for dynamic RoPE, whose frequencies follow the row's length so far).
            attention: Called once a layer as `attention(layer, q [B, L, Hq, d], k [B, L, Hkv, d],
                v [B, L, Hkv, d], state)`, with RoPE applied and queries unscaled (1 / sqrt(d) is attention's
                part); returns `(out [B, L, Hq, d], new state)`.
            states: What each layer's attention gets as `state`, one entry a layer: a pytree, or None.
            lengths: `[B]` tokens of each row that are no padding; needed with `tail`, without effect else.
            tail: Hidden states of the last `tail` tokens of each row are all that is wanted, m for short; static. The
                last layer then leaves the others out of all but keys and values: its attention gets q `[B, m, Hq, d]`
                beside k and v of all tokens, and returns `[B, m, Hq, d]`. In a row of fewer than m tokens the first
                results are those of its first token again.
            alone: Rotate each token as if it were the last of its row so far, as one that is fed alone (this counts
                only for dynamic RoPE).
            remat: Recompute each layer in the backward pass instead of keeping its activations (training).

        Returns:
            `[B, L, D]` hidden states after the final norm, or `[B, m, D]` with `tail`: those of the tokens
            lengths - m to lengths - 1. And the layers' new states.

        Raises:
            ValueError: `states` has not one entry a layer, `tail` is below 1 or comes without `lengths`.
        """
        if len(states) != self.config.num_layers:
            raise UserError(
                f"states has {len(states)} entries: must be one for each of {self.config.num_layers} layers"
            )
        places = None if tail is None else _last_places(lengths, tail)
        parts = self._parts(tokens.size)
        x = self.embed(tokens) if parts is None else self._embed_part(tokens, parts)
        cos, sin = self.angles(positions.reshape(-1, 1) if alone else positions)
        cos, sin = (x.reshape(*positions.shape, -1) for x in (cos, sin))
        new_states, buffers = [], None
        for index, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            run = _bind(layer, index, attention, parts)
            wanted = places if index == self.config.num_layers - 1 else None
            with jax.named_scope(f"layer_{index}"):
                if remat:  # what a layer is given is kept for the backward pass: nothing but its inputs
                    x, state, _ = jax.checkpoint(run)(x, cos, sin, state, None, wanted)
                else:
                    x, state, buffers = run(x, cos, sin, state, buffers, wanted)
            new_states.append(state)
        with jax.named_scope("final_norm"):
            if parts is not None and places is None:
                joined = _by_chunks(lambda _, x, __: parts.join(self.norm(x)), parts.sizes, None, x, cos)
                return joined, tuple(new_states)
            return self.norm(x), tuple(new_states)

    def _parts(self, tokens: int) -> TokenParts | None:
        """How the devices of a mesh share this many tokens; None where each has all of them."""
        if self.axis is None or tokens <= max(self.layers[0].chunks):
            return None
        parts = TokenParts(self.axis, jax.lax.axis_size(self.axis), tokens, self.layers[0].chunks)
        return parts if parts.devices > 1 and parts.even else None

    def _embed_part(self, tokens: Int[Array, "B L"], parts: TokenParts) -> Float[Array, "1 part D"]:
        """`embed` of this device's part of the tokens."""
        by_device = tokens.reshape(-1)[parts.of(jnp.arange(parts.devices))]
        with jax.named_scope("embed"):
            return exchange_width(self._rows(by_device.reshape(-1)), parts.axis)[None]

    def embed(self, tokens: Int[Array, "B L"]) -> Float[Array, "B L D"]:
        """The residual stream that the first layer gets; ids outside the vocabulary are clipped into it."""
        with jax.named_scope("embed"):
            rows = self._rows(tokens)
            return rows if self.axis is None else join_width(rows, self.axis)

    def _rows(self, tokens: Int[Array, "*some"]) -> Float[Array, "*some width"]:
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
        with jax.named_scope("logits"):
            if self.axis is not None:
                hidden = part_of_width(hidden, self.axis)
            if self.head is not None:
                return self.head(hidden)
            # The embedding's second axis is contracted: no transposed copy of it (`nnx.Embed.attend` makes one, and
            # gives logits in the decoder's dtype).
            return dot_general(
                hidden,
                self.embedding[...].astype(hidden.dtype),
                (((hidden.ndim - 1,), (1,)), ((), ())),
                axis=self.axis,
                precision=_precision(hidden.dtype),
                preferred_element_type=jnp.float32,
            )


def _bind(
    layer: DecoderLayer, index: int, attention: Attention, parts: TokenParts | None
) -> Callable[..., tuple[Array, Any, _Projections]]:
    """The layer as a function of arrays only, which is what `jax.checkpoint` takes."""

    def run(
        x: Array, cos: Array, sin: Array, state: Any, buffers: _Projections | None, places: Array | None
    ) -> tuple[Array, Any, _Projections]:
        return layer(x, cos, sin, lambda q, k, v, s: attention(index, q, k, v, s), state, buffers, places, parts)

    return run


def _last_places(lengths: Int[Array, " B"] | None, tail: int) -> Int[Array, "B m"]:
    """Indices of the last `tail` tokens of each row; 0 for those that a shorter row does not have."""
    if tail < 1:
        raise UserError(f"tail = {tail}: must be at least 1, or None for the hidden states of all tokens")
    if lengths is None:
        raise UserError(f"tail = {tail} needs lengths: the tokens of each row")
    return jnp.maximum(lengths[:, None] - tail + jnp.arange(tail), 0)


def _norm_and_rotate(
    heads: Float[Array, "*tokens H d"],
    norm: RMSNorm | None,
    cos: Float[Array, "*tokens half"],
    sin: Float[Array, "*tokens half"],
) -> Float[Array, "*tokens H d"]:
    """Queries or keys as attention takes them."""
    if norm is not None:
        with jax.named_scope("qk_norm"):
            heads = norm(heads)
    with jax.named_scope("rope"):
        return apply_rope(heads, cos, sin)


def _linear(
    in_features: int,
    out_features: int | tuple[int, ...],
    *,
    bias: bool = False,
    std: float = _INIT_STD,
    preferred: DTypeLike | None = None,
    dtype: DTypeLike,
    param_dtype: DTypeLike,
    rngs: nnx.Rngs,
) -> nnx.LinearGeneral:
    """y = x W + b, computed in `dtype`; W is `[in, *out]`, which XLA takes for a matrix without a copy."""
    return nnx.LinearGeneral(
        in_features,
        out_features,
        use_bias=bias,
        dtype=dtype,
        param_dtype=param_dtype,
        kernel_init=functools.partial(_normal, std=std),
        precision=_precision(dtype),
        preferred_element_type=preferred,
        dot_general=dot_general,
        rngs=rngs,
    )


def _precision(dtype: DTypeLike) -> jax.lax.Precision | None:
    """float32 means float32, not the TF32 that GPUs default to."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def _residual_std(config: ModelConfig) -> float:
    """Std of projections into the residual stream, so that its variance does not grow with depth (GPT-2)."""
    return _INIT_STD / math.sqrt(2 * config.num_layers)


def _normal(key: Array, shape: tuple[int, ...], dtype: DTypeLike, std: float = _INIT_STD) -> Array:
    """normal(std), drawn in float32: an initialiser in Flax's form."""
    return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
