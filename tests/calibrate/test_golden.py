"""Profiles that past versions wrote, kept in `golden/` as they were written.

From the first release on they load for ever: every format version has one, and one more where fields come to a version.
Formats 1 and 2 were of before, and are refused. That of a new form is written by `written_by_this_version` and never
changes again:

    python -c "import sys; sys.path[:0] = ['tests', 'tests/calibrate']; import test_golden as golden
    golden.written_by_this_version().save('tests/calibrate/golden/profile-v3')"
"""

from pathlib import Path

import numpy as np
import pytest
from sharp_lm import make_lm, random_ids

import tca_jax
from tca_jax.calibration.profile import FORMAT_VERSION, Profile
from tca_jax.methods.config import TCAConfig

GOLDEN = Path(__file__).parent / "golden"
REFUSED = 2  # and whatever is older


def written_by_this_version() -> Profile:
    """No field at its default, unmeasured numbers, and text outside ASCII."""
    scores = (np.arange(4 * 3 * 9, dtype=np.float32) / np.float32(107)).reshape(4, 3, 9)
    scores[1, 2] = np.nan
    worth = np.linspace(0, 1, 12, dtype=np.float32).reshape(4, 3)
    worth[3, 1] = np.nan
    rows = np.arange(12, dtype=np.int32).reshape(4, 3) % 9
    return Profile(
        candidates=rows,
        scores=scores,
        readings=np.array(
            [["sparse", "blocks", "dense"], ["sparse"] * 3, ["blocks"] * 3, ["dense", "sparse", "sparse"]]
        ),
        prefill_candidates=rows // 2,
        reading_worth=worth,
        keeping_worth=worth[::-1].copy(),
        losses={
            "inside": {"full": 0.1 + 0.2, "row0": 98.7654321, "chosen": 1 / 3},
            "answers": {"full": 0.0, "row0": 7.0, "chosen": 0.01},
            "following": {"full": 1.0, "row0": 1.5, "chosen": 1.25},
        },
        probes={"counted": {"facts": 321, "copy": 0}, "kept": 0.3, "attended": 0.7},
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
            reserve=96,
            observation=32,
            spread=8,
            fetch=9,
            fetch_stride=4,
            read_tolerance=0.2,
            keep_tolerance=0.05,
            seed=7,
        ),
        fingerprint="0123456789abcdef" * 4,
        model_name="größer/模型",
        sources=({"tokens": 4096, "sha256": "ab" * 32}, {"tokens": 3000, "sha256": "cd" * 32}),
        library_version="0.2.0",
    )


def test_every_format_version_has_a_golden_profile():
    assert {path.name for path in GOLDEN.iterdir()} == {f"profile-v{n}" for n in range(1, FORMAT_VERSION + 1)}


def test_version_3_holds_what_was_saved():
    assert Profile.load(GOLDEN / "profile-v3") == written_by_this_version()


@pytest.mark.parametrize("version", range(1, REFUSED + 1))
def test_formats_of_before_the_first_release_are_refused_with_the_command_that_makes_a_new_profile(version):
    message = rf"profile-v{version}/.*format_version = {version} is of before the first release, .*make a new profile: "
    with pytest.raises(ValueError, match=message + r"tca-jax calibrate \S+ --text FILE --out FOLDER"):
        Profile.load(GOLDEN / f"profile-v{version}")


@pytest.mark.parametrize("version", range(REFUSED + 1, FORMAT_VERSION + 1))
def test_what_a_past_version_wrote_survives_a_save_by_this_one(tmp_path, version):
    profile = Profile.load(GOLDEN / f"profile-v{version}")
    profile.save(tmp_path)
    assert Profile.load(tmp_path) == profile


#: Rows, and scores of the candidates 0, 3 and 9, as the library found them before there were searches by worth.
PAPER = TCAConfig.paper(block_size=8, window=32, tau=0.5)
RETAINED = TCAConfig(block_size=8, window=16, tau=0.7, criterion="retained_mass", reserve=3)
FOUND = {
    "paper": (
        PAPER,
        [[3, 3], [2, 2]],
        [
            [[0.338335, 0.511019, 0.753347], [0.359119, 0.509218, 0.765338]],
            [[0.353587, 0.552926, 0.777200], [0.429084, 0.575574, 0.795194]],
        ],
    ),
    "retained mass": (
        RETAINED,
        [[6, 7], [4, 3]],
        [
            [[0.450995, 0.599340, 0.746869], [0.453905, 0.552158, 0.796997]],
            [[0.489512, 0.644764, 0.865030], [0.551613, 0.702580, 0.855902]],
        ],
    ),
}


@pytest.mark.parametrize(("config", "rows", "scores"), FOUND.values(), ids=FOUND)
def test_algorithm_1_finds_the_rows_and_scores_that_it_always_found(config, rows, scores):
    profile = tca_jax.calibrate(make_lm(), [random_ids(150), random_ids(211, 1)], config)
    assert profile.candidates.tolist() == rows
    np.testing.assert_allclose(profile.scores[:, :, [0, 3, 9]], scores, atol=5e-6)
    assert (profile.readings == "sparse").all()
    np.testing.assert_array_equal(profile.prefill_candidates, profile.candidates)
    assert profile.probes is None
    assert profile.losses == {}
    assert np.isnan(profile.reading_worth).all()
    assert np.isnan(profile.keeping_worth).all()
    assert profile.method() == tca_jax.methods.get("tca", candidates=rows, config=config)
