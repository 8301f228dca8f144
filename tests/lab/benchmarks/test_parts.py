"""What the benchmarks share: results, random inputs and models, budgets of a share, times of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from flax import nnx
from jax.sharding import AxisType
from tiny import tiny_lm

import tca_jax
from tca_jax.engine.request import AnswerOptions
from tca_jax.engine.sampling import Sampling
from tca_jax.lab.benchmarks.common import (
    Compilations,
    Results,
    agreement,
    fitted,
    random_normal,
    read_results,
)
from tca_jax.lab.benchmarks.models import CONFIGS, random_model, unequal_candidates
from tca_jax.lab.benchmarks.serve import TokenTimes
from tca_jax.lab.benchmarks.soak import growth
from tca_jax.models.decoder import Decoder
from tca_jax.models.names import parameters
from tca_jax.models.sharding import parameter_sharding
from tca_jax.serve.streams import Stream

BILLIONS = {"llama3.1-8b": 8.03, "qwen2.5-7b": 7.62, "llama3.1-70b": 70.55, "llama3.2-1b": 1.24}


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


def test_earlier_results_keep_their_name(tmp_path):
    for name in ("attention", "attention-2", "attention-3"):
        results = Results(tmp_path, "attention", "", "")
        assert results.path.name == f"{name}.jsonl"
    with pytest.raises(typer.Exit):  # there are no rows
        results.finish()


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


@pytest.mark.parametrize("name", BILLIONS)
def test_shapes_have_the_parameters_of_their_models(name):
    decoder = nnx.eval_shape(lambda: Decoder(CONFIGS[name], dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    count = sum(parameter.variable.size for parameter in parameters(decoder))
    assert count / 1e9 == pytest.approx(BILLIONS[name], abs=0.005)


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


@pytest.mark.parametrize("share", [0.1, 0.4])
@pytest.mark.parametrize("heads", [4, 8])
def test_unequal_budgets_have_the_share(share, heads):
    config = tca_jax.TCAConfig()
    candidates = unequal_candidates(config, heads, share)
    budgets = np.asarray(tca_jax.candidate_budgets(config, 1000))[list(candidates)]
    assert budgets.mean() / config.block_size == pytest.approx(share, abs=0.01)
    assert len(set(candidates)) > 2


# --- serving ---


def test_a_stream_is_timed_by_arrivals():
    lm = tiny_lm()
    sampling = {"max_new_tokens": 9, "min_new_tokens": 0, "sampling": Sampling(), "seed": 0, "stop": ()}
    stream = Stream(lm, AnswerOptions.create(lm, **sampling, stop_token_ids=(), logprobs=False), lambda stream: None)
    stream.add([1, 2], [], [])
    times = TokenTimes(stream)
    stream.add([3, 4, 5], [], [])
    stream.add([], [], [])  # nothing new
    assert [count for _, count in times.times] == [2, 5]
    times.wait(5, 0)
    with pytest.raises(TimeoutError, match="5 of 6 tokens"):
        times.wait(6, 0)
    times.times = [(1.0, 1), (2.0, 2), (2.5, 4)]
    assert times.gaps() == [1.0, 0.5]


def test_growth_is_measured_once_nothing_compiles():
    compiling = [(float(s), 10**8 + 2 * 10**6 * s, min(s, 6)) for s in range(51)]
    flat = [(float(s), 2 * 10**8, 7) for s in range(51, 101)]
    assert growth(compiling + flat) == pytest.approx(0, abs=1)
    assert growth([(float(s), 10**8 + 10**6 * s, 7) for s in range(101)]) == pytest.approx(6e7)
    assert growth([]) == 0
