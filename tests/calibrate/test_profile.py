"""Profiles: checks of their fields, kept share, what survives a save, and what is not loaded."""

import dataclasses
import errno
import json
import logging
import os
import types
from pathlib import Path

import numpy as np
import pytest
from profiles import CONFIG, make_profile
from tiny import CONFIG as TINY

from tca_jax import methods
from tca_jax.calibration.profile import Profile, head_gates
from tca_jax.methods.candidates import candidate_budgets
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.tca import tca

SAVED = Path(__file__).parent / "saved_profile_v3"  # as tca_jax 0.1.0 wrote it, of format 3


def model_config(num_layers=3, num_kv_heads=2):
    return dataclasses.replace(TINY, num_layers=num_layers, num_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("candidates", np.zeros((3, 2)), r": must be integers \[layers, H_kv\], got float64 \[3, 2\]"),
        ("candidates", np.zeros(3, np.int32), r": must be integers .* \[3\]"),
        ("candidates", np.zeros((0, 2), np.int32), r": must be integers .* \[0, 2\]"),
        ("candidates", np.array([[0, 1], [2, 15], [0, 0]]), r"\[1, 1\] = 15: must lie in \[0, 14\]"),
        ("candidates", np.array([[0, 1], [-1, 2], [0, 0]]), r"\[1, 0\] = -1: must lie in \[0, 14\]"),
        ("scores", np.zeros((3, 2, 14), np.float32), r": must be floats \[3, 2, 15\], got float32 \[3, 2, 14\]"),
        ("scores", np.zeros((3, 2, 15), np.int32), r": must be floats .* got int32"),
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


def test_profiles_are_equal_when_every_field_is():
    assert make_profile() == make_profile()
    assert hash(make_profile()) == hash(make_profile())
    numbers = np.zeros((3, 2), np.float32)
    fields = {"config": TCAConfig(), "fingerprint": None, "model_name": "x", "sources": (), "losses": {}}
    fields |= {"scores": np.zeros((3, 2, 15), np.float32), "readings": np.full((3, 2), "sparse"), "probes": None}
    fields |= {"reading_worth": numbers, "keeping_worth": numbers}
    for name, value in fields.items():
        assert make_profile() != make_profile(**{name: value})
    assert make_profile() != make_profile(seed=1)


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


def test_kept_share_at_its_ends():
    one_row = Profile.uniform(CONFIG, 3, 2, 4)
    np.testing.assert_array_equal(one_row.prefill_kept_share(400), one_row.kept_share(400))
    assert one_row.method() == tca(np.full((3, 2), 4), CONFIG)
    dense = Profile.uniform(CONFIG, 3, 2, CONFIG.num_candidates)
    np.testing.assert_array_equal(dense.kept_share(1000), np.ones((3, 2)))
    np.testing.assert_array_equal(make_profile().kept_share(23), np.ones((3, 2)))
    assert (Profile.uniform(CONFIG, 3, 2, 0).kept_share(24) < 1).all()
    long = Profile.uniform(TCAConfig(), 1, 1, 7)  # 2^32 tokens overflow no integer
    np.testing.assert_allclose(long.kept_share(2**32), long.kept_share(2**20), atol=0.01)
    with pytest.raises(ValueError, match=r"num_tokens = 0: must be an integer of at least 1"):
        long.kept_share(0)


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


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.EROFS, os.strerror(errno.EROFS)), "full disk"])
def test_a_failed_save_leaves_the_old_profile(tmp_path, monkeypatch, error):
    def fail(*args, **kwargs):
        if error == "full disk":
            return types.SimpleNamespace(free=2**20)
        raise error

    make_profile().save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage" if error == "full disk" else "os.rename", fail)
        with pytest.raises((KeyboardInterrupt, OSError)) as caught:
            make_profile(1).save(tmp_path)
    if error is not KeyboardInterrupt:
        wanted = errno.ENOSPC if error == "full disk" else errno.EROFS
        assert (caught.value.errno, caught.value.filename) == (wanted, str(tmp_path))
    assert Profile.load(tmp_path) == make_profile()
    make_profile(1).save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["profile_1"]


def test_a_profile_replaced_while_it_loads(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    make_profile().save(tmp_path)
    restore, calls = ocp.CheckpointManager.restore, []

    def replaced(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            make_profile(1).save(tmp_path)
        return restore(*args, **kwargs)

    monkeypatch.setattr(ocp.CheckpointManager, "restore", replaced)
    assert Profile.load(tmp_path) == make_profile(1)


def test_folders_without_a_profile_are_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_text("weights")
    for folder, error, message in (
        (tmp_path / "absent", FileNotFoundError, r"profile directory .*absent does not exist"),
        (tmp_path, ValueError, rf"{tmp_path.name} holds no profile"),
        ("", ValueError, "directory = '': must name a folder"),
        (file, ValueError, r"model\.safetensors is a file, not a profile directory"),
    ):
        with pytest.raises(error, match=message):
            Profile.load(folder)
    with pytest.raises(OSError, match=r"cannot save a profile: .*model\.safetensors"):
        make_profile().save(file)
    assert file.read_text() == "weights"


CHANGED = dataclasses.asdict(CONFIG)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format_version": 5}, r"format_version = 5: .* reads \[3, 4\]; upgrade tca_jax, or calibrate again"),
        ({"format_version": 2}, r"format_version = 2: .* reads \[3, 4\]"),
        ({"format_version": ...}, r"format_version = None"),
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


@pytest.mark.parametrize("missing", [True, False])
def test_damaged_arrays_name_the_folder(tmp_path, missing):
    make_profile().save(tmp_path)
    for file in (tmp_path / "profile_0" / "arrays").rglob("*"):
        if file.is_file():
            _ = file.unlink() if missing else file.write_bytes(file.read_bytes()[:5])
    with pytest.raises(ValueError, match=r"profile_0: damaged or incomplete, cannot be read"):
        Profile.load(tmp_path)


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
