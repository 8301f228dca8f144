"""Profiles: validation, kept share, what survives a save, and which saved fields are refused."""

import dataclasses
import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from profiles import CONFIG, make_profile

from tca_jax import methods
from tca_jax.calibration.profile import FORMAT_VERSION, Profile, head_gates
from tca_jax.methods.candidates import candidate_budgets
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.tca import tca
from tca_jax.models.config import ModelConfig
from tca_jax.persistence import checksum

THREE = {"full": 0.5, "row0": 1.0, "chosen": 0.75}
PROBES = {"counted": {"copy": 3}, "kept": None, "attended": 0.5}


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
    """Overwrites fields of a saved profile's metadata (a value of ... removes one), signs it and returns the file."""
    (file,) = directory.glob("profile_*/metadata/metadata")
    metadata = {**json.loads(file.read_text()), **fields}
    metadata = {k: v for k, v in metadata.items() if v is not ...}
    if "sha256" in metadata and "sha256" not in fields:
        arrays = make_profile()._arrays()
        del metadata["sha256"]
        metadata["sha256"] = checksum(metadata, arrays)
    file.write_text(json.dumps(metadata))
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
        ("prefill_candidates", np.zeros((3, 2)), r"Profile\.prefill_candidates: must be integers .* float64 \[3, 2\]"),
        ("prefill_candidates", np.zeros((2, 2), int), r"Profile\.prefill_candidates: .* \[3, 2\], .*, got \[2, 2\]"),
        (
            "prefill_candidates",
            np.full((3, 2), 14),
            r"Profile\.prefill_candidates\[0, 0\] = 14: must be at most the cache row, candidates\[\d, \d\] = ",
        ),
        (
            "readings",
            np.full((3, 2), "far"),
            r"Profile\.readings = \[\['far', .*: must be names out of \['sparse', 'bl",
        ),
        ("readings", np.zeros((3, 2), int), r"Profile\.readings = \[\[0, 0\], .*: must be names out of"),
        (
            "readings",
            np.full((2, 2), "sparse"),
            r"Profile\.readings: must be \[3, 2\], as candidates are, got \[2, 2\]",
        ),
        ("reading_worth", np.zeros((3, 3)), r"Profile\.reading_worth: must be \[3, 2\], .*, got \[3, 3\]"),
        ("keeping_worth", np.zeros(6), r"Profile\.keeping_worth: must be \[3, 2\], .*, got \[6\]"),
        ("losses", {"outside": THREE}, r"Profile\.losses = .*: must hold \['full', 'row0', 'chosen'\] under some of"),
        ("losses", {"inside": {"full": 1.0}}, r"Profile\.losses = .*: must hold .* upgrade tca_jax"),
        ("losses", {"inside": {**THREE, "best": 0.0}}, r"Profile\.losses = .*: must hold"),
        ("probes", {"kind": "copy"}, r"Profile\.probes = {'kind': 'copy'}: must be None, or hold \['counted', 'kept'"),
        ("probes", {**PROBES, "tokens": 3}, r"Profile\.probes = .*: must be None, or hold .* upgrade tca_jax"),
        ("probes", {**PROBES, "counted": 3}, r"Profile\.probes = .*: must be None, or hold"),
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
        make_profile(readings=np.full((3, 2), "sparse")),
        make_profile(reading_worth=np.zeros((3, 2), np.float32)),
        make_profile(keeping_worth=np.zeros((3, 2), np.float32)),
        make_profile(losses={}),
        make_profile(prefill_candidates=make_profile().candidates),
        make_profile(probes=None),
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


def test_a_profile_of_one_row_reads_prompts_as_it_caches_them():
    profile = Profile.uniform(CONFIG, 3, 2, 4)
    np.testing.assert_array_equal(profile.prefill_candidates, profile.candidates)
    np.testing.assert_array_equal(profile.prefill_kept_share(400), profile.kept_share(400))
    assert profile.method() == methods.configured(CONFIG, profile.candidates)


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
@pytest.mark.parametrize("share", ["kept_share", "prefill_kept_share"])
def test_kept_share_refuses_a_length_that_is_not_positive(num_tokens, share):
    with pytest.raises(ValueError, match=r"num_tokens = .*: must be an integer of at least 1"):
        getattr(make_profile(), share)(num_tokens)


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
    np.testing.assert_array_equal(loaded.prefill_candidates, profile.prefill_candidates)
    for name in ("readings", "reading_worth", "keeping_worth"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(profile, name))
    assert loaded.losses == profile.losses
    assert loaded.probes == profile.probes
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


