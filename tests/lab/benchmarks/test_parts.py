"""What the benchmarks share: results, random inputs and models, budgets of a share, times of tokens."""

import time

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
    markdown_table,
    random_normal,
    read_results,
)
from tca_jax.lab.benchmarks.models import CONFIGS, Share, random_model, unequal_candidates
from tca_jax.lab.benchmarks.serve import TokenTimes, at_random
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


def test_columns_with_one_value_stand_above_a_table():
    rows = [
        {"model": "tiny", "tokens": 8192, "ms": 0.12345},
        {"model": "tiny", "tokens": 131072, "ms": 1234.5, "x": ""},
    ]
    expected = "All rows: model tiny.\n\n| tokens | ms |\n|---|---|\n| 8,192 | 0.123 |\n| 131,072 | 1,234 |"
    assert markdown_table(rows) == expected
    assert markdown_table(rows[:1]) == "| model | tokens | ms |\n|---|---|---|\n| tiny | 8,192 | 0.123 |"


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


def test_a_random_model_stores_fp8():
    lm = random_model("tiny", 1, weights="fp8", kv="fp8")
    assert lm.weights_dtype == lm.cache_dtype == jnp.float8_e4m3fn
    (codes,) = (p for p in parameters(lm.decoder) if p.path[-2:] == ("qkv", "codes"))
    assert 0.8 * 56 < float(jnp.std(codes.variable[...].astype(jnp.float32))) < 1.2 * 56  # an eighth of 448


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


def test_shares_are_written_as_parsed_or_refused():
    for text in ("0.2", "0.05:0.25", "0.05:0.25+16"):
        assert str(Share.parse(text)) == f"TCA {text}"
    for text in ("much", "1", "0", "0.3:0.2", "0.1:0.2:0.3", "0.2+x"):
        with pytest.raises(typer.BadParameter, match="must be"):
            Share.parse(text)


@pytest.mark.parametrize("share", [0.1, 0.4])
@pytest.mark.parametrize("heads", [4, 8])
def test_unequal_budgets_have_the_share(share, heads):
    config = tca_jax.TCAConfig()
    candidates = unequal_candidates(config, heads, share)
    budgets = np.asarray(tca_jax.candidate_budgets(config, 1000))[list(candidates)]
    assert budgets.mean() / config.block_size == pytest.approx(share, abs=0.01)
    assert len(set(candidates)) > 2


def test_two_shares_make_heads_dense_in_the_cache():
    config = tca_jax.TCAConfig()
    policy = Share(0.25, prefill=0.05).method(config, 8).cache
    cache, prefill = policy.rows(0, 8), policy.prefill_rows(0, 8)
    dense = cache == config.num_candidates
    assert dense.sum() == 2
    assert len(set(prefill.tolist())) == 1
    assert (cache[~dense] == prefill[~dense]).all()


@pytest.mark.parametrize(("blocks", "expected"), [(3, [1, 0] * 3), (9, [2, 1] * 3), (12, [2] * 6)])
def test_heads_that_read_blocks_are_spread_over_layers(blocks, expected):
    policy = Share(0.25, blocks=blocks).method(tca_jax.TCAConfig(), 2, 6).cache
    counts = [int(policy.reads(layer, 2, "blocks").sum()) for layer in range(6)]
    assert counts == expected
    with pytest.raises(tca_jax.UserError, match="there are 12 KV heads"):
        Share(0.25, blocks=13).method(tca_jax.TCAConfig(), 2, 6)


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


def test_requests_arrive_at_the_rate():
    begin = time.perf_counter()
    found = at_random(400, 4000.0, 3, lambda number, at: (number, at - begin))
    assert [number for number, _ in found] == list(range(400))
    times = [at for _, at in found]
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(4000, rel=0.2)


def test_growth_is_measured_once_nothing_compiles():
    compiling = [(float(s), 10**8 + 2 * 10**6 * s, min(s, 6)) for s in range(51)]
    flat = [(float(s), 2 * 10**8, 7) for s in range(51, 101)]
    assert growth(compiling + flat) == pytest.approx(0, abs=1)
    assert growth([(float(s), 10**8 + 10**6 * s, 7) for s in range(101)]) == pytest.approx(6e7)
    assert growth([]) == 0
