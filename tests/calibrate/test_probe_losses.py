"""Losses of probes over what heads keep of a text, and their derivatives, against whole passes by masks."""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from reading_oracle import attend_by, read
from sharp_lm import make_lm, random_ids

from tca_jax.calibration.probe_losses import ReadText
from tca_jax.calibration.probes import ProbedText, Segment
from tca_jax.engine.lm import LM
from tca_jax.methods.config import TCAConfig

CONFIG = TCAConfig(block_size=8, window=16, reserve=3, observation=4, spread=2, fetch=2, fetch_stride=4)
DENSE = CONFIG.num_candidates
LENGTHS = (17, 9, 12)
MORE = np.array([[False, True], [True, False]])
ROWS = np.array([[0, DENSE], [3, 2]], np.int32)


def segment(length: int, seed: int) -> Segment:
    return Segment(tuple(random_ids(length, seed=seed).tolist()), (True,) * length, "pairs")


SEGMENTS = tuple(segment(length, 10 + length) for length in LENGTHS)
TEXT = ProbedText(tuple(random_ids(107, seed=3).tolist()), SEGMENTS)


@pytest.fixture(scope="module")
def lm() -> LM:
    return make_lm()


def read_text(lm: LM, more=MORE, text=TEXT, step=lambda: None) -> ReadText:
    return ReadText(lm, text, more, CONFIG, step)


def split(losses: np.ndarray, text=TEXT) -> list[np.ndarray]:
    """Losses of the tokens of each probe but its first."""
    out, start = [], 0
    for probe in text.segments:
        out.append(losses[start : start + len(probe.ids) - 1])
        start += len(probe.ids)
    return out


def by_masks(lm: LM, probe: Segment, more, rows, gates=None) -> np.ndarray:
    """Losses of a probe in float64: the text is read under the readings, the probe reads what the rows have kept, and
    beyond it by gates [layers, Hkv]."""
    start, ids = len(TEXT.ids), [*TEXT.ids, *probe.ids]
    right = np.arange(start) >= CONFIG.num_ranked_blocks(start) * CONFIG.block_size

    def attention(layer, q, k, v, state):
        q, k, v = (np.asarray(x[0], np.float64) for x in (q, k, v))
        group, sparse, whole = q.shape[1] // k.shape[1], [], []
        for head in range(k.shape[1]):
            queries, keys = q[:start, head * group : (head + 1) * group], k[:start, head]
            reading = "blocks" if more[layer][head] else "sparse"
            mask = np.tri(len(k), dtype=bool)
            mask[:start, :start], _ = read(queries, keys, reading, 0, CONFIG)
            whole.append(mask.copy())
            kept, _ = oracle.select(
                queries[-CONFIG.observation :],
                keys,
                int(rows[layer][head]),
                CONFIG,
                prefill_candidate=None if reading == "blocks" else 0,
            )
            mask[start:, :start] = kept | right
            sparse.append(mask)
        out, over_all = attend_by(sparse, q, k, v), attend_by(whole, q, k, v)
        if gates is not None:
            out += np.repeat(gates[layer], group)[:, None] * (over_all - out)
        return jnp.asarray(out, jnp.float32)[None], None

    positions = jnp.arange(len(ids))[None]
    hidden, _ = lm.decoder(jnp.asarray([ids]), positions, attention, (None,) * lm.config.num_layers)
    logits = np.asarray(lm.decoder.logits(hidden[0]), np.float64)
    return -np.log(oracle.softmax(logits))[np.arange(start, len(ids) - 1), ids[start + 1 :]]


@pytest.mark.parametrize("rows", [np.zeros((2, 2), np.int32), ROWS], ids=["row 0", "rows"])
def test_losses_equal_attention_by_masks(lm, rows):
    found = split(read_text(lm).losses(rows))
    for probe, losses in zip(SEGMENTS, found, strict=True):
        np.testing.assert_allclose(losses, by_masks(lm, probe, MORE, rows), atol=2e-3)
    full = split(read_text(lm, None).losses(np.full((2, 2), DENSE, np.int32)))
    assert max(np.abs(a - b).max() for a, b in zip(full, found, strict=True)) > 0.05


def test_slopes_follow_a_gate(lm):
    text, step = read_text(lm), 0.02
    text.losses(ROWS)
    weights = np.zeros(text.num_columns, np.float32)
    counted = {3: 0.5, LENGTHS[0] + 2: 1.0, sum(LENGTHS) - 2: 0.25}
    for column, weight in counted.items():
        weights[column] = weight
    found = text.slopes(ROWS, weights)

    def total(gates):
        losses = [by_masks(lm, probe, MORE, ROWS, gates) for probe in SEGMENTS]
        return 0.5 * losses[0][3] + losses[1][2] + 0.25 * losses[2][-1]

    for head in np.ndindex(2, 2):
        gates = np.zeros((2, 2))
        gates[head] = step
        expected = (total(gates) - total(-gates)) / (2 * step)
        assert found[head] == pytest.approx(expected, rel=0.05, abs=2e-3)
    assert found[0, 1] == pytest.approx(0, abs=1e-6)  # it sees all already
    assert np.abs(found).max() > 0.02


def test_a_text_in_host_memory(lm):
    here, there = read_text(lm), read_text(lm)
    assert here.nbytes >= 2 * 2 * 107 * 2 * 8 * 4
    there.to_host()
    assert there.nbytes == 0
    weights = np.ones(here.num_columns, np.float32)
    np.testing.assert_array_equal(there.losses(ROWS), here.losses(ROWS))
    np.testing.assert_array_equal(there.slopes(ROWS, weights), here.slopes(ROWS, weights))
