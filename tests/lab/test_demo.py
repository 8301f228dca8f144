"""The demo: a short run of the shipped model, and which model it takes."""

import importlib.util
from pathlib import Path

import pytest

from tca_jax.lab import demo as demo_module
from tca_jax.lab.demo import METHODS, RECALL_TINY, SMOLLM2, choose_model, open_model, run_demo


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
    full, worth, window = (result.columns[name] for name in METHODS)
    assert [full.right, worth.right, window.right] == [[True], [True], [False]]
    assert window.share <= worth.share < 0.5 < full.share == 1
    assert [question for question, *_ in result.lost()] == result.questions
    assert full.stats.attended_share == 1 > worth.stats.attended_share > 0
    assert "full attention answers 1 of 1 questions, predicted worth 1 with " in result.summary()
    assert result.picture.read_bytes().startswith(b"\x89PNG")
