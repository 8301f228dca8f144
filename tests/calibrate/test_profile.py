"""Profiles: validation, kept share, and what survives a save, a damaged folder and an interrupted save."""

import dataclasses
import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from tca_jax.calibration.profile import FORMAT_VERSION, Profile
from tca_jax.methods.candidates import candidate_budgets
from tca_jax.methods.config import TCAConfig
from tca_jax.models.config import ModelConfig

CONFIG = TCAConfig(block_size=8, window=16, sigma=0.7, tau=0.1 + 0.2, seed=3)


def make_profile(seed: int = 0, **overrides) -> Profile:
    """A profile of 3 layers x 2 KV heads with awkward numbers."""
    rng = np.random.default_rng(seed)
    fields = {
        "candidates": rng.integers(0, 15, (3, 2)),
        "scores": rng.random((3, 2, 15)).astype(np.float32),
        "config": CONFIG,
        "fingerprint": "ab" * 32,
        "model_name": "tiny",
        "sources": ({"tokens": 100, "sha256": "cd" * 32}, {"tokens": 7, "sha256": "ef" * 32}),
    }
    return Profile(**{**fields, **overrides})


def model_config(num_layers: int = 3, num_kv_heads: int = 2) -> ModelConfig:
    return ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 32,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 2 * num_kv_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": 8,
            "max_position_embeddings": 128,
        }
    )


def edit_metadata(directory: Path, **fields) -> Path:
    """Overwrites fields of a saved profile's metadata (a value of ... removes one) and returns the file."""
    (file,) = directory.glob("profile_*/metadata/metadata")
    metadata = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({k: v for k, v in metadata.items() if v is not ...}))
    return file


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("candidates", np.zeros((3, 2)), r"Profile\.candidates: must be integers .* float64 \[3, 2\]"),
        ("candidates", np.zeros(3, np.int32), r"Profile\.candidates: .* \[3\]"),
        ("candidates", np.zeros((0, 2), np.int32), r"Profile\.candidates: .* \[0, 2\]"),
        (
            "candidates",
            np.array([[0, 1], [2, 15], [0, 0]]),
            r"Profile\.candidates\[1, 1\] = 15: .* \[0, 14\]",
        ),
        (
            "candidates",
            np.array([[0, 1], [-1, 2], [0, 0]]),
            r"Profile\.candidates\[1, 0\] = -1: .* \[0, 14\]",
        ),
        (
            "scores",
            np.zeros((3, 2, 14), np.float32),
            r"Profile\.scores: .* \[3, 2, 15\], got float32 \[3, 2, 14\]",
        ),
        ("scores", np.zeros((3, 2, 15), np.int32), r"Profile\.scores: must be floats .* got int32"),
        ("scores", np.full((3, 2, 15), 1.5), r"Profile\.scores\[0, 0, 0\] = 1\.5: must lie in \[0, 1\]"),
        ("sources", ({"tokens": 3},), r"Profile\.sources\[0\] = .*'tokens' and a string 'sha256'"),
        (
            "sources",
            ({"tokens": "3", "sha256": ""},),
            r"Profile\.sources\[0\] = .*'tokens' and a string 'sha256'",
        ),
    ],
)
def test_a_wrong_field_is_an_error_that_names_it(field, value, message):
    with pytest.raises(ValueError, match=message):
        make_profile(**{field: value})


def test_arrays_cannot_be_changed_behind_a_profile():
    candidates = np.zeros((3, 2), np.int32)
    profile = make_profile(candidates=candidates)
    candidates[0, 0] = 5
    assert profile.candidates[0, 0] == 0
    with pytest.raises(ValueError, match="read-only"):
        profile.candidates[0, 0] = 5


def test_profiles_are_equal_when_every_field_is():
    assert make_profile() == make_profile()
    assert hash(make_profile()) == hash(make_profile())
    assert Profile.uniform(CONFIG, 3, 2, 4) == Profile.uniform(CONFIG, 3, 2, 4)
    for other in (
        make_profile(seed=1),
        make_profile(config=TCAConfig()),
        make_profile(fingerprint=None),
        make_profile(model_name="x"),
        make_profile(sources=()),
        make_profile(scores=np.zeros((3, 2, 15), np.float32)),
    ):
        assert make_profile() != other


