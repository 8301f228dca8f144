"""calibrate under Algorithm 1: scores of one full-attention pass, averaged over texts, in linear memory; and what every
calibration takes and refuses. What heads are worth is in test_worth.py."""

import hashlib
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import unchecked
from flax import nnx
from sharp_lm import VOCABULARY, broken_lm, make_lm, random_ids

import tca_jax
from tca_jax import methods
from tca_jax.calibration.run import _score_layer, calibrate, require_fit
from tca_jax.calibration.scores import calibration_scores
from tca_jax.engine.lm import LM
from tca_jax.errors import least_share
from tca_jax.methods.candidates import kept_share
from tca_jax.methods.config import TCAConfig
from tca_jax.models.decoder import Decoder
from tca_jax.pallas_kernels.causal_attention import causal_attention

CONFIG = TCAConfig(block_size=8, window=16, tau=0.7, criterion="retained_mass")
BY_NAME = ("probes", "kept", "attended", "criterion", "progress")


@pytest.fixture(scope="module")
def lm() -> LM:
    return make_lm()


def ids_tokenizer(text: str, verbose: bool = True) -> dict[str, list[int]]:
    return {"input_ids": [ord(char) % VOCABULARY for char in text]}


def reference_scores(lm: LM, ids: np.ndarray, config: TCAConfig) -> np.ndarray:
    """Scores [layers, Hkv, M + 1] of unpadded tokens under attention written as one L x L softmax."""
    scores = []

    def attention(layer, q, k, v, state):
        scores.append(calibration_scores(q, k, jnp.array([len(ids)]), config)[0])
        keys, values = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        logits = jnp.einsum("bihd,bjhd->bhij", q, keys, precision="highest") / math.sqrt(q.shape[-1])
        logits = jnp.where(jnp.tri(len(ids), dtype=bool), logits, -jnp.inf)
        return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(logits), values, precision="highest"), state

    positions = jnp.arange(len(ids))[None]
    lm.decoder(jnp.asarray(ids)[None], positions, attention, (None,) * lm.config.num_layers)
    return np.stack(scores)


@pytest.mark.parametrize("config", [CONFIG, TCAConfig.paper(block_size=8, window=32)], ids=["default", "paper"])
def test_scores_are_those_of_exact_full_attention_on_the_unpadded_text(lm, config):
    ids = random_ids(150)
    profile = calibrate(lm, ids, config)
    np.testing.assert_allclose(profile.scores, reference_scores(lm, ids, config), atol=2e-5)
    assert profile.config == config
    assert np.ptp(profile.scores[:, :, 0]) > 0.01  # heads differ, so their order is tested too


def test_each_head_gets_the_sparsest_candidate_that_reaches_tau(lm):
    profile = calibrate(lm, random_ids(150), CONFIG)
    reached = profile.scores >= np.float32(CONFIG.tau)
    for head in np.ndindex(profile.candidates.shape):
        expected = np.flatnonzero(reached[head])[0] if reached[head].any() else CONFIG.num_candidates
        assert profile.candidates[head] == expected
    assert len(np.unique(profile.candidates)) > 1


def test_scores_of_several_texts_are_averaged(lm):
    texts = [random_ids(150, seed=1), random_ids(160, seed=2), random_ids(155, seed=3)]
    alone = [calibrate(lm, text, CONFIG).scores.astype(np.float64) for text in texts]
    together = calibrate(lm, texts, CONFIG)
    np.testing.assert_array_equal(together.scores, np.mean(alone, axis=0).astype(np.float32))
    assert not np.allclose(alone[0], alone[1], atol=1e-3)


def test_scores_are_those_of_a_forward_pass_of_the_whole_decoder(lm):
    ids = random_ids(150)
    tokens, lengths = jnp.asarray(np.pad(ids, (0, 10)))[None], jnp.array([150])

    def attention(layer, q, k, v, state):
        return causal_attention(q, k, v, lengths), calibration_scores(q, k, lengths, CONFIG)[0]

    @jax.jit
    def whole(decoder_state):
        decoder = nnx.merge(graphdef, decoder_state)
        positions = jnp.minimum(jnp.arange(160), 149)[None]
        return decoder(tokens, positions, attention, (None,) * lm.config.num_layers)[1]

    graphdef, state = nnx.split(lm.decoder)
    np.testing.assert_allclose(calibrate(lm, ids, CONFIG).scores, np.stack(whole(state)), atol=1e-6)


