"""The text of recall documents: splits that do not overlap, ASCII, and an error where Python has no source."""

import pytest

from tca_jax.lab.recall import corpus as module
from tca_jax.lab.recall.corpus import HELD_OUT_MODULES, corpus, line_starts, source_files


def test_splits_share_no_file_and_leave_tests_out():
    train, held_out = set(source_files("train")), set(source_files("held-out"))
    assert not train & held_out
    assert not [path for path in train if {"test", "tests", "site-packages", "idlelib"} & set(path.parts)]
    assert {path.name for path in held_out} <= set(HELD_OUT_MODULES)


def test_no_held_out_module_stands_in_the_training_text():
    train = corpus("train")
    for path in source_files("held-out"):
        text = path.read_text(encoding="utf-8", errors="ignore").encode("ascii", errors="ignore")
        middle = len(text) // 2
        assert text[middle : middle + 2000] not in train, path.name


def test_splits_are_large_enough_for_documents_to_differ():
    assert len(corpus("held-out")) > 900_000
    assert len(corpus("train")) > 4_000_000


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_text_is_ascii_without_carriage_returns(split):
    assert corpus(split).isascii()
    assert b"\r" not in corpus(split)


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_every_line_start_follows_a_line_break(split):
    text, starts = corpus(split), line_starts(split)
    assert starts[0] == 0
    assert all(text[start - 1] == ord("\n") for start in starts[1:].tolist())
    assert len(starts) == text.rstrip(b"\n").count(b"\n") + 1 + (len(text) - len(text.rstrip(b"\n")) - 1)


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match=r"split = 'test': must be one of \['train', 'held-out'\]"):
        source_files("test")


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_python_without_its_source_is_an_error_that_names_the_folder(monkeypatch, tmp_path, split):
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no standard library source") as error:
        source_files(split)
    assert str(tmp_path) in str(error.value)