def test_uniform_gives_every_head_the_candidate_and_fits_any_model_of_its_shape():
    profile = Profile.uniform(CONFIG, num_layers=3, num_kv_heads=2, candidate=4)
    np.testing.assert_array_equal(profile.candidates, np.full((3, 2), 4))
    assert np.isnan(profile.scores).all()
    profile.validate_for(model_config(), "ab" * 32, "anything")
    with pytest.raises(ValueError, match=r"candidates\[0, 0\] = 15"):
        Profile.uniform(CONFIG, num_layers=3, num_kv_heads=2, candidate=15)


# --- kept share -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 16, 23, 24, 25, 31, 64, 257, 1000])
def test_kept_share_counts_the_budgets_and_the_tokens_right_of_the_ranked_blocks(num_tokens):
    profile = make_profile()
    ranked = max(0, num_tokens // 8 - 16 // 8)
    budgets = np.asarray(candidate_budgets(CONFIG, ranked))
    share = profile.kept_share(num_tokens)
    for layer, head in np.ndindex(3, 2):
        kept = budgets[profile.candidates[layer, head]].sum() + len(range(ranked * 8, num_tokens))
        assert share[layer, head] == pytest.approx(kept / num_tokens, rel=1e-15)


def test_kept_share_is_one_for_dense_heads_and_below_one_block_past_the_window():
    dense = Profile.uniform(CONFIG, 3, 2, CONFIG.num_candidates)
    np.testing.assert_array_equal(dense.kept_share(1000), np.ones((3, 2)))
    np.testing.assert_array_equal(make_profile().kept_share(23), np.ones((3, 2)))
    sparse = Profile.uniform(CONFIG, 3, 2, 0)
    assert (sparse.kept_share(24) < 1).all()


def test_kept_share_of_a_million_tokens_does_not_overflow():
    profile = Profile.uniform(TCAConfig(), 1, 1, 7)
    share = profile.kept_share(2**32)
    assert 0 < share[0, 0] < 1
    np.testing.assert_allclose(share, profile.kept_share(2**20), atol=0.01)


@pytest.mark.parametrize("num_tokens", [0, -1, True])
def test_kept_share_refuses_a_length_that_is_not_positive(num_tokens):
    with pytest.raises(ValueError, match=r"num_tokens = .*: must be an integer of at least 1"):
        make_profile().kept_share(num_tokens)


# --- which model ----------------------------------------------------------------------------------


def test_a_profile_fits_the_model_that_it_was_made_for():
    make_profile().validate_for(model_config(), "ab" * 32, "tiny")
    make_profile().validate_for(model_config(), None, "tiny")


@pytest.mark.parametrize(("layers", "heads"), [(4, 2), (3, 4), (2, 3)])
def test_a_profile_of_another_shape_is_refused(layers, heads):
    message = rf"'tiny' has 3 layers of 2 heads, but model 'big' has {layers} of {heads}"
    with pytest.raises(ValueError, match=message):
        make_profile().validate_for(model_config(layers, heads), "ab" * 32, "big")


def test_a_profile_of_other_weights_is_refused():
    with pytest.raises(ValueError, match="'tiny' was made with other weights than those of model 'other'"):
        make_profile().validate_for(model_config(), "00" * 32, "other")


# --- save and load --------------------------------------------------------------------------------


def test_every_number_survives_a_round_trip(tmp_path):
    profile = make_profile(scores=np.nextafter(np.linspace(0, 1, 90, dtype=np.float32), 1).reshape(3, 2, 15))
    profile.save(tmp_path / "new" / "folder")
    loaded = Profile.load(str(tmp_path / "new" / "folder"))
    assert loaded == profile
    assert (loaded.candidates.dtype, loaded.scores.dtype) == (np.int32, np.float32)
    assert isinstance(loaded.candidates, np.ndarray)
    assert loaded.config == CONFIG
    assert loaded.config.tau == 0.1 + 0.2
    assert loaded.sources == profile.sources
    assert loaded.library_version == profile.library_version


def test_paper_config_dense_rows_and_unmeasured_scores_survive_a_round_trip(tmp_path):
    profile = Profile.uniform(TCAConfig.paper(index="entropy"), 2, 8, 14)
    profile.save(tmp_path)
    assert Profile.load(tmp_path) == profile


def test_a_relative_directory_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_profile().save("profiles/tiny")
    assert Profile.load("profiles/tiny") == make_profile()


def test_a_save_replaces_the_old_profile_and_leaves_other_files_alone(tmp_path):
    (tmp_path / "2024").mkdir()  # looks like a step of a checkpoint manager without a prefix
    (tmp_path / "2024" / "notes.txt").write_text("mine")
    for seed in range(3):
        make_profile(seed).save(tmp_path)
        assert Profile.load(tmp_path) == make_profile(seed)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2024", "profile_2"]
    assert (tmp_path / "2024" / "notes.txt").read_text() == "mine"


def test_load_changes_nothing_in_the_directory(tmp_path):
    make_profile().save(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    Profile.load(tmp_path)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_nothing_is_logged_or_warned_about_a_normal_save_and_load(tmp_path, caplog):
    level = logging.getLogger("absl").level
    with caplog.at_level(logging.INFO), warnings.catch_warnings():
        warnings.simplefilter("error")
        logging.getLogger("absl").setLevel(logging.INFO)
        try:
            make_profile().save(tmp_path)
            Profile.load(tmp_path)
            assert logging.getLogger("absl").level == logging.INFO
        finally:
            logging.getLogger("absl").setLevel(level)
    assert [r.getMessage() for r in caplog.records if r.name == "absl"] == []


def test_a_profile_loads_in_a_process_with_another_number_of_devices(tmp_path):
    make_profile().save(tmp_path)
    code = (
        "import sys, jax; from tca_jax.calibration.profile import Profile; assert jax.device_count() == 3;"
        "print(Profile.load(sys.argv[1]).candidates.tolist())"
    )
    environment = {
        "PATH": "",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=3",
    }
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert json.loads(result.stdout) == make_profile().candidates.tolist()
    assert "absl" not in result.stderr


# --- what load refuses ----------------------------------------------------------------------------


def test_a_missing_directory_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"profile directory .*absent does not exist"):
        Profile.load(tmp_path / "absent")


def test_a_file_is_neither_loaded_nor_overwritten(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_text("weights")
    with pytest.raises(ValueError, match=r"model\.safetensors is a file, not a profile directory"):
        Profile.load(file)
    with pytest.raises(ValueError, match=r"model\.safetensors: it is a file, not a directory"):
        make_profile().save(file)
    assert file.read_text() == "weights"


def test_a_directory_without_a_profile_is_an_error_that_names_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"{tmp_path.name} holds no profile"):
        Profile.load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format_version": FORMAT_VERSION + 1}, r"format_version = 2 is newer than 1, .*upgrade tca_jax"),
        ({"format_version": "1"}, r"format_version = '1': must be an integer"),
        ({"format_version": ...}, r"has no field 'format_version', so it is not a tca_jax profile"),
        ({"colour": "red"}, r"unknown field 'colour'"),
        ({"sources": ...}, r"field 'sources' is missing"),
        ({"config": None}, r"config = None: must be an object"),
        ({"config": {**dataclasses.asdict(CONFIG), "stride": 4}}, r"config: unknown field 'stride'"),
        ({"config": {"block_size": 8}}, r"config: field 'alpha' is missing"),
        (
            {"config": {**dataclasses.asdict(CONFIG), "window": 20}},
            r"TCAConfig\.window = 20: must be .*multiple",
        ),
        ({"model_name": 4}, r"model_name = 4: must be a string"),
        ({"fingerprint": 4}, r"fingerprint = 4: must be a string or null"),
        ({"sources": {}}, r"sources = {}: must be a list"),
        ({"sources": [3]}, r"Profile\.sources\[0\] = 3: must hold an integer 'tokens'"),
        (
            {"config": {**dataclasses.asdict(CONFIG), "num_candidates": 5}},
            r"Profile\.candidates\[\d, \d\] = .*\[0, 5\]",
        ),
    ],
)
def test_wrong_metadata_is_an_error_that_names_folder_and_field(tmp_path, fields, message):
    make_profile().save(tmp_path)
    edit_metadata(tmp_path, **fields)
    with pytest.raises(ValueError, match=rf"{tmp_path.name}.*profile_0.*{message}"):
        Profile.load(tmp_path)


