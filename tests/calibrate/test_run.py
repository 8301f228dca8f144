"""calibrate under Algorithm 1: scores of one full-attention pass, averaged over texts, in linear memory; and what every
calibration takes and refuses. Predicted worth is in test_worth_profile.py."""

import dataclasses
import hashlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import unchecked
from meshes import lm_of, mesh_of, needs_8_devices, with_tca
from tiny import CONFIG as TINY
from tiny import tiny_lm

from tca_jax.calibration.run import calibrate
from tca_jax.calibration.scores import calibration_scores, choose_candidates
from tca_jax.methods.config import TCAConfig

CONFIG = TCAConfig(block_size=8, window=16, tau=0.7, criterion="retained_mass")


VOCABULARY = 64


def make_lm(**fields):
    return tiny_lm(config=dataclasses.replace(TINY, vocab_size=VOCABULARY, max_positions=512), **fields)


def random_ids(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, length)


@pytest.fixture(scope="module")
def lm():
    return make_lm()


def ids_tokenizer(text, verbose=True):
    return {"input_ids": [ord(char) % VOCABULARY for char in text]}


def reference_scores(lm, ids, config):
    """Scores [layers, Hkv, M + 1] of unpadded tokens under the attention of JAX."""

    @jax.jit
    def run(tokens, positions):
        scores = []

        def attention(layer, q, k, v, state):
            scores.append(calibration_scores(q, k, jnp.array([len(ids)]), config)[0])
            return jax.nn.dot_product_attention(q, k, v, is_causal=True), state

        lm.decoder(tokens, positions, attention, (None,) * lm.config.num_layers)
        return jnp.stack(scores)

    return np.asarray(run(jnp.asarray(ids)[None], jnp.arange(len(ids))[None]))


@pytest.mark.parametrize("config", [CONFIG, TCAConfig.paper(block_size=8, window=32)], ids=["default", "paper"])
def test_scores_are_those_of_exact_attention(lm, config):
    ids = random_ids(150)
    profile = calibrate(lm, ids, config)
    np.testing.assert_allclose(profile.scores, reference_scores(lm, ids, config), atol=2e-5)
    assert profile.config == config
    assert np.ptp(profile.scores[:, :, 0]) > 0.01  # heads differ, so their order is tested too
    np.testing.assert_array_equal(profile.candidates, choose_candidates(jnp.asarray(profile.scores), config.tau))
    assert config != CONFIG or len(np.unique(profile.candidates)) > 1


def test_scores_of_several_texts_are_averaged(lm):
    texts = [random_ids(150, seed=1), random_ids(160, seed=2), random_ids(155, seed=3)]
    alone = [calibrate(lm, text, CONFIG).scores.astype(np.float64) for text in texts]
    together = calibrate(lm, texts, CONFIG)
    np.testing.assert_array_equal(together.scores, np.mean(alone, axis=0).astype(np.float32))
    assert not np.allclose(alone[0], alone[1], atol=1e-3)


def test_strings_are_tokenized():
    lm = make_lm(tokenizer=ids_tokenizer)
    text = "the quick brown fox jumps over the lazy dog. " * 3 + "the lazy dog is."
    ids = np.array(ids_tokenizer(text)["input_ids"])
    profile = calibrate(lm, [text, ids, text.encode()], CONFIG)
    expected = {"tokens": len(ids), "sha256": hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()}
    assert profile.sources == (expected,) * 3
    assert profile.model_name == "tiny"
    assert profile == calibrate(lm, (text, text, list(ids)), CONFIG)


def test_short_texts_are_a_warning(lm):
    calibrate(lm, random_ids(2 * (CONFIG.window + CONFIG.block_size)), CONFIG)
    message = r"texts\[1\] has 47 tokens, fewer than 2 \(window \+ block_size\) = 48"
    with pytest.warns(UserWarning, match=message) as caught:
        unchecked(calibrate)(lm, [random_ids(150), random_ids(47)], CONFIG)
    line = inspect.currentframe().f_lineno - 1
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "texts is empty"),
        ([[1] * 150, []], r"texts\[1\] is empty"),
        ([1] * 23, r"texts\[0\] has 23 tokens: calibration needs 24 \(window \+ block_size = 16 \+ 8\), at most 512"),
        ([[1] * 150, [1] * 513], r"texts\[1\] has 513 tokens: .* at most 512 \(positions of 'tiny'\)"),
        ([1] * 149 + [VOCABULARY], r"texts\[0\] holds token id 64: ids of tiny lie in \[0, 64\)"),
        (["x" * 150, b"\xff" * 150], r"texts\[1\] is not valid UTF-8"),
    ],
)
def test_wrong_texts_are_refused_before_any_work(texts, message):
    calls = []
    with pytest.raises(ValueError, match=message):
        calibrate(make_lm(tokenizer=ids_tokenizer), texts, CONFIG, progress=lambda *call: calls.append(call))
    assert calls == []


@pytest.mark.parametrize(("name", "value"), [("count", 4), ("tokens", 100), ("kept", 0.5)])
def test_options_of_predicted_worth_are_refused(lm, name, value):
    with pytest.raises(ValueError, match=rf"{name} = {value}: goes with predicted worth; leave out config"):
        calibrate(lm, random_ids(150), CONFIG, **{name: value})


@needs_8_devices
def test_budgets_over_a_mesh_are_those_of_one_device():
    ids, on_mesh = random_ids(120), with_tca(lm_of(mesh_of((1, 2))))
    assert on_mesh.head_orders != (tuple(range(on_mesh.config.num_kv_heads)),) * on_mesh.config.num_layers
    one, many = (calibrate(lm, ids, CONFIG) for lm in (lm_of(), on_mesh))
    np.testing.assert_array_equal(many.candidates, one.candidates)
    np.testing.assert_allclose(many.scores, one.scores, atol=2e-4)
    assert many.fingerprint == one.fingerprint
    with pytest.raises(ValueError, match="is on a mesh: load it on one device"):  # predicted worth needs one device
        calibrate(lm_of(mesh_of((1, 2))), random_ids(2000), count=2, tokens=512)


def test_choice_is_the_sparsest_that_reaches_the_threshold():
    scores = jnp.array([[0.5, 0.92, 0.91, 0.95, 1.0], [0.1, 0.2, 0.3, 0.89, 1.0], [0.9, 0.0, 0.0, 0.0, 1.0]])
    np.testing.assert_array_equal(choose_candidates(scores, 0.9), [1, 4, 0])
