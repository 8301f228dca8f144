"""Profiles: checks of their fields, kept share, what survives a save, and what is not loaded."""

import dataclasses
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from profiles import CONFIG, make_profile, make_worth_profile
from tiny import CONFIG as TINY

from tca_jax import methods
from tca_jax.calibration.profile import Profile, options_of
from tca_jax.loading import shipped_profile
from tca_jax.methods.config import TCAConfig
from tca_jax.persistence import load, save

SAVED = Path(__file__).parent / "saved_profile_v3"  # as tca_jax 0.1.0 wrote it, of format 3


def model_config(num_layers=3, num_kv_heads=2):
    return dataclasses.replace(TINY, num_layers=num_layers, num_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("candidates", np.zeros((3, 2)), r": must be integers \[layers, H_kv\], got float64 \[3, 2\]"),
        ("candidates", np.zeros((0, 2), np.int32), r": must be integers .* \[0, 2\]"),
        ("candidates", np.array([[0, 1], [2, 15], [0, 0]]), r"\[1, 1\] = 15: must lie in \[0, 14\]"),
        ("scores", np.zeros((3, 2, 14), np.float32), r": must be floats \[3, 2, 15\], got float32 \[3, 2, 14\]"),
        ("scores", np.full((3, 2, 15), 1.5), r"\[0, 0, 0\] = 1\.5: must lie in \[0, 1\]"),
    ],
)
def test_a_wrong_field_is_named(field, value, message):
    with pytest.raises(ValueError, match=rf"Profile\.{field}{message}"):
        make_profile(**{field: value})


def test_fields_have_defaults_and_stay():
    candidates = np.full((3, 2), 5)
    plain = Profile(candidates=candidates, scores=np.zeros((3, 2, 15)), config=CONFIG, fingerprint=None, model_name="m")
    assert plain.sources == ()
    candidates[0, 0] = 7
    assert (plain.candidates == 5).all()
    with pytest.raises(ValueError, match="read-only"):
        plain.candidates[0, 0] = 5


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


def test_profiles_of_the_paper_of_format_3_load(tmp_path):
    loaded = Profile.load(shipped_profile().with_name("profile-paper"))
    assert (loaded.model_name, loaded.candidates.shape, loaded.scores.shape) == ("recall-tiny", (6, 4), (6, 4, 15))
    assert (loaded.config.criterion, loaded.config.density) == ("column_mean", "paper")
    loaded.save(tmp_path)
    assert Profile.load(tmp_path) == loaded


@pytest.mark.parametrize("change", ["criterion", "readings", "prefill_candidates"])
def test_profiles_of_the_search_are_refused(tmp_path, change):
    # As 0.1.0 wrote it, of format 3: some heads read blocks. The others as the search would have chosen.
    _, metadata, arrays = load("profile", SAVED)
    metadata["config"]["criterion"] = "worth" if change == "criterion" else "column_mean"
    arrays = arrays if change == "readings" else {**arrays, "readings": np.zeros_like(arrays["readings"])}
    arrays = arrays if change == "prefill_candidates" else {**arrays, "prefill_candidates": arrays["candidates"]}
    save("profile", tmp_path, dict(arrays), metadata)
    with pytest.raises(ValueError, match=r"profile_0 was made by the search of an older version: calibrate again \("):
        Profile.load(tmp_path)


def test_every_number_survives_a_round_trip(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    scores = np.nextafter(np.linspace(0, 1, 90, dtype=np.float32), 1).reshape(3, 2, 15)
    Path("new", "2024").mkdir(parents=True)
    make_profile().save("new/profile_0")  # a profile of this name, and a folder of the user's
    Path("new", "profile_1", "notes").mkdir(parents=True)
    with caplog.at_level(logging.INFO):
        for profile in (make_profile(scores=scores), Profile.uniform(TCAConfig.paper(index="entropy"), 2, 8, 14)):
            profile.save("new")
            loaded = Profile.load("new")
            assert loaded == profile
            assert (loaded.candidates.dtype, loaded.scores.dtype) == (np.int32, np.float32)
    assert [r.getMessage() for r in caplog.records if r.name == "absl"] == []
    assert sorted(p.name for p in Path("new").iterdir()) == ["2024", "profile_0", "profile_1", "profile_3"]
    assert {p.name for p in Path("new", "profile_0").iterdir()} == {"profile_0"}


CHANGED = dataclasses.asdict(CONFIG)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format_version": 7}, r"format_version = 7: .* reads \[3, 4, 5, 6\]; upgrade tca_jax, or calibrate again"),
        ({"format_version": 2}, r"format_version = 2: .* reads \[3, 4, 5, 6\]"),
        ({"format_version": 5}, r"damaged: "),
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


def test_options_of_both_kinds():
    profile, worth = make_profile(), make_worth_profile()
    assert options_of(profile) == {"config": profile.config, "candidates": profile.candidates}
    gates = options_of(worth)["gates"]
    np.testing.assert_allclose(gates, worth.maps.head_weights / worth.maps.head_weights.max())
    methods.get("duoattention", gates=gates)
