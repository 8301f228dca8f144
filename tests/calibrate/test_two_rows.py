"""calibrate with probes: scores weighted by need, two rows a head, and what takes the place of a useless probe."""

import dataclasses
import inspect

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import unchecked
from sharp_lm import make_lm, random_ids

import tca_jax
from tca_jax.calibration import needs, run
from tca_jax.calibration.probes import probed_texts
from tca_jax.calibration.readings import Reading
from tca_jax.calibration.rows import choose_cache_rows, choose_candidates, densest_within
from tca_jax.calibration.run import calibrate
from tca_jax.engine.lm import LM
from tca_jax.methods.config import TCAConfig

CONFIG = TCAConfig(block_size=8, window=16, tau=0.5, tau_probe=0.7, reserve=3, observation=4, spread=2)
PAIRS = [([1, 2, 3], [4, 5, 6]), ([7, 8, 9], [4, 5, 1, 2, 3, 11])]


@pytest.fixture(scope="module")
def lm() -> LM:
    return make_lm()


@pytest.fixture(autouse=True)
def any_need_is_enough(monkeypatch):
    """A random model needs little; the tests of the fallback raise the threshold again."""
    monkeypatch.setattr(run, "_LEAST_NEED", 0.0)
    monkeypatch.setattr(needs, "_LOST", 0.05)


def layer_inputs(lm: LM, ids: list[int], attend) -> tuple[list, np.ndarray]:
    """(q, k) of every layer and the logits of an unpadded sequence, under `attend(q, k, v)`."""
    found = []

    def attention(layer, q, k, v, state):
        found.append((q, k))
        return attend(q, k, v), state

    states = (None,) * lm.config.num_layers
    hidden, _ = lm.decoder(jnp.asarray(ids)[None], jnp.arange(len(ids))[None], attention, states)
    return found, np.asarray(lm.decoder.logits(hidden)[0], np.float64)


def full_attention(q, k, v):
    return np_attention(q, k, v, lambda head, q, k: np.ones((len(k), len(k)), bool))


def rows_behind(start: int, rows: np.ndarray, gates: np.ndarray | None = None):
    """Attention where the text is prefilled under row 1 and the probe reads what cache rows [layers, H_kv] selected, or
    beyond it by gates of the same shape."""
    layers = iter(zip(rows, np.zeros(rows.shape) if gates is None else gates, strict=True))

    def attend(q, k, v):
        of_heads, of_gates = next(layers)
        group = q.shape[2] // k.shape[2]
        gate = np.repeat(of_gates, group)[:, None] * (np.arange(q.shape[1]) >= start)[:, None, None]
        sparse = np_attention(q, k, v, seen_by(of_heads))
        return sparse if gates is None else sparse + jnp.asarray(gate[None]) * (full_attention(q, k, v) - sparse)

    def seen_by(of_heads):

        def seen(head, q, k):
            row_1, kept = (
                oracle.select(q[:start][-CONFIG.observation :], k[:start], row, CONFIG)[0]
                for row in (0, int(of_heads[head]))
            )
            row_1, kept = (np.pad(mask, (0, len(k) - start)) for mask in (row_1, kept))
            text = oracle.attended(row_1, CONFIG)
            right = np.arange(len(k)) >= CONFIG.num_ranked_blocks(start) * CONFIG.block_size
            probe = np.broadcast_to(kept | right, (len(k), len(k)))
            return np.where(np.arange(len(k))[:, None] < start, text, probe)

        return seen

    return attend


