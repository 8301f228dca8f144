"""Exact causal attention on cuDNN, through `jax.nn`: the fastest where it takes the layer (Ampere and newer)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tca_jax.errors import Unsupported, require
from tca_jax.pallas_kernels.numerics import zero_padding


@jax.named_scope("causal_attention")
def causal_attention(q: Array, k: Array, v: Array, lengths: Array) -> Array:
    """See `causal_attention.causal_attention`."""
    head_dim = q.shape[-1]
    takes = q.dtype in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 128
    allowed = "bfloat16 and float16 and d up to 128"
    require(takes, f"causal_attention on cudnn takes {allowed}, not {q.dtype} and d = {head_dim}", Unsupported)
    # Padding stands to the right of every token that counts: the causal mask alone keeps it out.
    q, k, v = _mapped_alike(q, k, v)
    try:
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    except RuntimeError as error:  # "cuDNN is not detected"
        raise Unsupported(f"causal_attention on cudnn: {error}") from error
    return zero_padding(out, lengths[:, None])


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
