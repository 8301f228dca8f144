"""Exact causal attention of ragged prompts: cuDNN where there is an NVIDIA GPU, else a prefill kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tca_jax.pallas_kernels.backends import dispatch
from tca_jax.pallas_kernels.checks import check_shapes
from tca_jax.pallas_kernels.prefill_attention import mosaic as prefill_attention_mosaic
from tca_jax.pallas_kernels.prefill_attention import triton as prefill_attention_triton
from tca_jax.pallas_kernels.prefill_attention import xla as prefill_attention_xla
from tca_jax.pallas_kernels.tiles import round_up

_BLOCK = 128  # tile of the prefill kernels; exact attention has no blocks of its own


def causal_attention(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    *,
    backend: str | tuple[str, ...] = "auto",
) -> Float[Array, "B L Hq d"]:
    """softmax(q k^T / sqrt(d)) v over all tokens up to the query's own.

    Args:
        q: Queries [B, L, Hq, d]; query head h belongs to KV head h // (Hq // Hkv).
        k: Keys [B, L, Hkv, d]; what lies past a row's length is finite, and does not matter.
        v: Values [B, L, Hkv, d].
        lengths: Prompt lengths [B]; may be traced.
        backend: See `backends.BACKENDS`.

    Returns:
        [B, L, Hq, d] in the type of `q`; rows past a length are zero.

    Raises:
        ValueError: a shape or `backend` is not allowed.
    """
    tokens = "B L Hkv d"
    check_shapes({"q": (q, "B L Hq d"), "k": (k, tokens), "v": (v, tokens), "lengths": (lengths, "B")})
    return dispatch("causal_attention", backend, _IMPLEMENTATIONS)(q, k, v, lengths)


@jax.named_scope("causal_attention")
def _cudnn(q: Array, k: Array, v: Array, lengths: Array) -> Array:
    head_dim = q.shape[-1]
    if q.dtype not in (jnp.bfloat16, jnp.float16) or head_dim % 8 or head_dim > 128:
        raise NotImplementedError(
            f"causal_attention on cudnn takes bfloat16 and float16 and d up to 128, not {q.dtype} and d = {head_dim}"
        )
    # Padding stands to the right of every token that counts: the causal mask alone keeps it out.
    q, k, v = _mapped_alike(q, k, v)
    try:
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    except RuntimeError as error:  # "cuDNN is not detected"
        raise NotImplementedError(f"causal_attention on cudnn: {error}") from error
    return jnp.where((jnp.arange(q.shape[1]) < lengths[:, None])[..., None, None], out, 0)


@jax.custom_batching.custom_vmap
def _map_alike(*arrays: Array) -> tuple[Array, ...]:
    """The arrays themselves; `jax.vmap` then maps all of them over axis 0, and JAX takes nothing else for cuDNN."""
    return arrays


@_map_alike.def_vmap
def _map_all(size: int, mapped: list[bool], *arrays: Array) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
    alike = (x if own else jnp.broadcast_to(x, (size, *x.shape)) for x, own in zip(arrays, mapped, strict=True))
    return _map_alike(*alike), (True,) * len(arrays)


_mapped_alike = jax.custom_vjp(_map_alike)  # for gradients: a `custom_vmap` alone has none
_mapped_alike.defvjp(lambda *arrays: (_mapped_alike(*arrays), None), lambda _, cotangents: cotangents)


def _all_local(implementation: Callable[..., Array]) -> Callable[..., Array]:
    """A prefill kernel whose window holds the whole prompt: nothing is left of it, and the pool is empty."""

    def causal(q: Array, k: Array, v: Array, lengths: Array) -> Array:
        batch, length, kv_heads, head_dim = k.shape
        empty = jnp.zeros((_BLOCK, head_dim), k.dtype)
        offsets = jnp.zeros((batch, kv_heads), jnp.int32)
        budgets = jnp.zeros((batch, kv_heads, length // _BLOCK), jnp.int32)
        window = round_up(length, _BLOCK)
        return implementation(q, k, v, empty, empty, offsets, budgets, lengths, block_size=_BLOCK, window=window)

    return causal


_IMPLEMENTATIONS = MappingProxyType(
    {
        "cudnn": _cudnn,
        "mosaic": _all_local(prefill_attention_mosaic.prefill_attention),
        "triton": _all_local(prefill_attention_triton.prefill_attention),
        "xla": _all_local(prefill_attention_xla.prefill_attention),
    }
)
