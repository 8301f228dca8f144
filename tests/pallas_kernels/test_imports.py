"""A JAX without one kernel language runs everything on XLA and names what is missing."""

import os
import re
import subprocess
import sys

import pytest

PROGRAM = """
import sys

missing, backend = sys.argv[1:]
sys.modules[missing] = None  # any import of it raises ImportError

import jax
import jax.numpy as jnp

import tca_jax
from tca_jax.pallas_kernels.causal_attention import causal_attention

config = tca_jax.TCAConfig(block_size=8, window=16)
q, k = jnp.ones((1, 64, 2, 16)), jnp.ones((1, 64, 1, 16))
candidates, lengths = jnp.array([3]), jnp.array([64])
for name in ("auto", "xla"):
    assert tca_jax.select(q[:, -1], k, candidates, lengths, config, backend=name).any()
    out = tca_jax.attend(q, k, k, candidates, lengths, config, backend=name)
    assert jnp.allclose(out + causal_attention(q, k, k, lengths, backend=name), 2)


class Gpu:
    platform, device_kind, compute_capability = "gpu", "some card", "9.0"


jax.local_devices = lambda: [Gpu()]  # from here on a GPU's backends are tried
try:
    causal_attention(q, k, k, lengths, backend=backend)
except ValueError as error:
    print(error)
"""


@pytest.mark.integration
@pytest.mark.parametrize(("backend", "language"), [("triton", "triton"), ("mosaic", "mosaic_gpu")])
def test_missing_kernel_language_is_named(backend, language):
    module, on_cpu = f"jax.experimental.pallas.{language}", {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, module, backend]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=on_cpu)
    assert done.returncode == 0, done.stderr
    expected = rf"backend = '{backend}': causal_attention on {backend} cannot be imported: .*{module}.*; use 'auto'.*"
    assert re.fullmatch(expected, done.stdout.strip())
