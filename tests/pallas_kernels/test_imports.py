"""What is imported when: a JAX without one kernel language imports the package and runs everything else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tca_jax.pallas_kernels

EVERYTHING_ON_XLA = """
import sys

missing, backend = sys.argv[1:]
sys.modules[missing] = None  # any import of it raises ImportError

import jax
import jax.numpy as jnp

import tca_jax
from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.paged_attention import paged_attention
from tca_jax.pallas_kernels.kv import Pages
from tca_jax.pallas_kernels.prefill_attention import prefill_attention

config = tca_jax.TCAConfig(block_size=8, window=16)
q, k = jnp.ones((1, 64, 2, 16)), jnp.ones((1, 64, 1, 16))
candidates, lengths = jnp.array([3]), jnp.array([64])
nothing, table = jnp.zeros((128, 16)), jnp.zeros((1, 1), jnp.int32)
pool, zero = Pool(nothing, nothing, table, table), jnp.array([0])
pages = Pages(*[k.reshape(8, 8, 16)] * 2, jnp.arange(8)[None, None], table, zero, lengths, 0)
sizes = {"block_size": 8, "window": 64}
prefill = lambda backend: prefill_attention(
    q, k, k, pool, jnp.zeros((1, 1, 8), jnp.int32), lengths, **sizes, backend=backend
)


def run(backend):
    assert tca_jax.select(q[:, -1], k, candidates, lengths, config, backend=backend).any()
    out = tca_jax.attend(q, k, k, candidates, lengths, config, backend=backend)
    out += prefill(backend)
    assert jnp.allclose(out, 2)
    out, _ = paged_attention(q[:, -1:], (pages,), lengths - 1, lengths - 1, window=64, backend=backend)
    assert jnp.allclose(out, 1)


for name in ("auto", "xla"):
    run(name)
assert tca_jax.calibration_scores(q, k, lengths, config).shape == (1, 1, 15)


class Gpu:
    platform, device_kind, compute_capability = "gpu", "some card", "9.0"


jax.local_devices = lambda: [Gpu()]  # from here on all backends are asked for
try:
    prefill(backend)
except ValueError as error:
    print(error)
"""


def _python(program, *arguments):
    on_cpu = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=on_cpu)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.integration
@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_a_jax_without_a_kernel_language_runs_everything_on_xla_and_names_what_is_missing(backend):
    language = {"triton": "triton", "mosaic": "mosaic_gpu"}[backend]
    error = _python(EVERYTHING_ON_XLA, f"jax.experimental.pallas.{language}", backend)
    assert re.fullmatch(
        rf"backend = '{backend}': prefill_attention on {backend} cannot be imported: "
        rf".*jax\.experimental\.pallas\.{language}.*; use 'auto' or 'xla'",
        error,
    )


def test_importing_the_package_imports_no_kernel_language():
    program = "import sys, tca_jax; print([name for name in sys.modules if name.startswith('jax.experimental.pallas')])"
    assert _python(program) == "[]"


def test_kernels_import_nothing_of_the_rest_of_the_package_but_its_errors():
    files = list(Path(tca_jax.pallas_kernels.__file__).parent.rglob("*.py"))
    imported = {name for file in files for name in re.findall(r"(?:from|import) (tca_jax[\w.]*)", file.read_text())}
    assert imported
    outside = {name for name in imported if not name.startswith("tca_jax.pallas_kernels.")}
    assert outside == {"tca_jax.errors"}
