"""Profiles: checks of their fields, kept share, what survives a save, and what is not loaded."""

import dataclasses
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from profiles import CONFIG, make_profile
from tiny import CONFIG as TINY

from tca_jax import methods
from tca_jax.calibration.profile import Profile, head_gates
from tca_jax.methods.candidates import candidate_budgets
from tca_jax.methods.config import TCAConfig

SAVED = Path(__file__).parent / "saved_profile_v3"  # as tca_jax 0.1.0 wrote it, of format 3


def model_config(num_layers=3, num_kv_heads=2):
    return dataclasses.replace(TINY, num_layers=num_layers, num_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("candidates", np.zeros((3, 2)), r": must be integers \[layers, H_kv\], got float64 \[3, 2\]"),
        ("candidates", np.zeros((0, 2), np.int32), r": must be integers .* \[0, 2\]"),
        ("candidates", np.array([[0, 1], [2, 15], [0, 0]]), r"\[1, 1\] = 15: must lie in \[0, 14\]"),
        ("scores", np.zeros((3, 2, 14), np.float32), r": must be floats \[3, 2, 15\], got float32 \[3, 2, 14\]"),
        ("scores", np.full((3, 2, 15), 1.5), r"\[0, 0, 0\] = 1\.5: must lie in \[0, 1\]"),
        ("prefill_candidates", np.zeros((2, 2), int), r": must be integers \[3, 2\], got int64 \[2, 2\]"),
        ("prefill_candidates", np.full((3, 2), 14), r"\[0, 0\] = 14: must lie between 0 and the cache row"),
        ("readings", np.full((3, 2), "far"), r"\[0, 0\] = far: must be one of \['sparse', 'blocks', 'dense'\]"),
        ("readings", np.zeros((3, 2), int), r": must be strings \[3, 2\], got int64"),
        ("keeping_worth", np.zeros(6), r": must be floats \[3, 2\], got float64 \[6\]"),
    ],
)
def test_a_wrong_field_is_named(field, value, message):
    with pytest.raises(ValueError, match=rf"Profile\.{field}{message}"):
        make_profile(**{field: value})


def test_fields_have_defaults_and_stay():
    candidates = np.full((3, 2), 5)
    plain = Profile(candidates=candidates, scores=np.zeros((3, 2, 15)), config=CONFIG, fingerprint=None, model_name="m")
    assert (plain.readings == "sparse").all()
    for worth in (plain.reading_worth, plain.keeping_worth):
        assert worth.dtype == np.float32
        assert np.isnan(worth).all()
    assert (plain.losses, plain.probes, plain.sources) == ({}, None, ())
    candidates[0, 0] = 7
    assert (plain.candidates == 5).all()
    assert (plain.prefill_candidates == 5).all()
    with pytest.raises(ValueError, match="read-only"):
        plain.candidates[0, 0] = 5
    profile = make_profile(candidates=np.full((3, 2), 7), prefill_candidates=np.full((3, 2), 2))
    np.testing.assert_array_equal(profile.prefill_candidates, np.where(profile.readings == "sparse", 2, 7))


def test_a_profile_fits_its_model_alone():
    uniform = Profile.uniform(CONFIG, num_layers=3, num_kv_heads=2, candidate=4)
    np.testing.assert_array_equal(uniform.candidates, np.full((3, 2), 4))
    assert np.isnan(uniform.scores).all()
    uniform.validate_for(model_config(), "ab" * 32, "anything")
    make_profile().validate_for(model_config(), "ab" * 32, "tiny")
    make_profile().validate_for(model_config(), None, "tiny")
    with pytest.raises(ValueError, match="'tiny' has 3 layers of 2 heads, but model 'big' has 4 of 3"):
        make_profile().validate_for(model_config(4, 3), "ab" * 32, "big")
    with pytest.raises(ValueError, match="'tiny' was made with other weights than those of model 'other'"):
        make_profile().validate_for(model_config(), "00" * 32, "other")


