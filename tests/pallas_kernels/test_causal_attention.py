"""Exact causal attention: every backend that this machine has against jax.nn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import qkv

from tca_jax.pallas_kernels.backends import can_run
from tca_jax.pallas_kernels.causal_attention import causal_attention


@pytest.mark.parametrize("backend", [name for name in ("cudnn", "mosaic", "triton", "xla") if can_run(name)])
@pytest.mark.parametrize(("length", "heads", "kv_heads", "d"), [(1, 4, 4, 64), (131, 6, 1, 64), (300, 7, 1, 128)])
def test_equals_jax_nn(backend, length, heads, kv_heads, d):
    dtype, tolerance = (jnp.float32, 5e-6) if backend == "xla" else (jnp.bfloat16, 2e-2)
    q, k, v = (jnp.asarray(x, dtype) for x in qkv(0, 2, length, heads, kv_heads, d, scale=1.0))
    lengths = [length, max(1, length // 3)]
    out = causal_attention(q, k, v, jnp.array(lengths), backend=backend)
    with jax.default_matmul_precision("highest"):  # not TF32
        expected = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
    assert out.dtype == dtype
    for row, n in enumerate(lengths):
        actual, wanted = (np.asarray(x[row, :n], np.float32) for x in (out, expected))
        np.testing.assert_allclose(actual, wanted, atol=tolerance)
        assert not np.any(np.asarray(out[row, n:], np.float32))
