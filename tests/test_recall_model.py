"""The model that ships: its files and figures, and its answers under every protocol."""

import json

import numpy as np

from tca_jax.calibration.profile import Profile
from tca_jax.lab.recall import PROTOCOLS, TASKS
from tca_jax.loading import checkpoint_folder

FOLDER = checkpoint_folder("recall-tiny")


def test_files_are_small_and_name_no_path():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 24e6
    for path in files:
        assert b"/recall-tiny" not in path.read_bytes(), path
    assert {Profile.load(FOLDER / name).model_name for name in ("profile", "profile-paper")} == {"recall-tiny"}
    run, *log = [json.loads(line) for line in (FOLDER / "train_log.jsonl").read_text().splitlines()]
    assert log[-2]["step"] == sum(stage["steps"] for stage in run["recipe"]["stages"])


def test_the_card_has_the_measured_figures():
    card = (FOLDER / "README.md").read_text()
    for entry in json.loads((FOLDER / "evaluation.json").read_text())["methods"]:
        by_protocol = [list(entry["right"][protocol].values()) for protocol in PROTOCOLS]
        shares = [f"{share(right):.1%}" for right in by_protocol for share in (np.mean, min)]
        asked = [f"{entry['questions']}", f"{entry['prompt_bytes']:,}"]
        (row,) = [line for line in card.splitlines() if line.startswith(f"| {entry['method']} |")]
        assert row.strip("| ").split(" | ")[1:] == [*shares, f"{entry['kv_cache_share']:.1%}", *asked]


def test_tca_answers_with_a_fifth_of_the_cache():
    result = json.loads((FOLDER / "evaluation.json").read_text())
    methods = {entry["method"]: entry for entry in result["methods"]}
    full, sparse = (
        np.array([[methods[name]["right"][protocol][task] for task in TASKS] for protocol in PROTOCOLS])
        for name in ("full", "TCA")
    )
    assert result["plan"]["tokens"] == 8192
    assert full.min() >= 0.97
    assert (sparse - full).min() >= -0.0201
    assert methods["TCA"]["kv_cache_share"] <= 1 / 5
    assert result["attended_share"] <= 0.20
