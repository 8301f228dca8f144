"""Losses of texts and of probes behind them, and their derivatives, against attention by masks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import poison, qkv
from reading_oracle import attend_by, read
from sharp_lm import make_lm, random_ids

import tca_jax
from tca_jax.calibration import gated_attention, text_losses
from tca_jax.calibration.probe_losses import ReadText
from tca_jax.calibration.probes import ProbedText, Segment
from tca_jax.calibration.text_losses import TextLosses
from tca_jax.methods.config import TCAConfig

CONFIG = TCAConfig(block_size=8, window=16, reserve=3, observation=4, spread=2, fetch=2, fetch_stride=4)
#: Readings of two heads of two layers: some read blocks.
NONE, MORE = np.zeros((2, 2), bool), np.array([[False, True], [True, False]])


@pytest.fixture(scope="module")
def lm():
    return make_lm()


# --- attention under both readings ----------------------------------------------------------------

#: Heads of a group, KV heads, tokens, and what these are padded to.
SHAPES = [(1, 3, 101, 112), (2, 2, 128, 128), (7, 1, 77, 77)]
NOISE = 1e-5


def operands(group, kv_heads, length, columns, padding=np.nan):
    """q, k, v with something past the length, the length, and the heads' numbers."""
    q, k, v = qkv(group, 1, columns, group * kv_heads, kv_heads, 16, 0.8)
    given = (np.asarray(poison(x, [length], padding)) for x in (q, k, v))
    return (*given, np.array([length], np.int32)), np.arange(kv_heads)


read_both = jax.jit(gated_attention.read_both, static_argnums=5)


@functools.partial(jax.jit, static_argnums=7)
def gated_gradients(q, k, v, gates, heads, lengths, cotangent, config):
    """The output, and what its cotangent pulls back to."""
    out, pullback = jax.vjp(lambda *x: gated_attention.attend_gated(*x, gates, heads, lengths, config), q, k, v)
    return out, pullback(cotangent)


def masks_of(q, k, length, gates):
    """Of each KV head [Hkv, L, L]: blocks at a gate of 1, sparse at 0."""
    group, masks = q.shape[2] // k.shape[2], []
    for head, gate in enumerate(gates):
        queries = np.asarray(q[0, :length, head * group : (head + 1) * group], np.float64)
        reading = "blocks" if gate else "sparse"
        mask, margin = read(queries, np.asarray(k[0, :length, head], np.float64), reading, 0, CONFIG)
        assert margin > NOISE
        masks.append(mask)
    return np.stack(masks)


