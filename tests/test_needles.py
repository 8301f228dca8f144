"""Needle documents: exact sizes, needles where they say, questions that match, splits that do not overlap."""

import numpy as np
import pytest

from tca_jax import needles
from tca_jax.needles import Question, build_document, corpus, is_correct, source_files


@pytest.mark.parametrize("split", ["train", "held-out"])
@pytest.mark.parametrize(("num_bytes", "num_needles"), [(175, 2), (1000, 3), (4095, 1), (8191, 8), (16383, 66)])
def test_document_and_any_question_have_exactly_the_wanted_bytes(num_bytes, num_needles, split):
    document = build_document(np.random.default_rng(0), num_bytes, num_needles, split)
    for question in document.questions:
        assert len(document.prompt(question).encode("ascii")) == num_bytes


def test_needles_stand_at_line_boundaries_where_their_positions_say():
    rng = np.random.default_rng(1)
    for _ in range(50):
        document = build_document(rng, 3000, 6)
        text = document.text
        assert [needle.position for needle in document.needles] == sorted(n.position for n in document.needles)
        for needle in document.needles:
            assert text[needle.position :].startswith(f"# The access code for {needle.key} is {needle.code}.\n")
            assert needle.position == 0 or text[needle.position - 1] == "\n"


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_text_around_the_needles_is_a_passage_of_the_split_that_starts_a_line(split):
    document = build_document(np.random.default_rng(2), 5000, 9, split)
    passage = document.text
    for needle in document.needles:
        passage = passage.replace(needle.line, "", 1)
    assert "\n" + passage in corpus(split).decode("ascii")


def test_every_needle_is_asked_for_once_with_its_code_as_the_answer():
    document = build_document(np.random.default_rng(3), 6000, 12)
    assert sorted(q.needle.position for q in document.questions) == [n.position for n in document.needles]
    for question in document.questions:
        key = question.needle.key
        assert question.prompt == f"\n# What is the access code for {key}?\n# The access code for {key} is "
        assert question.answer == question.needle.code
        assert document.text.count(f"for {key} is {question.answer}.") == 1


def test_questions_come_in_an_order_that_does_not_tell_the_needles_order():
    rng = np.random.default_rng(4)
    documents = [build_document(rng, 2000, 4) for _ in range(60)]
    assert {document.needles.index(document.questions[0].needle) for document in documents} == {0, 1, 2, 3}


def test_nouns_and_adjectives_do_not_repeat_within_a_document():
    document = build_document(np.random.default_rng(5), 8000, needles.MAX_NEEDLES)
    adjectives, nouns = zip(*(needle.key.split(" ") for needle in document.needles), strict=True)
    assert len(set(adjectives)) == len(set(nouns)) == needles.MAX_NEEDLES


def test_word_lists_hold_no_word_twice_and_words_of_one_length():
    for words, length in ((needles._ADJECTIVES, 5), (needles._NOUNS, 6)):
        assert len(set(words)) == len(words) > 50
        assert {len(word) for word in words} == {length}


def test_codes_are_six_digits_that_differ_between_documents():
    rng = np.random.default_rng(6)
    codes = [needle.code for _ in range(100) for needle in build_document(rng, 700, 2).needles]
    assert all(len(code) == 6 and code.isdecimal() for code in codes)
    assert len(set(codes)) > 190
    assert {code[0] for code in codes} == set("0123456789")  # leading zeros are not lost


def test_needles_spread_over_the_whole_document():
    rng = np.random.default_rng(7)
    depths = [n.position / 8191 for _ in range(100) for n in build_document(rng, 8191, 4).needles]
    counts, _ = np.histogram(depths, bins=5, range=(0, 1))
    assert counts.min() > 400 / 5 / 2


def test_same_generator_state_gives_the_same_document_and_another_gives_another():
    first, again, other = (build_document(np.random.default_rng(seed), 2000, 4) for seed in (8, 8, 9))
    assert first == again
    assert first.text != other.text


def test_splits_share_no_file_and_leave_tests_out():
    train, held_out = set(source_files("train")), set(source_files("held-out"))
    assert not train & held_out
    assert not [path for path in train if {"test", "tests", "site-packages", "idlelib"} & set(path.parts)]
    assert {path.name for path in held_out} <= set(needles.HELD_OUT_MODULES)


def test_splits_are_large_enough_for_documents_to_differ():
    assert len(corpus("held-out")) > 900_000
    assert len(corpus("train")) > 4_000_000


def test_text_is_ascii_without_carriage_returns():
    for split in ("train", "held-out"):
        assert corpus(split).isascii()
        assert b"\r" not in corpus(split)


@pytest.mark.parametrize(
    ("generated", "expected"),
    [
        ("482913.", True),
        ("482913.\n# What", True),
        ("482913", False),
        ("4829130.", False),
        ("482914.", False),
        (" 482913.", False),
        ("", False),
    ],
)
def test_only_the_exact_digits_and_a_full_stop_are_correct(generated, expected):
    needle = needles.Needle("amber falcon", "482913", 0)
    assert is_correct(Question("...", "482913", needle), generated) is expected


@pytest.mark.parametrize("num_needles", [0, -1, needles.MAX_NEEDLES + 1])
def test_number_of_needles_out_of_range_is_refused(num_needles):
    with pytest.raises(ValueError, match=rf"num_needles = {num_needles}: must lie in \[1, {needles.MAX_NEEDLES}\]"):
        build_document(np.random.default_rng(0), 8191, num_needles)


@pytest.mark.parametrize("num_bytes", [0, 174, 100_000_000])
def test_document_too_short_for_its_needles_or_longer_than_all_text_is_refused(num_bytes):
    with pytest.raises(ValueError, match=rf"num_bytes = {num_bytes}: with num_needles = 2 it must lie in \[175, "):
        build_document(np.random.default_rng(0), num_bytes, 2)


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match=r"split = 'test': must be one of \['train', 'held-out'\]"):
        source_files("test")


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_python_without_its_source_is_an_error_that_names_the_folder(monkeypatch, tmp_path, split):
    monkeypatch.setattr(needles.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no standard library source") as error:
        source_files(split)
    assert str(tmp_path) in str(error.value)