def test_metadata_that_is_no_json_is_an_error_that_names_the_file(tmp_path):
    make_profile().save(tmp_path)
    edit_metadata(tmp_path).write_text("{")
    with pytest.raises(ValueError, match=r"profile_0/metadata/metadata: missing or damaged"):
        Profile.load(tmp_path)


@pytest.mark.parametrize("what", ["truncated", "missing"])
def test_damaged_arrays_are_an_error_that_names_the_folder(tmp_path, what):
    make_profile().save(tmp_path)
    for file in (tmp_path / "profile_0" / "arrays").rglob("*"):
        if file.is_file():
            _ = file.unlink() if what == "missing" else file.write_bytes(file.read_bytes()[:5])
    with pytest.raises(ValueError, match=r"profile_0/arrays: missing or damaged"):
        Profile.load(tmp_path)


# --- interrupted saves ----------------------------------------------------------------------------


def test_an_error_inside_a_save_leaves_the_old_profile_and_the_next_save_works(tmp_path, monkeypatch):
    make_profile(0).save(tmp_path)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.rename", interrupt)
        patch.setattr("os.replace", interrupt)
        patch.setattr("pathlib.Path.rename", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make_profile(1).save(tmp_path)
    assert Profile.load(tmp_path) == make_profile(0)
    make_profile(2).save(tmp_path)
    assert Profile.load(tmp_path) == make_profile(2)
    assert [p.name for p in tmp_path.iterdir()] == ["profile_1"]


# Saves over copies of the profile in argv[1], and kills the process at the 1st, 2nd, ... change that the save
# makes to the file system, until one save goes through. Python's audit events tell of the changes.
_KILLED_SAVES = """
import os, shutil, signal, sys
from tca_jax.calibration.profile import Profile
from tca_jax.methods.config import TCAConfig

base = sys.argv[1]

def changes(event, args):
    if event == "open":
        return isinstance(args[1], str) and args[1][0] in "wax" or args[2] & (os.O_WRONLY | os.O_RDWR) > 0
    return event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate")

for last in range(1, 500):
    target = f"{base}_{last}"
    shutil.copytree(base, target)
    child = os.fork()
    if child == 0:
        new = Profile.uniform(TCAConfig(), 3, 2, 1)
        seen = 0
        def hook(event, args):
            global seen
            if changes(event, args) and any(target in str(a) for a in args):
                seen += 1
                if seen == last:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        new.save(target)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(status):
        print(last, os.WEXITSTATUS(status))
        break
"""


def test_a_save_killed_at_any_moment_leaves_the_old_profile_or_the_new_one(tmp_path):
    old, new = make_profile(), Profile.uniform(TCAConfig(), 3, 2, 1)
    old.save(tmp_path / "p")
    code = [sys.executable, "-c", _KILLED_SAVES, str(tmp_path / "p")]
    environment = {"PATH": "", "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(code, capture_output=True, text=True, env=environment, check=True)
    last, status = map(int, result.stdout.split())
    assert status == 0, result.stderr
    loaded = [Profile.load(tmp_path / f"p_{n}") for n in range(1, last + 1)]
    switch = loaded.index(new)  # old up to the rename, new from there on
    assert 5 <= switch < last
    assert all(profile == old for profile in loaded[:switch])
    assert all(profile == new for profile in loaded[switch:])
    make_profile(1).save(tmp_path / f"p_{switch}")  # over what a killed save left behind
    assert Profile.load(tmp_path / f"p_{switch}") == make_profile(1)
    assert len(list((tmp_path / f"p_{switch}").iterdir())) == 1
