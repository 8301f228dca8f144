"""Reading prompts: logits behind them, what the caches keep, and where numbers cease to be finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.engine.cache import LayerCache, gather_pools, prefill_layer, tail_queries
from tca_jax.engine.layouts import CacheLayout
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, SECOND_HEADS, OverMesh, mean_of_devices, on_host
from tca_jax.errors import UserError
from tca_jax.methods.pairs import attended_share
from tca_jax.models.names import parameters
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.causal_attention import causal_attention


def read_prompts(
    lm: LM, tokens: Int[Array, "B L"], lengths: Int[Array, " B"], layouts: tuple[CacheLayout, ...], *, backend: Backend
) -> tuple[Float[Array, "B V"], tuple[LayerCache, ...], Float32[Array, " B"]]:
    """Logits behind right-padded prompts, what the caches keep of them, and the share of their pairs attended to."""
    last_layer = len(layouts) - 1
    tail, before = tail_queries(lm.method, last_layer), None

    def attention(
        layer: int, q: Array, k: Array, v: Array, state: None
    ) -> tuple[Array, tuple[LayerCache, Float32[Array, " B"]]]:
        nonlocal before
        cut = tail is not None and layer == last_layer
        sizes = lengths, layouts[layer], backend
        (out, pairs), before = prefill_layer(lm.method, layer, q, k, v, *sizes, tail=cut, before=before)
        return out, (before, pairs)

    positions = jnp.minimum(jnp.arange(tokens.shape[1]), lengths[:, None] - 1)
    hidden, read = lm.decoder(tokens, positions, attention, (None,) * len(layouts), lengths=lengths, tail=tail)
    caches, pairs = zip(*read, strict=True)
    last = hidden[:, -1] if tail is not None else hidden[jnp.arange(tokens.shape[0]), lengths - 1]
    share = mean_of_devices(attended_share(pairs, lengths), lm.head_shards)
    return lm.decoder.logits(last), gather_pools(caches), share


def require_finite(
    lm: LM,
    tokens: Int[np.ndarray, "B L"],
    lengths: Int[np.ndarray, " B"],
    finite: Bool[np.ndarray, " B"],
    argument: str,
) -> None:
    """Raises ValueError unless the logits of all rows were finite; says where the first that is not comes from."""
    if finite.all():
        return
    row = int(np.argmin(finite))
    raise UserError(
        f"{lm.name} computes NaN or infinity for {argument}[{row}]: {_cause(lm, tokens[row, : lengths[row]])}"
    )


def _cause(lm: LM, prompt: Int[np.ndarray, " L"]) -> str:
    for parameter in parameters(lm.decoder):
        tensors = parameter.layout.split(parameter.variable[...])
        for name, tensor in zip(parameter.names, tensors, strict=True):
            if not bool(jnp.isfinite(tensor).all()):
                return f"the weight {name} is not finite"
    layers = on_host(_finite_layers(lm, jnp.asarray(prompt)[None])).all(axis=1)
    if layers.all():
        return f"the values behind layer {len(layers) - 1} are not finite, in dtype {lm.dtype.name}"
    first = int(np.argmin(layers))
    return f"its weights are finite, the values in layer {first} are not, in dtype {lm.dtype.name}; try another dtype"


def _finite_heads(lm: LM, tokens: Int[Array, "1 L"]) -> Bool[Array, "layers 1"]:
    """Whether each layer's queries, keys, values and attention are finite, on a device."""
    lengths = jnp.array([tokens.shape[1]], jnp.int32)

    def attention(layer: int, q: Array, k: Array, v: Array, state: None) -> tuple[Array, Array]:
        out = causal_attention(q, k, v, lengths)
        return out, jnp.all(jnp.stack([jnp.isfinite(x).all() for x in (q, k, v, out)]))

    positions = jnp.arange(tokens.shape[1])[None]
    _, finite = lm.decoder(tokens, positions, attention, (None,) * lm.config.num_layers)
    return jnp.stack(finite)[:, None]


_finite_layers = jax.jit(OverMesh(_finite_heads, (SAME,), SECOND_HEADS))