def masked(q, k, v, masks):
    """Attention of q [L, Hq, d], k and v [L, Hkv, d], by masks [Hkv, L, L]."""
    length, kv_heads, dim = k.shape
    queries = q.reshape(length, kv_heads, -1, dim)
    scores = jnp.einsum("ihgd,jhd->hgij", queries, k, precision="highest") / np.sqrt(dim)
    weights = jax.nn.softmax(jnp.where(masks[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("hgij,jhd->ihgd", weights, v, precision="highest").reshape(q.shape)


@jax.jit
def masked_gradients(q, k, v, masks, cotangent):
    out, pullback = jax.vjp(lambda *x: masked(*x, masks), q, k, v)
    return out, pullback(cotangent)


@pytest.mark.parametrize("all_gates", [0.0, 1.0, None], ids=["sparse", "blocks", "mixed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_equal_attention_by_masks(shape, all_gates):
    length = shape[2]
    (q, k, v, lengths), heads = operands(*shape)
    gates = np.float32(heads % 2 == 0) if all_gates is None else np.full(shape[1], all_gates, np.float32)
    cotangent = np.random.default_rng(0).standard_normal(q.shape).astype(np.float32)
    out, found = gated_gradients(q, k, v, gates, heads, lengths, cotangent, CONFIG)
    own = [x[0, :length] for x in (q, k, v)]
    masks = masks_of(q, k, length, gates)
    expected_out, expected = masked_gradients(*own, masks, cotangent[0, :length])
    np.testing.assert_allclose(out[0, :length], expected_out, atol=1e-5)
    for name, mine, theirs in zip("qkv", found, expected, strict=True):
        np.testing.assert_allclose(mine[0, :length], theirs, atol=2e-5, err_msg=name)
        assert not np.asarray(mine[0, length:]).any(), name
    pairs = read_both(q, k, v, heads, lengths, CONFIG).pairs[heads, gates.astype(int)]
    np.testing.assert_allclose(pairs, masks.sum(axis=(1, 2)), rtol=1e-6)


# --- losses inside texts ---------------------------------------------------------------------------

TEXTS = [random_ids(120, seed=1).tolist(), random_ids(97, seed=2).tolist()]


def losses_of(lm, config=CONFIG, texts=TEXTS, step=lambda: None):
    return TextLosses(lm, texts, config, step)


def scored(lm, config=CONFIG):
    """Losses of the tokens that count, by `score` under the model's own method."""
    reach = config.window + config.block_size
    return [-np.asarray(of_text[reach:]) for of_text in tca_jax.score(lm, TEXTS).logprobs]


def under(lm, more):
    return lm.with_method("tca", candidates=0, config=CONFIG, readings=np.where(more, "blocks", "sparse"))


def check(found, expected):
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=5e-4)


def test_full_losses_equal_scores(lm):
    found = losses_of(lm).full()
    check(found, scored(lm))
    assert [of_text.size for of_text in found] == [120 - 25, 97 - 25]


@pytest.mark.integration
@pytest.mark.parametrize("more", [NONE, MORE, ~NONE], ids=["smallest budgets", "mixed", "blocks"])
def test_losses_and_shares_are_those_of_the_method(lm, more):
    losses = losses_of(lm)
    check(losses.of(more), scored(under(lm, more)))
    assert not np.allclose(losses.of(more)[0], losses.full()[0], atol=1e-2)
    expected = [tca_jax.prefill(under(lm, more), text).stats.attended_share for text in TEXTS]
    shares = np.where(more, losses.shares[..., 1], losses.shares[..., 0])
    assert shares.mean() == pytest.approx(np.mean(expected), rel=1e-5)


@pytest.mark.parametrize("more", [NONE, MORE, ~NONE], ids=["smallest budgets", "mixed", "blocks"])
def test_slopes_of_texts_follow_the_loss(lm, monkeypatch, more):
    losses, step = losses_of(lm, texts=TEXTS[:1]), 2e-3

    def total(gates):
        with monkeypatch.context() as patch:
            given = lambda layer: (jnp.asarray(gates[layer], jnp.float32), jnp.arange(2))  # noqa: E731
            patch.setattr(text_losses, "gates_of", lambda lm, more: given)
            return float(losses.of(more)[0].mean(dtype=np.float64))

    found = losses.slopes(more)
    assert found.shape == (2, 2)
    for head in np.ndindex(2, 2):
        beside = []
        for sign in (1, -1):
            gates = more.astype(float)
            gates[head] += sign * step
            beside.append(total(gates))
        assert found[head] == pytest.approx((beside[0] - beside[1]) / (2 * step), rel=0.03, abs=2e-3)
    assert np.abs(found).max() > 0.02


# --- losses of probes ------------------------------------------------------------------------------

DENSE = CONFIG.num_candidates
LENGTHS = (17, 9, 12)
ROWS = np.array([[0, DENSE], [3, 2]], np.int32)


def segment(length, seed):
    return Segment(tuple(random_ids(length, seed=seed).tolist()), (True,) * length, "pairs")


SEGMENTS = tuple(segment(length, 10 + length) for length in LENGTHS)
TEXT = ProbedText(tuple(random_ids(107, seed=3).tolist()), SEGMENTS)


def read_text(lm, more=MORE, text=TEXT, step=lambda: None):
    return ReadText(lm, text, more, CONFIG, step)


def split(losses, text=TEXT):
    """Losses of the tokens of each probe but its first."""
    out, start = [], 0
    for probe in text.segments:
        out.append(losses[start : start + len(probe.ids) - 1])
        start += len(probe.ids)
    return out


def by_masks(lm, probe, more, rows, gates=None):
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


@pytest.mark.parametrize("rows", [np.zeros((2, 2), np.int32), ROWS], ids=["smallest budgets", "rows"])
def test_losses_of_probes_equal_attention_by_masks(lm, rows):
    found = split(read_text(lm).losses(rows))
    for probe, losses in zip(SEGMENTS, found, strict=True):
        np.testing.assert_allclose(losses, by_masks(lm, probe, MORE, rows), atol=2e-3)
    full = split(read_text(lm, None).losses(np.full((2, 2), DENSE, np.int32)))
    assert max(np.abs(a - b).max() for a, b in zip(full, found, strict=True)) > 0.05


def test_slopes_of_probes_follow_a_gate(lm):
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