@pytest.mark.parametrize("num_tokens", [1, 16, 23, 24, 25, 31, 64, 257, 1000])
def test_kept_share_counts_budgets_and_local_tokens(num_tokens):
    profile = make_profile()
    ranked = max(0, num_tokens // 8 - 16 // 8)
    budgets = np.asarray(candidate_budgets(CONFIG, ranked))
    local = len(range(ranked * 8, num_tokens))
    share, prefill_share = profile.kept_share(num_tokens), profile.prefill_kept_share(num_tokens)
    for at in np.ndindex(3, 2):
        cache, prefill = budgets[profile.candidates[at]], budgets[profile.prefill_candidates[at]]
        reading = profile.readings[at]
        both = np.maximum(cache, prefill) if reading == "sparse" else cache
        kept = min(both.sum() + CONFIG.reserve, ranked * 8) + local
        assert share[at] == pytest.approx(kept / num_tokens, rel=1e-15)
        read = {
            "sparse": min(prefill.sum() + CONFIG.reserve, ranked * 8) + local,
            "blocks": min(CONFIG.fetch, ranked) * 8 + local,
            "dense": num_tokens,
        }
        assert prefill_share[at] == pytest.approx(read[reading] / num_tokens, rel=1e-15)
    assert (profile.prefill_candidates < profile.candidates).any()


# --- on disk --------------------------------------------------------------------------------------


def test_a_profile_of_format_3_loads(tmp_path):
    profile, rows = Profile.load(SAVED), np.arange(12, dtype=np.int32).reshape(4, 3) % 9
    np.testing.assert_array_equal(profile.candidates, rows)
    readings = [["sparse", "blocks", "dense"], ["sparse"] * 3, ["blocks"] * 3, ["dense", "sparse", "sparse"]]
    assert profile.readings.tolist() == readings
    np.testing.assert_array_equal(profile.prefill_candidates, np.where(profile.readings == "sparse", rows // 2, rows))
    assert np.isnan(profile.scores[1, 2]).all()
    assert profile.scores[3, 2, 8] == 1
    assert profile.keeping_worth[3, 0] == 0
    assert (profile.model_name, profile.fingerprint) == ("größer/模型", "0123456789abcdef" * 4)
    assert profile.losses["inside"] == {"full": 0.1 + 0.2, "row0": 98.7654321, "chosen": 1 / 3}
    assert profile.probes == {"counted": {"facts": 321, "copy": 0}, "kept": 0.3, "attended": 0.7}
    assert (profile.config.index, profile.config.tau, profile.config.seed) == ("entropy", 0.85, 7)
    assert profile.sources[1] == {"tokens": 3000, "sha256": "cd" * 32}
    profile.save(tmp_path)
    assert Profile.load(tmp_path) == profile


def test_every_number_survives_a_round_trip(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    scores = np.nextafter(np.linspace(0, 1, 90, dtype=np.float32), 1).reshape(3, 2, 15)
    Path("new", "2024").mkdir(parents=True)
    with caplog.at_level(logging.INFO):
        for profile in (make_profile(scores=scores), Profile.uniform(TCAConfig.paper(index="entropy"), 2, 8, 14)):
            profile.save("new")
            loaded = Profile.load("new")
            assert loaded == profile
            assert (loaded.candidates.dtype, loaded.scores.dtype) == (np.int32, np.float32)
    assert [r.getMessage() for r in caplog.records if r.name == "absl"] == []
    assert sorted(p.name for p in Path("new").iterdir()) == ["2024", "profile_1"]


CHANGED = dataclasses.asdict(CONFIG)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format_version": 5}, r"format_version = 5: .* reads \[3, 4\]; upgrade tca_jax, or calibrate again"),
        ({"format_version": 2}, r"format_version = 2: .* reads \[3, 4\]"),
        ({"model_name": ...}, r"damaged: 'model_name'"),
        ({"config": None}, r"damaged: "),
        ({"config": CHANGED | {"window": 20}}, r"TCAConfig\.window = 20: must be .*multiple"),
        ({"config": CHANGED | {"num_candidates": 5}}, r"Profile\.candidates\[.*\] = .*\[0, 5\]"),
        (None, r"damaged or incomplete, cannot be read"),
    ],
)
def test_damaged_metadata_name_the_folder(tmp_path, fields, message):
    make_profile().save(tmp_path)
    file = tmp_path / "profile_0" / "metadata" / "metadata"
    metadata = {} if fields is None else {**json.loads(file.read_text()), **fields}
    text = "{" if fields is None else json.dumps({k: v for k, v in metadata.items() if v is not ...})
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"{tmp_path.name}/profile_0.*{message}") as error:
        Profile.load(tmp_path)
    assert "\n" not in str(error.value)


def test_head_gates_are_relative_worth():
    config, worth = TCAConfig(), np.array([[0.5, -0.1], [2.0, 0.0]], np.float32)
    profile = dataclasses.replace(Profile.uniform(config, 2, 2, 0), keeping_worth=worth)
    gates = head_gates(profile)
    np.testing.assert_array_equal(gates, np.array([[0.25, 0], [1, 0]], np.float32))
    assert gates.dtype == np.float32
    methods.get("duoattention", gates=gates)
    nothing = dataclasses.replace(profile, keeping_worth=np.zeros((2, 2), np.float32))
    np.testing.assert_array_equal(head_gates(nothing), np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"'uniform candidate 3' does not know what heads are worth: calibrate with"):
        head_gates(Profile.uniform(config, 2, 2, 3))