def test_texts_of_one_bucket_share_one_program(lm, compiled):
    calibrate(lm, random_ids(241), CONFIG)
    assert compiled  # the listener hears compilations
    compiled.clear()
    calibrate(lm, [random_ids(length) for length in (242, 249, 256)], CONFIG)
    assert compiled == []


def test_all_layers_of_a_deep_model_share_one_program(compiled):
    calibrate(make_lm(layers=5), random_ids(310), CONFIG)
    assert [sum(name in one for one in compiled) for name in ("_score_layer", "_read_layer")] == [1, 0]


def array_sizes(jaxpr) -> set[int]:
    """Elements of every array that a program computes, inner programs included."""
    sizes = set()
    for equation in jaxpr.eqns:
        sizes |= {math.prod(getattr(out.aval, "shape", ())) for out in equation.outvars}
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                sizes |= array_sizes(getattr(inner, "jaxpr", inner))
    return sizes


def test_no_array_grows_with_the_square_of_the_length(lm):
    def largest(length: int) -> int:
        graphdef, weights = nnx.split(lm.decoder.layers[0])
        x, angles = jnp.zeros((1, length, 32)), jnp.zeros((1, length, 4))

        def score(weights, lengths):
            numbers = jnp.arange(lm.config.num_kv_heads, dtype=jnp.int32)
            return _score_layer(
                weights, x, angles, angles, numbers, lengths, graphdef=graphdef, shards=None, config=CONFIG
            )

        return max(array_sizes(jax.make_jaxpr(score)(weights, jnp.array([length])).jaxpr))

    assert largest(1024) > 1024  # the walk sees inside
    assert largest(32768) <= 2 * largest(16384)


def test_strings_are_tokenized_and_the_profile_tells_its_sources():
    lm = make_lm(tokenizer=ids_tokenizer)
    text = "the quick brown fox jumps over the lazy dog. " * 3 + "the lazy dog is."
    ids = np.array(ids_tokenizer(text)["input_ids"])
    profile = calibrate(lm, [text, ids, text.encode()], CONFIG)
    expected = {"tokens": len(ids), "sha256": hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()}
    assert profile.sources == (expected,) * 3
    assert profile.model_name == "tiny"
    assert profile == calibrate(lm, (text, text, list(ids)), CONFIG)


def test_a_single_text_needs_no_list():
    lm = make_lm(tokenizer=ids_tokenizer)
    text = "0123456789" * 16
    ids = ids_tokenizer(text)["input_ids"]
    profiles = [calibrate(lm, texts, CONFIG) for texts in (text, [text], ids, [ids], np.array(ids), np.array([ids]))]
    assert all(profile == profiles[0] for profile in profiles)


def test_the_profile_fits_its_model_and_no_other(lm):
    profile = calibrate(lm, random_ids(150), CONFIG)
    assert lm.with_profile(profile).method == methods.configured(CONFIG, profile.candidates)
    other = LM.from_decoder(Decoder(lm.config, dtype=jnp.float32, rngs=nnx.Rngs(1)), name="other")
    with pytest.raises(ValueError, match="other weights than those of model 'other'"):
        other.with_profile(profile)


def test_a_criterion_by_name_takes_the_place_of_the_configurations_own(lm):
    ids = random_ids(150)
    for criterion in ("retained_mass", "column_mean"):
        config = TCAConfig(block_size=8, window=16, tau=0.7, criterion=criterion)
        assert calibrate(lm, ids, TCAConfig(block_size=8, window=16, tau=0.7), criterion=criterion) == calibrate(
            lm, ids, config
        )


def test_a_bfloat16_model_is_scored_in_float32(lm):
    ids = random_ids(150)
    rounded = calibrate(make_lm(jnp.bfloat16), ids, CONFIG).scores
    assert rounded.dtype == np.float32
    np.testing.assert_allclose(rounded, calibrate(lm, ids, CONFIG).scores, atol=0.03)


