"""What the benchmarks share: results, random inputs and models, budgets of a share, times of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tca_jax.lab.benchmarks.common import (
    Compilations,
    Results,
    agreement,
    fitted,
    random_normal,
    read_results,
)
from tca_jax.lab.benchmarks.models import random_model
from tca_jax.models.names import parameters
from tca_jax.models.sharding import parameter_sharding

# --- results and timing ---


def test_rows_are_on_disk_before_the_end(tmp_path, capsys):
    results = Results(tmp_path / "out", "attention", "Attention", "What was done.")
    results.add("Layers", {"model": "tiny", "ms": 1.5})
    record = read_results(tmp_path / "out" / "attention.jsonl")
    assert record["rows"] == [{"table": "Layers", "model": "tiny", "ms": 1.5}]
    assert record["environment"]["jax"] == jax.__version__
    results.finish("Nothing failed.")
    page = (tmp_path / "out" / "attention.md").read_text()
    assert page.startswith("# Attention\n\nWhat was done. Nothing failed.\n\n## Layers\n\n| model | ms |\n|---|---|\n")
    assert f"- jax: {jax.__version__}" in page
    assert "model tiny  ms 1.5" in capsys.readouterr().out


@pytest.mark.parametrize("shape", [(7,), (1, 3, 2**11, 1000)])
def test_random_numbers_are_normal_and_do_not_repeat(shape):
    x = np.asarray(random_normal(jax.random.key(1), shape, jnp.float32, 2.0), np.float64)
    assert x.shape == shape
    assert len(np.unique(x)) > 0.6 * x.size  # of the 2^23 floats that a draw can take
    if x.size > 1000:
        assert abs(x.mean()) < 0.01
        assert abs(x.std() - 2) < 0.01
        assert abs(np.corrcoef(x.ravel()[: 2**21], x.ravel()[-(2**21) :])[0, 1]) < 0.01


@pytest.mark.parametrize("wrong", [2.0, np.nan])
def test_wrong_results_are_not_timed(wrong):
    assert agreement("triton", lambda backend: jnp.ones(4)) == 0
    with pytest.raises(RuntimeError, match="triton differs from the oracle by"):
        agreement("triton", lambda backend: jnp.ones(4).at[0].set(wrong if backend == "triton" else 1))


def test_memory_that_runs_out_costs_one_call(capsys):
    assert fitted(lambda: 3, "three") == 3
    assert fitted(jax.jit(lambda: jnp.zeros((2**30, 2**30), jnp.int8)), "an exabyte") is None
    assert capsys.readouterr().out.startswith("does not fit: an exabyte: RESOURCE_EXHAUSTED: ")

    def other():
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")

    with pytest.raises(jax.errors.JaxRuntimeError, match="is gone"):
        fitted(other, "another")


def test_compilations_are_counted_with_their_seconds():
    compilations = Compilations()
    jax.jit(lambda x: x * 3.25 + 17)(jnp.ones(11)).block_until_ready()
    compilations.close()
    assert compilations.count >= 1
    assert sum(compilations.by_program.values()) > 0
    count = compilations.count
    jax.jit(lambda x: x * 4.25 + 17)(jnp.ones(13)).block_until_ready()
    assert compilations.count == count


# --- models and budgets ---


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_devices_draw_their_own_weights():
    mesh = jax.make_mesh((1, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:2])
    lm, alone = (random_model("tiny", mesh=each) for each in (mesh, None))
    assert lm.graphdef == alone.graphdef
    for ours, theirs in zip(parameters(lm.decoder), parameters(alone.decoder), strict=True):
        value, other = ours.variable[...], theirs.variable[...]
        assert (value.shape, value.dtype) == (other.shape, other.dtype)
        assert value.sharding.is_equivalent_to(parameter_sharding(ours, lm.mesh), value.ndim)
        if value.ndim > 1:
            parts = [np.asarray(part.data) for part in value.addressable_shards]
            assert np.intersect1d(*parts).size < 0.01 * parts[0].size


# --- serving ---
