"""Predicted worth in the engine: everything kept is full attention, feeding equals decoding, full rows keep less."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, random_prompt, tiny_lm

import tca_jax
from tca_jax.calibration.predicted_worth import SHARES, WorthMaps
from tca_jax.calibration.worth_profile import WorthProfile
from tca_jax.engine import decode, prompt_rows, read
from tca_jax.engine.score import score_answers
from tca_jax.lab.plots import kept_tokens
from tca_jax.methods import worth
from tca_jax.methods.worth import BLOCK, RESERVE
from tca_jax.programs import Program, forget_programs

OPTIONS = {"max_new_tokens": 200, "stop_token_ids": (), "logprobs": True}


@pytest.fixture(scope="module")
def profile():
    c, rng = tiny_lm().config, np.random.default_rng(0)
    maps = rng.normal(size=(c.num_layers, c.num_kv_heads, c.hidden_size + 1)).astype(np.float32)
    thresholds = np.quantile(rng.normal(size=9_999) * c.hidden_size**0.5, 1 - SHARES).astype(np.float32)
    share = np.full(maps.shape[:2], 0.2, np.float32)
    return WorthProfile(WorthMaps(maps, thresholds, np.ones_like(share), share, share), 1.0, 1.0, (), (), None, "tiny")


def test_everything_kept_is_full_attention(profile):
    full, prompts = tiny_lm(), [random_prompt(0, 700), random_prompt(1, 90)]
    lm = full.with_profile(profile)
    out, expected = (tca_jax.generate(each, prompts, **OPTIONS) for each in (lm, full))
    assert out.tokens == expected.tokens
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=2e-4)
    assert (out.stats.kept_share, out.stats.raised_layers) == (1.0, 0)


def test_short_prompts_are_read_in_full(profile, monkeypatch):
    monkeypatch.setattr(worth, "IN_FULL", 1_792)
    lm, prompts = tiny_lm().with_profile(profile.with_kept(0.05, 0.05)), [random_prompt(n, n) for n in (1_700, 1_900)]
    both = tca_jax.prefill(lm, prompts)
    for share, prompt in zip(both.attended_share, prompts, strict=True):  # whatever the padding
        assert share == pytest.approx(tca_jax.prefill(lm, prompt).stats.attended_share)
    assert (both.attended_share[0], both.attended_share[1] < 1) == (pytest.approx(1), True)
    assert both.stats.kept_share < 1


def test_fed_tokens_are_those_of_decoding(profile, tmp_path):
    lm, prompt = tiny_lm().with_profile(profile.with_kept(0.3, 0.1)), random_prompt(2, 900)
    out = tca_jax.generate(lm, prompt, **OPTIONS)
    assert 0.4 < out.stats.kept_share < 0.7  # 0.3 and the window
    assert out.stats.kv_cache_bytes < out.stats.full_kv_cache_bytes
    scores = score_answers(lm, [prompt], [out.tokens])
    np.testing.assert_allclose(scores.logprobs[0][0], out.logprobs[0], atol=2e-4)
    tca_jax.prefill(lm, prompt).save(tmp_path)
    options = OPTIONS | {"max_new_tokens": 40, "context": tca_jax.Context.load(tmp_path)}
    assert tca_jax.generate(lm, out.tokens[0][:100], **options).tokens[0][:40] == out.tokens[0][100:140]


@pytest.mark.parametrize("kept", [None, 0.3])
def test_a_token_computed_twice_answers_alike(profile, kept, monkeypatch):
    """As on a GPU, where a token is not alone."""
    lm = tiny_lm() if kept is None else tiny_lm().with_profile(profile.with_kept(kept))
    expected, doubled = tca_jax.generate(lm, random_prompt(3, 600), **OPTIONS), list[tuple[int, ...]]()
    for module in (decode, read):
        monkeypatch.setattr(module, "single_twice", lambda x: doubled.append(x.shape) or jnp.concatenate([x, x], 1))
    forget_programs()
    out = tca_jax.generate(lm, random_prompt(3, 600), **OPTIONS)
    forget_programs()
    assert {shape[:2] for shape in doubled} == {(1, 1)}
    assert out.tokens == expected.tokens
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=2e-4)


@pytest.mark.parametrize(("kept", "half"), [(None, "_attend_layer"), (0.3, "_project")])
def test_lengths_of_an_octave_share_decoding(profile, kept, half, monkeypatch):
    lm = tiny_lm() if kept is None else tiny_lm().with_profile(profile.with_kept(kept))
    names, own = list[str](), Program._lower
    monkeypatch.setattr(Program, "_lower", lambda self, *args: names.append(self.function.__name__) or own(self, *args))
    for n in (600, 1_000):
        names.clear()
        tca_jax.generate(lm, random_prompt(n, n), **OPTIONS | {"logprobs": 3})
        context, options = tca_jax.prefill(lm, random_prompt(n, n)), OPTIONS | {"logprobs": 3, "max_new_tokens": n // 4}
        tca_jax.generate(lm, random_prompt(0, n // 10), context=context, **options)
    assert set(names) <= {half, "_read", "_begin", "_after_attention", "_end", "_fork", "<lambda>"}
    monkeypatch.setattr(prompt_rows, "small_pool", lambda page_bytes: 2**12)  # as on a GPU
    for n in (600, 1_500):
        names.clear()
        tca_jax.generate(lm, random_prompt(n, n), **OPTIONS)
    assert {"decode", "leave"}.isdisjoint(names)


def test_traced_prompts_have_any_width(profile):
    lm = tiny_lm(config=dataclasses.replace(CONFIG, max_positions=2**16)).with_profile(profile)
    tokens, key = np.ones((1, 33_000), np.int32), jax.random.key(0)
    jax.eval_shape(lambda n: tca_jax.generate_tokens(lm, tokens, n, key, max_new_tokens=2), tokens[0, :1])


def test_other_profiles_contexts_are_refused(profile):
    lm = tiny_lm()
    context = tca_jax.prefill(lm.with_profile(profile.with_kept(0.3)), random_prompt(0, 600))
    with pytest.raises(ValueError, match="context was made under method 'worth' with other options or budgets"):
        tca_jax.generate(lm.with_profile(profile.with_kept(0.5)), [1, 2], context=context)


def test_each_head_keeps_a_reserve(profile):
    lm, prompt = tiny_lm().with_profile(profile.with_kept(0.05)), random_prompt(4, 1_100)
    kept = np.asarray(tca_jax.prefill(lm, prompt).rows.kept)
    assert (kept >= RESERVE).all()
    expected = kept_tokens(lm, prompt)[..., : lm.method.cache.num_ranked_blocks(len(prompt)) * BLOCK].sum(axis=-1)
    np.testing.assert_allclose(kept[:, 0], expected, atol=1)  # another program, whose scores a GPU rounds otherwise


def test_full_rows_keep_a_share_of_their_tokens(profile):
    low = WorthMaps(**{**vars(profile.maps), "thresholds": np.full_like(profile.maps.thresholds, -1e9)})
    small = WorthProfile(low, 0.2, 1.0, (), (), None, "tiny")
    lm = tiny_lm().with_profile(small)
    if jax.device_count() > 1:
        on_two = tca_jax.LM.from_decoder(tiny_lm().decoder, mesh=jax.make_mesh((1, 2), ("data", "model")))
        pages = [each.cache_layout(1, 4_096).num_pages for each in (lm, on_two.with_profile(small))]
        assert pages[0] == pytest.approx(2 * pages[1], rel=0.05)
        out = tca_jax.generate(on_two.with_profile(small), random_prompt(3, 2_600), max_new_tokens=1)
        assert out.stats.raised_layers == CONFIG.num_layers  # of each layer, not of each device
    prompts = [random_prompt(3, 2_600), random_prompt(4, 3_600)]
    out = tca_jax.generate(lm, prompts[0], max_new_tokens=1)
    assert out.stats.raised_layers > 0
    assert out.stats.kept_share < 0.45  # the share, the reserve and the window
    kept = [int(tca_jax.prefill(lm, some).rows.kept[:, 0].sum()) for some in (prompts[:1], prompts)]
    assert kept[1] == pytest.approx(kept[0], rel=0.02)  # whatever the padding
