"""Predicted worth by masks: sparse reading against loops, kept shares, variants on a small model."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import tca_jax
from tca_jax.calibration.predicted_worth import SHARES, WorthMaps
from tca_jax.lab.sparse_reading import BLOCK, WINDOW, _attend
from tca_jax.lab.worth import (
    KEEPINGS,
    Keeping,
    _late_table,
    app,
    kept_masks,
    masked_read,
    ruler_document,
    with_reserve,
    worth_page,
)

HEADS, GROUP, SIZE = 2, 2, 16


def drawn(tokens: int):
    keys = jax.random.split(jax.random.key(0), 4)
    q = 3 * jax.random.normal(keys[0], (tokens, HEADS * GROUP, SIZE))
    k, v = (jax.random.normal(key, (tokens, HEADS, SIZE)) for key in keys[1:3])
    return q, k, v, jax.random.uniform(keys[3], (HEADS, tokens)) < 0.05


def by_loops(q, k, v, selected, worth, length, mass, stride):
    """DESIGN 2.5, query by query."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, pairs = np.zeros_like(q), np.zeros(HEADS)
    for head in range(HEADS):
        chosen = selected[head] | (np.arange(len(q)) < 4)
        scores = np.einsum("lgd,md->glm", q[:, head * GROUP : (head + 1) * GROUP], k[:, head]) / np.sqrt(SIZE)
        for tile in range(len(q) // BLOCK):
            first = max(0, tile * BLOCK - WINDOW)
            largest = np.zeros(len(q) // BLOCK)
            for i in range(tile * BLOCK + stride - 1, (tile + 1) * BLOCK, stride):
                p = np.exp(scores[:, i, : i + 1] - scores[:, i, : i + 1].max(axis=-1, keepdims=True))
                p = np.pad(p / p.sum(axis=-1, keepdims=True), ((0, 0), (0, len(q) - i - 1)))
                largest = np.maximum(largest, p.reshape(GROUP, -1, BLOCK).sum(axis=-1).max(axis=0))
            fetched = [t for t in range(first // BLOCK) if largest[t] >= mass]
            for i in range(tile * BLOCK, min((tile + 1) * BLOCK, length)):
                seen = [j for j in range(i + 1) if chosen[j] or j >= first or j // BLOCK in fetched]
                logits, values = [scores[:, i, j] for j in seen], [v[j, head] for j in seen]
                for t in range(first // BLOCK):
                    rest = [j for j in range(t * BLOCK, (t + 1) * BLOCK) if not chosen[j]]
                    if t not in fetched and rest:
                        query, w = q[i, head * GROUP : (head + 1) * GROUP], np.exp(worth[head, rest])
                        w /= w.sum()
                        logits.append(query @ (w @ k[rest, head]) / np.sqrt(SIZE) - w @ np.log(w))
                        values.append(w @ v[rest, head])
                p = np.exp(np.stack(logits) - np.max(logits, axis=0))
                out[i, head * GROUP : (head + 1) * GROUP] = (p / p.sum(axis=0)).T @ np.stack(values)
                pairs[head] += len(values)
    return out, pairs


@pytest.mark.parametrize(("mass", "stride"), [(0.1, 16), (0.3, 8), (np.inf, 16)])
def test_reading_is_that_of_loops(mass, stride):
    tokens, length = 5 * BLOCK, 5 * BLOCK - 9
    q, k, v, selected = drawn(tokens)
    worth = np.random.default_rng(0).normal(size=(HEADS, tokens)).astype(np.float32)
    out, pairs = _attend(q, k, v, selected, jnp.asarray(worth), jnp.int32(length), jnp.float32(mass), stride)
    expected, expected_pairs = by_loops(q, k, v, np.asarray(selected), worth, length, mass, stride)
    np.testing.assert_allclose(np.asarray(out)[:length], expected[:length], atol=2e-5)
    np.testing.assert_allclose(pairs, expected_pairs)


def test_every_variant_keeps_its_share():
    rng = np.random.default_rng(0)
    predicted = {
        name: rng.normal(size=(4, 16 * BLOCK)).astype(np.float32) for name in ("worth", "probability", "effect")
    }
    zeros = np.zeros((2, 2), np.float32)
    maps = {
        name: WorthMaps(
            np.zeros((2, 2, 3), np.float32), np.quantile(each, 1 - SHARES).astype(np.float32), zeros, zeros + 0.9, zeros
        )
        for name, each in predicted.items()
    }
    for keeping in KEEPINGS:
        kept = kept_masks(keeping, predicted, maps, 0.6)
        assert kept.mean() == pytest.approx(0.6, abs=0.02), keeping
        assert kept[:, -WINDOW:].all()
        assert kept[:, :4].all()
    assert kept_masks(Keeping(), predicted, maps, 1.0).all()


def test_means_stand_for_evicted_tokens():
    tokens = 2 * BLOCK
    _, k, v, kept = drawn(tokens)
    kept = np.asarray(kept)
    read, share = masked_read(range(tokens), [(k[None], v[None])], kept, 1.0, np.zeros(kept.shape, np.float32))
    (mean_k, _), bias = read.keys[0], np.asarray(read.masks[0])[0]
    np.testing.assert_allclose(mean_k[0, tokens, 1], np.asarray(k)[:BLOCK][~kept[1, :BLOCK], 1].mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(bias[1, tokens], np.log((~kept[1, :BLOCK]).sum()), rtol=1e-6)
    assert np.array_equal(bias[:, :tokens] == 0, kept)
    assert share == pytest.approx(kept.mean() + 1 / BLOCK)


def test_a_reserve_is_each_heads_own():
    bias = jnp.full((1, 2, 66), -jnp.inf).at[0, 1, 40].set(0).at[..., 64:].set(2)  # the last two are means
    scores = jnp.zeros((1, 2, 66)).at[0, 0, 5].set(0.9).at[0, 0, 50].set(0.5).at[0, 1, 40].set(0.8).at[0, 1, 3].set(0.1)
    (found,) = np.asarray(with_reserve([bias], [scores], 64, 20)[0])
    kept = found[:, :64] == 0
    assert np.array_equal(np.flatnonzero(kept[0]), [*range(5, 21), *range(50, 64)])  # ties of the second are kept
    assert kept[1, 3:19].all()
    assert kept[1, 40:56].all()
    assert (found[:, 64:] == 2).all()


def test_nothing_is_measured_with_few_facts():
    record = {"method": "full", "facts": [2] * 7 + [0]}
    assert _late_table([record]) == "full attention answers 7 facts, fewer than 8: nothing was measured"


def test_a_task_of_ruler_asks_for_references():
    lm = tca_jax.load("recall-tiny")
    document = ruler_document(lm, "niah_multivalue", 0, 2_048)
    assert document.kinds == ("fact",) * 4
    asked = [
        lm.tokenizer.decode(row[count > 0][1:]) for row, count in zip(document.rows, document.counted, strict=True)
    ]
    text = lm.tokenizer.decode(document.ids)
    assert all(answer.strip() and answer.strip() in text for answer in asked)
    assert len(set(asked)) == 4
    with pytest.raises(ValueError, match="--task niah: must be of niah_single_1"):
        ruler_document(lm, "niah", 0, 2_048)


def test_a_model_alone_is_measured():
    result = CliRunner().invoke(app, ["no-such-model", "--documents", "1"])
    assert "no-such-model" in str(result.exception)


def test_the_page_matches_its_records():
    results = Path(__file__).parents[2] / "lab/results"
    assert (results / "worth.md").read_text("utf-8") == worth_page([results / "worth.jsonl.xz"])
