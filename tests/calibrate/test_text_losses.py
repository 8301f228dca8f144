"""Losses inside texts by the readings of all heads: what they are of, and their derivatives."""

import jax.numpy as jnp
import numpy as np
import pytest
from sharp_lm import make_lm, random_ids

import tca_jax
from tca_jax.calibration import text_losses
from tca_jax.calibration.text_losses import TextLosses
from tca_jax.engine.lm import LM
from tca_jax.methods.config import TCAConfig

CONFIG = TCAConfig(block_size=8, window=16, reserve=3, observation=4, spread=2, fetch=2, fetch_stride=4)
TEXTS = [random_ids(120, seed=1).tolist(), random_ids(97, seed=2).tolist()]
MIXED = np.array([[False, True], [True, False]])
NONE = np.zeros((2, 2), bool)


@pytest.fixture(scope="module")
def lm() -> LM:
    return make_lm()


def losses_of(lm: LM, config=CONFIG, texts=TEXTS, step=lambda: None) -> TextLosses:
    return TextLosses(lm, texts, config, step)


def scored(lm: LM, config=CONFIG) -> list[np.ndarray]:
    """Losses of the tokens that count, by `score` under the model's own method."""
    reach = config.window + config.block_size
    return [-np.asarray(of_text[reach:]) for of_text in tca_jax.score(lm, TEXTS).logprobs]


def under(lm: LM, more: np.ndarray) -> LM:
    return lm.with_method("tca", candidates=0, config=CONFIG, readings=np.where(more, "blocks", "sparse"))


def check(found, expected) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=5e-4)


def test_full_losses_equal_scores(lm):
    found = losses_of(lm).full()
    check(found, scored(lm))
    assert [of_text.size for of_text in found] == [120 - 25, 97 - 25]


@pytest.mark.integration
@pytest.mark.parametrize("more", [NONE, MIXED, ~NONE], ids=["row 0", "mixed", "blocks"])
def test_losses_of_readings_equal_scores(lm, more):
    losses = losses_of(lm)
    check(losses.of(more), scored(under(lm, more)))
    assert not np.allclose(losses.of(more)[0], losses.full()[0], atol=1e-2)


@pytest.mark.integration
def test_shares_are_attended_shares(lm):
    losses = losses_of(lm)
    assert losses.shares is None
    for number, more in enumerate((NONE, ~NONE)):
        losses.of(more)
        assert losses.shares.shape == (2, 2, 2)
        expected = [tca_jax.prefill(under(lm, more), text).stats.attended_share for text in TEXTS]
        assert losses.shares[..., number].mean() == pytest.approx(np.mean(expected), rel=1e-5)


@pytest.mark.parametrize("more", [NONE, MIXED, ~NONE], ids=["row 0", "mixed", "blocks"])
def test_slopes_follow_the_measured_loss(lm, monkeypatch, more):
    losses, step = losses_of(lm, texts=TEXTS[:1]), 2e-3

    def total(gates) -> float:
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


@pytest.mark.integration
def test_programs_compile_once_for_a_bucket(compiled):
    lm = make_lm(layers=3)
    texts = [random_ids(length).tolist() for length in (329, 333)]
    losses = losses_of(lm, texts=texts)
    losses.of(np.zeros((3, 2), bool))
    losses.slopes(np.zeros((3, 2), bool))
    assert sum("read_layer" in one for one in compiled) == 1
    assert sum("_gated_slopes" in one for one in compiled) == 1
    compiled.clear()
    losses.of(np.ones((3, 2), bool))
    losses.slopes(np.ones((3, 2), bool))
    assert compiled == []
