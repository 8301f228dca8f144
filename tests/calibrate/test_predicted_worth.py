"""Predicted worth: targets of a repetition against the unrolled model, maps against least squares, bad input."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, random_prompt

from tca_jax.calibration import predicted_worth
from tca_jax.calibration.predicted_worth import FLOOR, RIDGE, fit_worth, pack_texts, predict
from tca_jax.calibration.repetition import TARGETS, read_inputs, repetition_rows, text_targets

CHUNK, REQUEST = 32, [5, 9, 3]
TEXT = random_prompt(0, 110)  # four chunks, of which the last is short
GROUP = CONFIG.num_heads // CONFIG.num_kv_heads


def seen_by(row: int, fed: int) -> np.ndarray:
    """Mask of a text and a row's tokens: the text is causal, the row sees its chunk, the one before and the first."""
    length = len(TEXT)
    mask = np.tril(np.ones((length + fed, length + fed), bool))
    place = np.arange(length)
    mask[length:, :length] = (place // CHUNK == row) | (place // CHUNK == row - 1) | (place < CHUNK)
    return mask


def unrolled(lm, row: int, fed: list[int], counted: np.ndarray):
    """The margin as a function of what is added to the heads' outputs, and the last call's attention."""
    tokens = jnp.asarray([[*TEXT, *fed]])
    mask = jnp.asarray(seen_by(row, len(fed)))

    def run(added):
        def attention(layer, q, k, v, state):
            grouped = q[0].reshape(q.shape[1], CONFIG.num_kv_heads, GROUP, -1)
            scores = jnp.einsum("nhgd,lhd->hgnl", grouped, k[0]) / np.sqrt(CONFIG.head_dim)
            p = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
            out = jnp.einsum("hgnl,lhd->nhgd", p, v[0]).reshape(q.shape[1:])
            out = out.at[len(TEXT) :].add(added[layer])
            return out[None], (p, v[0], out)

        hidden, states = lm.decoder(tokens, jnp.arange(tokens.shape[1])[None], attention, (None,) * CONFIG.num_layers)
        logits = lm.decoder.logits(hidden[0, len(TEXT) : -1])
        right = jax.nn.one_hot(jnp.asarray(fed[1:]), logits.shape[-1], dtype=bool)
        margins = jnp.where(right, logits, 0).sum(axis=-1) - jax.nn.logsumexp(jnp.where(right, -1e30, logits), axis=-1)
        return (margins * counted[:-1]).sum(), states

    return run


def expected_targets(lm, row: int, fed: list[int], counted: np.ndarray):
    """Of each layer: the three targets of all tokens of the text [3, Hkv, L], and norms of slopes [Hkv, n]."""
    run = unrolled(lm, row, fed, counted)
    zeros = jnp.zeros((CONFIG.num_layers, len(fed), CONFIG.num_heads, CONFIG.head_dim))
    slopes, states = jax.jit(jax.grad(run, has_aux=True))(zeros)
    for layer, (p, v, out) in enumerate(states):
        p = np.asarray(p)[:, :, len(TEXT) :, : len(TEXT)] * counted[:, None]
        slope, out = (np.asarray(x).reshape(len(fed), 2, GROUP, -1) for x in (slopes[layer], out[len(TEXT) :]))
        norm, values = np.linalg.norm(slope, axis=-1).transpose(1, 2, 0), np.asarray(v)[: len(TEXT)]
        change = np.einsum("nhgd,lhd->hgnl", slope, values) - (slope * out).sum(-1).transpose(1, 2, 0)[..., None]
        worth = (p * norm[..., None]).max((1, 2)) * np.linalg.norm(values, axis=-1).T
        yield np.stack([worth, p.max((1, 2)), (p * np.abs(change)).max((1, 2))]), norm.max(axis=1) * counted


def test_targets_are_those_of_the_unrolled_model(lm):
    layers, rows = read_inputs(lm, TEXT), repetition_rows(TEXT, REQUEST, CHUNK)
    found = dict(text_targets(lm, TEXT, layers, rows))
    assert rows.counted.sum() == len(TEXT) - len(rows.tokens)
    norms = np.zeros((CONFIG.num_layers, CONFIG.num_kv_heads))
    for row in range(len(rows.tokens)):
        chunk = np.arange(row * CHUNK, min((row + 1) * CHUNK, len(TEXT)))
        fed = rows.tokens[row, : len(REQUEST) + len(chunk)].tolist()
        for layer, (expected, norm) in enumerate(expected_targets(lm, row, fed, rows.counted[row, : len(fed)])):
            actual = found[layer].values[:, :, chunk]
            np.testing.assert_allclose(actual, expected[..., chunk], rtol=2e-3, atol=1e-6)
            norms[layer] += norm.sum(axis=-1)
    for layer, inputs in enumerate(layers):
        size = np.linalg.norm(inputs.v[0, : len(TEXT)], axis=-1).mean(axis=0)
        np.testing.assert_allclose(found[layer].head_weight, norms[layer] / rows.counted.sum() * size, rtol=1e-3)


def test_maps_are_ridge_regressions(lm):
    texts = [random_prompt(seed, 96) for seed in range(4)]
    stages = []
    found = fit_worth(lm, texts, targets=TARGETS, chunk=CHUNK, progress=lambda *stage: stages.append(stage))
    assert stages == [(f"{stage} maps", done, 2) for stage in ("fitting", "measuring") for done in (1, 2)]
    read = [read_inputs(lm, ids) for ids in texts]
    rows = [repetition_rows(ids, [], CHUNK) for ids in texts]
    targets = [dict(text_targets(lm, *each)) for each in zip(texts, read, rows, strict=True)]
    predicted = []
    for layer in range(CONFIG.num_layers):
        wide = np.concatenate([np.asarray(of_text[layer].x[0, :96], np.float64) for of_text in read[:2]])
        wide = np.concatenate([wide, np.ones((len(wide), 1))], axis=1)
        values = np.concatenate([of_text[layer].values[0, :, :96] for of_text in targets[:2]], axis=1)
        logs = np.log(np.maximum(values, FLOOR)).T
        gram = wide.T @ wide
        ridge = np.diag(np.append(RIDGE * np.diag(gram)[:-1] + 1e-6 * np.diag(gram).mean(), 1e-6))
        expected = np.linalg.solve(gram + ridge, wide.T @ logs).T
        np.testing.assert_allclose(found["worth"].maps[layer], expected, rtol=2e-2, atol=2e-3)
        predicted.append(np.concatenate([predict(expected, of_text[layer].x)[:, :96] for of_text in read[2:]], axis=1))
    worth = found["worth"]
    for share in (0.05, 0.3, 1.0):
        assert np.mean(np.stack(predicted) >= worth.threshold(share)) == pytest.approx(share, abs=0.02)
    np.testing.assert_allclose(np.exp(np.log(worth.head_weights).mean()), 1, rtol=1e-5)
    assert np.all(np.abs(worth.correlation) <= 1)
    assert worth.shares.mean() == pytest.approx(0.2, abs=0.02)


def test_texts_are_packed_and_cut(lm):
    texts = [list(range(1, 31)), list(range(31, 41)), list(range(1, 96)), list(range(5, 9))]
    assert pack_texts(lm, texts, 2, 40) == [list(range(1, 41)), list(range(1, 41))]
    with pytest.raises(ValueError, match="36 tokens too few for 3 texts of 40"):
        pack_texts(lm, texts, 3, 40)


def test_head_without_a_finite_map_keeps_its_window():
    maps = np.ones((1, 2, 3), np.float32)
    maps[0, 1, 0] = np.nan
    with pytest.warns(UserWarning, match="1 of 2 maps are not finite: their heads keep the window"):
        found = predicted_worth._finite(maps)
    assert predict(found[0], jnp.ones((1, 4, 2)))[1].max() < -1e8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predicted_worth._finite(np.ones((1, 2, 3), np.float32))
