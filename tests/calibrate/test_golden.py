"""Profiles that past versions wrote, kept in `golden/` as they were written: they load for ever.

Every format version has one. That of a new version is written by `written_by_this_version` and never changes again:

    python -c "import sys; sys.path.insert(0, 'tests/calibrate'); import test_golden as golden
    golden.written_by_this_version().save('tests/calibrate/golden/profile-v2')"
"""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from tca_jax.calibration.profile import FORMAT_VERSION, Profile
from tca_jax.methods.config import TCAConfig

GOLDEN = Path(__file__).parent / "golden"
CANDIDATES = [[1, 1], [12, 10], [6, 7], [0, 0], [3, 4], [0, 2]]  # of version 1
SCORES = "fbd4c89b891c2a8517f80d9595e794565d2bf52f5a72d8a0e1cb6ffa1fdeb021"


def written_by_this_version() -> Profile:
    """A profile with no field at its default, unmeasured scores and text outside ASCII."""
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
            seed=7,
        ),
        fingerprint="0123456789abcdef" * 4,
        model_name="größer/模型",
        sources=({"tokens": 4096, "sha256": "ab" * 32}, {"tokens": 3000, "sha256": "cd" * 32}),
        library_version="0.1.0",
    )


def test_every_format_version_has_a_golden_profile():
    assert {path.name for path in GOLDEN.iterdir()} == {f"profile-v{n}" for n in range(1, FORMAT_VERSION + 1)}


def test_version_2_holds_what_was_saved():
    assert Profile.load(GOLDEN / "profile-v2") == written_by_this_version()


def test_version_1_which_has_no_checksum_holds_what_shipped_with_the_first_release():
    profile = Profile.load(GOLDEN / "profile-v1")
    assert profile.config == TCAConfig(window=512)
    assert profile.fingerprint == "d03062b9c18fcdcb1601d823deada458efcf5b339ce01fabdd3b67e11230997d"
    assert (profile.model_name, profile.library_version) == ("recall-tiny", "0.1.0")
    assert [source["tokens"] for source in profile.sources] == [8192] * 8
    assert profile.candidates.tolist() == CANDIDATES
    assert hashlib.sha256(profile.scores.tobytes()).hexdigest() == SCORES


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_what_a_past_version_wrote_survives_a_save_by_this_one(tmp_path, version):
    profile = Profile.load(GOLDEN / f"profile-v{version}")
    profile.save(tmp_path)
    assert Profile.load(tmp_path) == profile
