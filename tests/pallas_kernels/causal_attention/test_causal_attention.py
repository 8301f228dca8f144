"""Exact causal attention: every backend that this machine has against jax.nn, and CUDA lowering where it has none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.causal_attention import mosaic as causal_attention_mosaic

ON_GPU = jax.default_backend() == "gpu"


def _inputs(seed, batch, length, heads, kv_heads, d, dtype):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=(batch, length, h, d)), dtype) for h in (heads, kv_heads, kv_heads))


@pytest.mark.parametrize("backend", ["auto", "xla", *(["cudnn", "mosaic"] if ON_GPU else [])])
@pytest.mark.parametrize(("length", "heads", "kv_heads", "d"), [(1, 4, 4, 64), (131, 8, 2, 64), (300, 7, 1, 128)])
def test_equals_jax_nn_on_ragged_prompts(backend, length, heads, kv_heads, d):
    dtype = jnp.bfloat16 if ON_GPU else jnp.float32
    q, k, v = _inputs(length, 2, length, heads, kv_heads, d, dtype)
    lengths = jnp.array([length, max(1, length // 3)], jnp.int32)
    out = causal_attention(q, k, v, lengths, backend=backend)
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
    assert out.dtype == q.dtype
    for row, n in enumerate(lengths.tolist()):
        np.testing.assert_allclose(
            out[row, :n].astype(jnp.float32), expected[row, :n].astype(jnp.float32), atol=2e-2 if ON_GPU else 2e-6
        )
        assert not np.any(np.asarray(out[row, n:], np.float32))


@pytest.mark.parametrize(("length", "heads", "kv_heads", "d"), [(1152, 32, 8, 128), (1000, 7, 1, 64)])
def test_mosaic_lowers_for_cuda_without_a_gpu(length, heads, kv_heads, d):
    shapes = [jax.ShapeDtypeStruct((2, length, h, d), jnp.bfloat16) for h in (heads, kv_heads, kv_heads)]
    lowered = (
        jax.jit(causal_attention_mosaic.causal_attention)
        .trace(*shapes, jax.ShapeDtypeStruct((2,), jnp.int32))
        .lower(lowering_platforms=("cuda",))
    )
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.skipif(ON_GPU, reason="this machine has the device")
def test_a_named_backend_that_the_device_lacks_is_refused():
    q, k, v = _inputs(0, 1, 8, 2, 1, 64, jnp.bfloat16)
    for backend in ("cudnn", "mosaic"):
        with pytest.raises(ValueError, match=f"backend = '{backend}' needs an NVIDIA GPU"):
            causal_attention(q, k, v, jnp.array([8], jnp.int32), backend=backend)