@pytest.mark.integration
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
        ({"format_version": FORMAT_VERSION + 1}, r"format_version = 4 is newer than 3, .*upgrade tca_jax"),
        ({"format_version": "1"}, r"format_version = '1': must be an integer"),
        ({"format_version": 0}, r"format_version = 0: must be an integer of at least 1"),
        ({"format_version": True}, r"format_version = True: must be an integer"),
        ({"format_version": 1}, r"format_version = 1 is of before .*: tca-jax calibrate tiny --text FILE --out FOLDER"),
        ({"format_version": 2}, r"format_version = 2 is of before .*: tca-jax calibrate tiny --text FILE --out FOLDER"),
        ({"format_version": 2, "model_name": ...}, r"make a new profile: tca-jax calibrate MODEL --text FILE"),
        ({"sha256": ...}, r"field 'sha256' is missing"),
        ({"arrays": ["candidates", "colour", "scores"]}, r"arrays: unknown field 'colour'.*upgrade"),
        ({"arrays": ["candidates"]}, r"arrays: field 'keeping_worth' is missing"),
        ({"arrays": "candidates"}, r"arrays = 'candidates': must be a list of names"),
        ({"arrays": ...}, r"field 'arrays' is missing"),
        ({"sha256": 7}, r"does not match its checksum"),
        ({"format_version": ...}, r"has no field 'format_version', so it is not a tca_jax profile"),
        ({"colour": "red"}, r"unknown field 'colour'"),
        ({"model_name": ...}, r"field 'model_name' is missing"),
        ({"fingerprint": ...}, r"field 'fingerprint' is missing"),
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
        ({"probes": []}, r"probes = \[\]: must be an object or null"),
        ({"probes": {"kind": "copy"}}, r"Profile\.probes = {'kind': 'copy'}: must be None, or hold"),
        ({"losses": None}, r"losses = None: must be an object"),
        ({"losses": {"outside": {}}}, r"Profile\.losses = {'outside': {}}: must hold"),
        ({"sources": ...}, r"field 'sources' is missing"),
        ({"probes": ...}, r"field 'probes' is missing"),
        ({"library_version": ...}, r"field 'library_version' is missing"),
        ({"config": {k: v for k, v in dataclasses.asdict(CONFIG).items() if k != "seed"}}, r"field 'seed' is missing"),
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


def test_a_field_that_the_checksum_does_not_cover_any_more_is_an_error_that_names_the_folder(tmp_path):
    make_profile().save(tmp_path)
    edit_metadata(tmp_path, fingerprint="00" * 32, sha256=sha256_of(tmp_path))
    with pytest.raises(ValueError, match=rf"{tmp_path.name}/profile_0: damaged: .* does not match its checksum"):
        Profile.load(tmp_path)


def sha256_of(directory: Path) -> str:
    (file,) = directory.glob("profile_*/metadata/metadata")
    return json.loads(file.read_text())["sha256"]


def test_what_is_left_out_takes_the_values_of_a_profile_of_one_row():
    plain = Profile(
        candidates=np.full((3, 2), 5), scores=np.zeros((3, 2, 15)), config=CONFIG, fingerprint=None, model_name="m"
    )
    assert (plain.readings == "sparse").all()
    np.testing.assert_array_equal(plain.prefill_candidates, plain.candidates)
    for worth in (plain.reading_worth, plain.keeping_worth):
        assert worth.dtype == np.float32
        assert np.isnan(worth).all()
    assert (plain.losses, plain.probes, plain.sources) == ({}, None, ())


def test_prefill_rows_of_heads_that_do_not_read_sparse_are_their_cache_rows():
    profile = make_profile(candidates=np.full((3, 2), 7), prefill_candidates=np.full((3, 2), 2))
    np.testing.assert_array_equal(profile.prefill_candidates, np.where(profile.readings == "sparse", 2, 7))


def test_method_is_that_of_the_config_under_the_profiles_candidates():
    profile = make_profile()
    assert profile.method() == methods.configured(
        CONFIG,
        profile.candidates.tolist(),
        prefill_candidates=profile.prefill_candidates.tolist(),
        readings=profile.readings.tolist(),
    )
    plain = Profile.uniform(CONFIG, 3, 2, 4)
    assert plain.method() == tca(np.full((3, 2), 4), CONFIG)


def test_gates_are_what_heads_are_worth_to_answers_over_the_largest():
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


def test_importing_the_library_does_not_import_orbax():
    code = "import sys, tca_jax; assert not [name for name in sys.modules if name.startswith('orbax')]"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": "", "JAX_PLATFORMS": "cpu"})
