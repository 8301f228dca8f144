"""Profiles that past versions wrote, kept in `golden/` as they were written: they load for ever.

Every format version has one, and one more where fields came to a version. That of a new form is written by
`written_by_this_version` and never changes again:

    python -c "import sys; sys.path.insert(0, 'tests/calibrate'); import test_golden as golden
    golden.written_by_this_version().save('tests/calibrate/golden/profile-v2-probes')"
"""

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest

from tca_jax import methods
from tca_jax.calibration.profile import FORMAT_VERSION, Profile
from tca_jax.methods.config import TCAConfig

GOLDEN = Path(__file__).parent / "golden"
CANDIDATES = [[1, 1], [12, 10], [6, 7], [0, 0], [3, 4], [0, 2]]  # of version 1
SCORES = "fbd4c89b891c2a8517f80d9595e794565d2bf52f5a72d8a0e1cb6ffa1fdeb021"


def written_without_probes() -> Profile:
    """The first form of version 2: no field at its default, unmeasured scores and text outside ASCII.

    The library that wrote it knew neither reserve nor probes, and one row a head.
    """
    scores = (np.arange(4 * 3 * 9, dtype=np.float32) / np.float32(107)).reshape(4, 3, 9)
    scores[1, 2] = np.nan
    return Profile(
        candidates=np.arange(12, dtype=np.int32).reshape(4, 3) % 9,
        scores=scores,
        config=TCAConfig(
            block_size=64,
            window=1024,
            num_candidates=8,
            sigma=0.75,
            alpha=0.3,
            density="paper",
            index="entropy",
            criterion="column_mean",
            tau=0.85,
            reserve=0,
            tau_probe=0.0,
            seed=7,
        ),
        fingerprint="0123456789abcdef" * 4,
        model_name="größer/模型",
        sources=({"tokens": 4096, "sha256": "ab" * 32}, {"tokens": 3000, "sha256": "cd" * 32}),
        library_version="0.1.0",
    )


def written_by_this_version() -> Profile:
    """The same with two rows a head, probe scores, and no field of the config at its default."""
    old = written_without_probes()
    candidates = old.candidates
    return dataclasses.replace(
        old,
        prefill_candidates=candidates // 2,
        probe_scores=old.scores[::-1].copy(),
        probes={"kind": "pairs", "tokens": 321, "need": 98.7654321, "rounds": 2, "fallback": True, "kept": 0.3},
        config=dataclasses.replace(old.config, reserve=96, observation=32, spread=8, tau_probe=0.6),
        library_version="0.2.0",
    )


def test_every_format_version_has_a_golden_profile():
    versions = {f"profile-v{n}" for n in range(1, FORMAT_VERSION + 1)}
    assert {path.name for path in GOLDEN.iterdir()} == {*versions, "profile-v2-probes"}


def test_version_2_holds_what_was_saved():
    assert Profile.load(GOLDEN / "profile-v2") == written_without_probes()
    assert Profile.load(GOLDEN / "profile-v2-probes") == written_by_this_version()


@pytest.mark.parametrize("name", ["profile-v1", "profile-v2"])
def test_what_knew_no_reserve_and_no_probes_runs_without_them(name):
    profile = Profile.load(GOLDEN / name)
    assert (profile.config.reserve_tokens, profile.config.num_queries, profile.config.tau_probe) == (0, 1, 0)
    np.testing.assert_array_equal(profile.prefill_candidates, profile.candidates)
    assert np.isnan(profile.probe_scores).all()
    assert profile.probes is None
    assert profile.method() == methods.configured(profile.config, profile.candidates)


def test_version_1_which_has_no_checksum_holds_what_shipped_with_the_first_release():
    profile = Profile.load(GOLDEN / "profile-v1")
    assert profile.config == TCAConfig(window=512, reserve=0, tau_probe=0.0)
    assert profile.fingerprint == "d03062b9c18fcdcb1601d823deada458efcf5b339ce01fabdd3b67e11230997d"
    assert (profile.model_name, profile.library_version) == ("recall-tiny", "0.1.0")
    assert [source["tokens"] for source in profile.sources] == [8192] * 8
    assert profile.candidates.tolist() == CANDIDATES
    assert hashlib.sha256(profile.scores.tobytes()).hexdigest() == SCORES


@pytest.mark.parametrize("name", ["profile-v1", "profile-v2", "profile-v2-probes"])
def test_what_a_past_version_wrote_survives_a_save_by_this_one(tmp_path, name):
    profile = Profile.load(GOLDEN / name)
    profile.save(tmp_path)
    assert Profile.load(tmp_path) == profile