def np_attention(q, k, v, seen):
    group = q.shape[2] // k.shape[2]
    q, k, v = (np.asarray(x[0], np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for head in range(k.shape[1]):
        heads = slice(head * group, (head + 1) * group)
        mask = seen(head, q[:, heads], k[:, head]) & np.tri(len(k), dtype=bool)
        for h in range(heads.start, heads.stop):
            logits = np.where(mask, q[:, h] @ k[:, head].T / np.sqrt(q.shape[-1]), -np.inf)
            out[:, h] = oracle.softmax(logits) @ v[:, head]
    return jnp.asarray(out[None], jnp.float32)


def next_losses(logits: np.ndarray, ids: list[int]) -> np.ndarray:
    logprobs = np.log(oracle.softmax(logits))
    return -logprobs[np.arange(len(ids) - 1), ids[1:]]


def needs_of(lm: LM, text, rows: np.ndarray) -> np.ndarray:
    """What each query of a probe that counts loses over some cache rows, by whole passes of the decoder."""
    ids = list(text.ids)
    full = next_losses(layer_inputs(lm, ids, full_attention)[1], ids)
    sparse = next_losses(layer_inputs(lm, ids, rows_behind(text.probe_start, rows))[1], ids)
    return np.clip(sparse - full, 0, 5)[text.probe_start :] * text.counted


def row_1(lm: LM) -> np.ndarray:
    return np.zeros((lm.config.num_layers, lm.config.num_kv_heads), np.int32)


@pytest.mark.parametrize("kind", ["copy", "text", "pairs"])
def test_the_need_is_what_all_probes_lose_over_the_sparsest_rows(lm, kind):
    sequences = [random_ids(150, seed=1).tolist(), random_ids(97, seed=2).tolist()]
    probes = [PAIRS, PAIRS[:1]] if kind == "pairs" else kind
    texts = probed_texts(lm, sequences, probes, CONFIG)
    profile = calibrate(lm, sequences, CONFIG, probes=probes)
    assert profile.probes["need"] == pytest.approx(sum(needs_of(lm, text, row_1(lm)).sum() for text in texts), rel=0.02)
    assert (profile.probes["kind"], profile.probes["fallback"], profile.probes["kept"]) == (kind, False, None)
    assert profile.probes["tokens"] == sum(text.num_probe for text in texts)
    assert [source["tokens"] for source in profile.sources] == [150, 97]
    assert np.ptp(profile.probe_scores[..., 0]) > 0.02


@pytest.mark.parametrize("kind", ["copy", "text", "pairs", None])
def test_every_kind_gives_the_same_valid_profile_at_every_call(lm, tmp_path, kind):
    probes = [PAIRS] if kind == "pairs" else kind
    profile = calibrate(lm, random_ids(150), CONFIG, probes=probes)
    assert profile == calibrate(lm, random_ids(150), CONFIG, probes=probes)
    assert (profile.prefill_candidates <= profile.candidates).all()
    assert (profile.probes is None) == np.isnan(profile.probe_scores).all() == (kind is None)
    profile.save(tmp_path)
    assert tca_jax.Profile.load(tmp_path) == profile
    assert lm.with_profile(profile).method == profile.method()


def test_calibration_scores_and_prefill_rows_do_not_depend_on_the_probes(lm):
    bare = calibrate(lm, random_ids(150), CONFIG, probes=None)
    np.testing.assert_array_equal(bare.prefill_candidates, bare.candidates)
    for probes in ("copy", "text", [PAIRS]):
        probed = calibrate(lm, random_ids(150), CONFIG, probes=probes)
        np.testing.assert_allclose(probed.scores, bare.scores, atol=1e-5)
        np.testing.assert_array_equal(probed.prefill_candidates, bare.candidates)


def test_rows_follow_from_the_scores_by_both_thresholds_and_by_a_kept_share(lm):
    profile = calibrate(lm, random_ids(150), CONFIG)
    prefill = np.asarray(choose_candidates(jnp.asarray(profile.scores), CONFIG.tau))
    np.testing.assert_array_equal(profile.prefill_candidates, prefill)
    rows = choose_cache_rows(profile.probe_scores, prefill, CONFIG.tau_probe)
    np.testing.assert_array_equal(profile.candidates, rows)
    assert (prefill < rows).any()
    half = (1 + profile.prefill_kept_share(150).mean()) / 2
    within = calibrate(lm, random_ids(150), CONFIG, kept=half)
    rows = densest_within(half, 150, profile.probe_scores, prefill, CONFIG, profile.candidates)
    np.testing.assert_array_equal(within.candidates, rows)
    dense = within.candidates == CONFIG.num_candidates
    assert 0 < dense.sum() < dense.size
    assert within.kept_share(150).mean() <= half
    assert within.probes["kept"] == half


def test_probes_that_do_not_matter_are_a_warning_and_the_worst_queries_take_their_place(lm, monkeypatch):
    monkeypatch.setattr(run, "_LEAST_NEED", 100.0)
    sequences, calls = [random_ids(150, seed=1), random_ids(97, seed=2)], []
    with pytest.warns(UserWarning, match=r"probes do not matter to 'tiny': .* less than 100.0, .*pairs") as caught:
        profile = unchecked(calibrate)(lm, sequences, CONFIG, progress=lambda *call: calls.append(call))
    line = inspect.currentframe().f_lineno - 1
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)
    assert profile.probes["fallback"]
    assert calls == [(done, 8) for done in range(9)] + [(done, 12) for done in range(9, 13)]
    dropped, weight = 0.0, 0
    for ids in sequences:
        start = len(ids) // 2
        worst = [
            np.stack([worst_of(q, k, start, row) for row in range(CONFIG.num_candidates + 1)], axis=-1)
            for q, k in layer_inputs(lm, ids.tolist(), full_attention)[0]
        ]
        dropped, weight = dropped + np.stack(worst) * (len(ids) - start), weight + len(ids) - start
    np.testing.assert_allclose(profile.probe_scores, 1 - dropped / weight, atol=1e-4)


def worst_of(q, k, start: int, row: int) -> list[float]:
    """Largest dropped mass of each KV head: 1% of so few queries is one."""
    q, k = (np.asarray(x[0], np.float64) for x in (q, k))
    group, found = q.shape[1] // k.shape[1], []
    for head in range(k.shape[1]):
        of_head = q[:, head * group : (head + 1) * group]
        kept, _ = oracle.select(of_head[:start][-CONFIG.observation :], k[:start, head], row, CONFIG)
        found.append(oracle.probe_dropped(of_head, k[:, head], start, kept, CONFIG).max())
    return found


def test_a_configuration_without_a_threshold_reads_no_copies_unless_a_share_is_asked_for(lm):
    config = dataclasses.replace(CONFIG, tau_probe=0.0)
    assert calibrate(lm, random_ids(150), config).probes is None
    assert calibrate(lm, random_ids(150), config, kept=0.99).probes["kind"] == "copy"
    asked = calibrate(lm, random_ids(150), config, probes=[PAIRS])
    assert asked.probes["kind"] == "pairs"
    np.testing.assert_array_equal(asked.candidates, asked.prefill_candidates)


def test_all_programs_of_a_bucket_are_compiled_once(lm, compiled):
    calibrate(lm, random_ids(241), CONFIG, probes="text")
    programs = ("score_layer", "_read_layer", "_probe_layer", "_probe_pullback")
    assert [sum(name in one for one in compiled) for name in programs] == [1, 1, 1, 1]
    compiled.clear()
    calibrate(lm, [random_ids(length) for length in (242, 249, 256)], CONFIG, probes="text")
    assert compiled == []


def reading(lm: LM, ids: list[int], start: int) -> Reading:
    return Reading(lm, ids, start, 32, CONFIG, lambda: None)


@pytest.mark.parametrize("rows", [[[0, 0], [0, 0]], [[0, 14], [3, 0]]])
def test_a_probe_is_read_over_cache_rows_behind_a_text_that_was_prefilled_under_row_1(lm, rows):
    ids, start = random_ids(120).tolist(), 90
    losses = reading(lm, ids, start).losses(np.array(rows, np.int32))
    expected = next_losses(layer_inputs(lm, ids, rows_behind(start, np.array(rows)))[1], ids)
    full = next_losses(layer_inputs(lm, ids, full_attention)[1], ids)
    np.testing.assert_allclose(losses[: 120 - start - 1], expected[start:], atol=2e-3)
    assert not np.allclose(expected[start:], full[start:], atol=2e-2)


def test_what_a_head_would_give_back_is_the_slope_of_the_losses_by_its_gate(lm):
    ids, start, step = random_ids(120).tolist(), 90, 0.02
    read, rows = reading(lm, ids, start), np.array([[0, 14], [2, 0]], np.int32)
    read.losses(rows)
    counted = np.zeros(32, np.float32)
    counted[[3, 10, 28]] = 1
    relief = read.relief(counted)

    def total(gates):
        logits = layer_inputs(lm, ids, rows_behind(start, rows, gates))[1]
        return next_losses(logits, ids)[start + np.array([3, 10, 28])].sum()

    for head in np.ndindex(2, 2):
        gates = np.zeros((2, 2))
        gates[head] = step
        slope = (total(-gates) - total(gates)) / (2 * step)
        assert relief[head] == pytest.approx(slope, rel=0.05, abs=2e-3)
    assert relief[0, 1] == pytest.approx(0, abs=1e-6)  # it sees all already
    assert np.abs(relief).max() > 0.05


def test_a_text_that_is_not_kept_is_read_again_with_the_same_result(lm, monkeypatch):
    kept, calls = calibrate(lm, random_ids(150), CONFIG), []
    monkeypatch.setattr(needs, "memory_bytes", lambda: 1)
    again = calibrate(lm, random_ids(150), CONFIG, progress=lambda *call: calls.append(call))
    assert again == kept
    assert calls[-1] == (2 + 2 * kept.probes["rounds"],) * 2 or calls[-1] == (2 + 2 * (kept.probes["rounds"] + 1),) * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kept": 0}, r"kept = 0: must lie in \(0, 1\]"),
        ({"kept": 1.5}, r"kept = 1\.5: must lie in \(0, 1\]"),
        ({"kept": float("nan")}, r"kept = nan: must lie in \(0, 1\]"),
        ({"kept": 0.01}, r"kept = 0\.01: must be at least 0\.\d+, .* of the cache of 150 tokens"),
        ({"kept": 0.5, "probes": None}, r"kept = 0\.5: needs probes, .* probes is None"),
        ({"probes": "copies"}, r"probes = 'copies': must be 'copy', 'text'"),
        ({"probes": [[("q", "a")]]}, r"probes\[0\]: tiny was loaded without a tokenizer"),
        ({"probes": [PAIRS, PAIRS]}, r"probes has 2 lists of pairs: must have one for each of 1 texts"),
    ],
)
def test_options_that_cannot_be_used_are_refused_before_any_work(lm, options, message):
    calls = []
    with pytest.raises(ValueError, match=message):
        unchecked(calibrate)(lm, random_ids(150), CONFIG, **options, progress=lambda *call: calls.append(call))
    assert calls == []
