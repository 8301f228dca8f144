"""Profiles of predicted worth: fit and tables, what is refused, what survives a save, shares, and use."""

import dataclasses
import math

import numpy as np
import pytest
from profiles import make_worth_profile
from tiny import CONFIG, random_prompt, tiny_lm

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.calibration.worth_profile import chosen_kept, chosen_selected, doubt_of, packed_texts

TEXTS = [random_prompt(seed, 512) for seed in range(2)]


@pytest.mark.integration
def test_calibrate_fits_and_measures(lm):
    stages = []
    with pytest.warns(UserWarning, match="of 0 known to 'tiny'"):  # it has no tokenizer
        profile = tca_jax.calibrate(lm, TEXTS, count=2, tokens=512, progress=lambda *call: stages.append(call))
    assert isinstance(profile, tca_jax.WorthProfile)
    assert profile.maps.maps.shape == (CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.hidden_size + 1)
    assert (profile.model_name, profile.fingerprint) == ("tiny", lm.fingerprint)
    assert [source["tokens"] for source in profile.sources] == [512, 512]
    assert [row["kept"] for row in profile.kept_table] == [0.1, 0.15, 0.2, 0.25, 0.33, 0.5]
    assert [row["selected"] for row in profile.reading_table] == [0.05, 0.1, 0.2]
    assert profile.kept == chosen_kept(profile.kept_table)
    assert profile.selected == chosen_selected(profile.reading_table)
    assert chosen_selected([row | {"attended": 1.0} for row in profile.reading_table]) == 0.2  # shows nothing
    assert all(row["known"] == 0 and math.isnan(row["facts"]) for row in profile.kept_table)
    attended = [row["attended"] for row in profile.reading_table]
    assert all(0 < share <= 1 for share in attended)
    assert sorted(attended) == attended
    for stage in {stage for stage, *_ in stages}:
        done = [call[1:] for call in stages if call[0] == stage]
        assert done == [(i + 1, done[0][1]) for i in range(done[0][1])]
    again = tca_jax.calibrate(lm, TEXTS, count=2, tokens=512, kept=0.4, progress=lambda *call: None)
    assert again.kept == 0.4
    np.testing.assert_array_equal(again.maps.maps, profile.maps.maps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 1}, "count = 1: must be"),
        ({"tokens": 511}, "tokens = 511: must be"),
        ({"kept": math.nan}, r"kept = nan: must be in"),
        ({"count": 4}, r"texts have 1,024 tokens too few for 4 texts of 512: pass more text, or lower count or tokens"),
        ({"texts": []}, "texts is empty"),
        ({"texts": [*TEXTS, ""]}, r"texts\[2\] is empty: at least one token is needed"),
        ({"texts": "a text"}, "has no tokenizer|without a tokenizer"),
        ({"texts": [[1, 97], [2]]}, r"texts\[0\] holds token id 97"),
    ],
)
def test_wrong_arguments_are_refused_before_any_work(lm, options, message):
    calls = []
    given = {"texts": TEXTS, "count": 2, "tokens": 512, "progress": lambda *call: calls.append(call)} | options
    with pytest.raises(ValueError, match=message):
        tca_jax.calibrate(lm, **given)
    assert calls == []


def test_models_of_few_positions_are_refused():
    config = dataclasses.replace(CONFIG, max_positions=640)
    with pytest.raises(ValueError, match="tiny has 640 positions: predicted worth needs texts of 512 tokens, and room"):
        tca_jax.calibrate(tiny_lm(config=config), TEXTS, count=2, tokens=512)


def test_texts_are_packed_or_split(lm, monkeypatch):
    ids = random_prompt(0, 3000)
    several, chunk = packed_texts(lm, [ids[:300], ids[300:900], ids[900:1600]], 2, 600, None)
    assert (several, chunk) == ([ids[:600], ids[900:1500]], 300)  # what is left of a text is cut
    one, _ = packed_texts(lm, ids, 2, 600, None)
    assert one == [ids[:600], ids[2400:]]  # the first and the last of five
    most, _ = packed_texts(tiny_lm(config=dataclasses.replace(CONFIG, max_positions=1024)), ids, 2, 8192, None)
    assert {len(text) for text in most} == {1024 - 256}  # room for a chunk of 256
    for module in ("predicted_worth", "worth_profile"):
        monkeypatch.setattr(f"tca_jax.calibration.{module}.chat_frame", lambda lm: ([1] * 600, []))
    with pytest.raises(ValueError, match="the chat template of tiny takes 600 of tokens = 600: raise tokens"):
        packed_texts(lm, ids, 2, 600, None)