def test_progress_is_reported_before_and_after_every_layer_of_every_text(lm):
    calls = []
    calibrate(lm, [random_ids(150)] * 3, CONFIG, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 6) for done in range(7)]


def test_a_text_of_fewer_than_two_windows_is_a_warning_at_the_line_of_the_call(lm):
    reach = CONFIG.window + CONFIG.block_size
    calibrate(lm, random_ids(2 * reach), CONFIG)
    message = r"texts\[1\] has 47 tokens, fewer than 2 \(window \+ block_size\) = 48"
    with pytest.warns(UserWarning, match=message) as caught:
        unchecked(calibrate)(lm, [random_ids(150), random_ids(47)], CONFIG)
    line = inspect.currentframe().f_lineno - 1
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


def test_the_signature_tells_what_can_be_passed():
    assert list(inspect.signature(tca_jax.calibrate).parameters) == ["lm", "texts", "config", *BY_NAME]
    parameters = inspect.signature(tca_jax.calibrate).parameters
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in BY_NAME)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "texts is empty"),
        ("", r"texts\[0\] is empty"),
        ([[1] * 150, []], r"texts\[1\] is empty"),
        ([1] * 23, r"texts\[0\] has 23 tokens: .* at least window \+ block_size = 16 \+ 8 = 24"),
        ([[1] * 150, [1] * 513], r"texts\[1\] has 513 tokens, model 'tiny' has 512 positions"),
        ([1] * 149 + [VOCABULARY], r"texts\[0\] holds token id 64: ids of tiny lie in \[0, 64\)"),
        ([-1] * 150, r"texts\[0\] holds token id -1"),
        ("\ud800" * 150, r"texts\[0\] is not valid UTF-8"),
        (["x" * 150, b"\xff" * 150], r"texts\[1\] is not valid UTF-8"),
    ],
)
def test_texts_that_cannot_be_used_are_refused_before_any_work(texts, message):
    calls = []
    with pytest.raises(ValueError, match=message):
        calibrate(make_lm(tokenizer=ids_tokenizer), texts, CONFIG, progress=lambda *call: calls.append(call))
    assert calls == []


def test_the_same_texts_are_refused_by_every_criterion(lm):
    for criterion in ("worth", "retained_mass", "column_mean"):
        with pytest.raises(ValueError, match=r"texts\[0\] has 23 tokens: .* at least window \+ block_size = 16"):
            calibrate(lm, [1] * 23, CONFIG, criterion=criterion)


def test_text_for_a_model_without_a_tokenizer_is_refused(lm):
    with pytest.raises(ValueError, match=r"texts\[0\]: tiny was loaded without a tokenizer.* pass token ids"):
        calibrate(lm, "x" * 150, CONFIG)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (None, r"texts is None: must be text, .*token ids, or a list of those"),
        ({"a": "text"}, "texts is of type dict: must be text"),
        (7, "texts is of type int: must be text"),
        ((text for text in ["a"]), "texts is of type generator: must be text"),
        (np.ones(150), r"texts\[0\] is an array \[150\] of float64: must be text"),
        ([[[1] * 150]], r"texts\[0\] is of type list: .* holds list"),
        ([None], r"texts\[0\] is None"),
    ],
)
def test_what_is_neither_text_nor_token_ids_is_a_type_error_that_names_it(lm, texts, message):
    with pytest.raises(TypeError, match=message):
        unchecked(calibrate)(lm, texts, CONFIG)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_model_that_computes_nan_gives_no_profile_and_the_layer_is_named(lm, layer):
    with pytest.raises(ValueError, match=f"model 'broken' computes NaN or infinity in the attention of layer {layer}"):
        calibrate(broken_lm(lm, layer), random_ids(150), CONFIG)


def test_a_share_that_row_0_alone_passes_is_refused_with_what_it_takes():
    rows = np.zeros((2, 2), np.int32)
    least = kept_share(CONFIG, 400, rows, rows).mean()
    shown = least_share(least)
    with pytest.raises(ValueError, match=rf"kept = 0\.01: must be at least {shown}, .* cache of 400 tokens"):
        require_fit(0.01, 400, CONFIG)
    require_fit(least, 400, CONFIG)
    require_fit(1.0, 5, CONFIG)
