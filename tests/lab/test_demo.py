"""The demo: a short run of the shipped model, and which model it takes."""

import importlib.util
import json
from pathlib import Path

import pytest

from tca_jax.lab import demo as demo_module
from tca_jax.lab.demo import (
    METHODS,
    RECALL_TINY,
    SMOLLM2,
    choose_model,
    open_model,
    run_demo,
)


def test_smollm2_is_the_default_once_fetched(monkeypatch):
    monkeypatch.setattr(demo_module, "find", lambda alias: Path(f"{alias}.gguf"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: package)
    assert choose_model() == choose_model(SMOLLM2) == SMOLLM2
    assert choose_model(RECALL_TINY) == RECALL_TINY
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    assert choose_model() == RECALL_TINY
    monkeypatch.setattr(demo_module, "find", lambda alias: None)
    assert choose_model() == RECALL_TINY
    with pytest.raises(ValueError, match=r"model = 'smollm2': its file is not in .*make models"):
        choose_model(SMOLLM2)
    with pytest.raises(ValueError, match=r"model = 'other': must be one of \['recall-tiny', 'smollm2'\]"):
        choose_model("other")


def test_the_window_loses_what_tca_answers(tmp_path):
    result = run_demo(open_model(RECALL_TINY, 3000, 1), 3000, 1, 0, tmp_path / "new")
    assert [[answer.correct for answer in result.of(name)] for name in METHODS] == [[True], [True], [False]]
    assert result.share("full") == 1
    assert result.share("window") <= result.share("tca") < 0.5
    assert result.lost() == [(*result.of("tca"), *result.of("window"))]
    full, tca, _ = result.readings
    assert full.attended_share == 1 > tca.attended_share > 0
    assert result.picture.read_bytes().startswith(b"\x89PNG")
    json.dumps(result.to_json())
