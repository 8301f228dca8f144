"""The model that ships: its files and figures, its answers under every protocol, parity with transformers."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.lab.recall import PROTOCOLS, TASKS, build_document
from tca_jax.loading import checkpoint_folder

FOLDER = checkpoint_folder("recall-tiny")


# --- files and figures ---


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
        cells = row.strip("| ").split(" | ")
        assert cells[1:] == [*shares, f"{entry['kv_cache_share']:.1%}", *asked]


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


# --- the model itself ---


def test_transformers_gives_the_same_logits():
    torch = pytest.importorskip("torch", reason="parity with transformers needs PyTorch")
    from transformers import AutoModelForCausalLM

    full = tca_jax.load("recall-tiny")
    ids = full.tokenizer(build_document(np.random.default_rng(3), 700, ["digits"]).text)["input_ids"]
    theirs = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    positions, none = jnp.arange(len(ids))[None], (None,) * full.config.num_layers
    hidden, _ = full.decoder(jnp.array([ids]), positions, lambda _, q, k, v, state: (attend(q, k, v), None), none)
    assert float(jnp.abs(full.decoder.logits(hidden)[0] - expected).max()) < 2e-4