def test_a_profile_survives_a_save(tmp_path, no_type_checks):
    profile = make_worth_profile(kept=0.1 + 0.2)
    profile.save(tmp_path)
    loaded = Profile.load(tmp_path)
    assert isinstance(loaded, tca_jax.WorthProfile)
    for name in ("thresholds", "head_weights", "correlation", "shares"):
        np.testing.assert_array_equal(getattr(loaded.maps, name), getattr(profile.maps, name))
    np.testing.assert_allclose(loaded.maps.maps, profile.maps.maps, rtol=2**-8)
    for name in ("kept", "selected", "fingerprint", "model_name", "sources", "library_version"):
        assert getattr(loaded, name) == getattr(profile, name)
    for name in ("kept_table", "reading_table"):
        rows = [list(map(repr, row.items())) for row in getattr(loaded, name)]
        assert rows == [list(map(repr, row.items())) for row in getattr(profile, name)]
    for name, value in (("thresholds", np.ones(7)), ("thresholds", np.full(301, np.nan)), ("shares", np.ones((1, 1)))):
        object.__setattr__(profile, "maps", dataclasses.replace(loaded.maps, **{name: value}))
        profile.save(tmp_path)
        with pytest.raises(ValueError, match=rf"/profile_\d: damaged: {name} (has shape|holds NaN)"):
            Profile.load(tmp_path)


def test_other_shares_need_no_calibration():
    made = make_worth_profile()
    profile = made.with_kept(0.3)
    assert (profile.kept, profile.selected, profile.maps) == (0.3, made.selected, made.maps)
    thetas = [float(made.with_kept(kept).settings().theta[0]) for kept in (0.1, 0.5, 1.0)]
    assert thetas[0] > thetas[1] > thetas[2] == -math.inf
    for share in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"kept = .*: must be in \(0, 1\]"):
            profile.with_kept(share)


def test_a_profile_fits_its_model_alone():
    profile = make_worth_profile(fingerprint="ab" * 32)
    profile.validate_for(CONFIG, None, "tiny")
    with pytest.raises(ValueError, match="has 2 layers of 2 heads and width 32, but model 'big' has 2 of 2 and 64"):
        profile.validate_for(dataclasses.replace(CONFIG, hidden_size=64), None, "big")
    with pytest.raises(ValueError, match="made with other weights than those of model 'other'"):
        profile.validate_for(CONFIG, "00" * 32, "other")


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        ([(0.1, 0.9, 1.0, 0.0), (0.2, 0.97, 0.0, 0.01), (0.5, 1.0, 1.0, 0.0)], 0.2),
        ([(0.1, 0.99, 1.0, 0.0), (0.2, 0.9, 1.0, 0.0), (0.5, 1.0, 1.0, 0.0)], 0.5),  # 0.1 holds by chance
        ([(0.1, 0.99, 1.0, 0.02), (0.2, 0.9, 1.0, 0.0), (0.5, 0.5, 1.0, 0.0)], 0.5),  # none holds
        ([(0.1, math.nan, 1.0, 0.0), (0.2, math.nan, 1.0, 0.0)], 0.2),  # no fact is known
    ],
)
def test_the_smallest_share_that_holds_is_kept(rows, kept):
    table = [dict(zip(("kept", "facts", "copies", "following"), row, strict=True)) for row in rows]
    assert chosen_kept(table) == kept


@pytest.mark.parametrize(("known", "lost", "kept"), [(31, 0, 0.5), (32, 0, 0.1), (45, 1, 0.5), (70, 1, 0.1)])
def test_few_facts_show_little(known, lost, kept):
    row = {"known": known, "facts": 1 - lost / known, "copies": 1.0, "following": 0.0}
    table = [{"kept": share, **row} for share in (0.1, 0.5)]
    assert chosen_kept(table) == kept
    assert (doubt_of(table, "m") is None) == (kept == 0.1)
