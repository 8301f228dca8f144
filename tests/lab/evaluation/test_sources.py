"""Sources: words of our own where RULER's are not there, and files that must be what they are said to be."""

import random
import sys

import pytest

from tca_jax.lab.evaluation.sources import Sources, Words, load_words


@pytest.fixture
def own_words(monkeypatch):
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    load_words.cache_clear()
    yield load_words()
    load_words.cache_clear()


def test_own_words_are_labelled(own_words):
    assert own_words.substitute
    assert own_words.origin.startswith("tca_jax's own ")
    adjective, noun = own_words.draw_pair(random.Random(0)).split("-")
    assert adjective in own_words.adjectives
    assert noun in own_words.nouns
    assert Sources().origin("words").substitute


def test_the_words_of_wonderwords_are_rulers():
    pytest.importorskip("wonderwords")
    load_words.cache_clear()
    words = load_words()
    assert not words.substitute
    assert len(words.singles) > 5000


def test_too_few_words_become_pairs():
    words = Words(("big", "new"), ("cat", "dog"), (), "a test", True)
    assert sorted(words.draw_distinct(random.Random(0), 4)) == ["big", "cat", "dog", "new"]
    few = Words(("big", "new", "old"), ("cat", "dog", "cow"), (), "a test", True)
    pairs = few.draw_distinct(random.Random(0), 9)
    assert len(set(pairs)) == 9
    assert all(pair.split("-")[0] in few.adjectives for pair in pairs)
    with pytest.raises(ValueError, match="10 different words: a test makes 9"):
        few.draw_distinct(random.Random(0), 10)


def test_origins_have_digest_and_name(tmp_path):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("text")
    two.write_text("other text")
    origins = [Sources(text=path).origin("text") for path in (one, two)]
    assert [origin.label for origin in origins] == ["one.txt", "two.txt"]
    assert origins[0].digest != origins[1].digest
    assert not origins[0].substitute
    assert Sources().origin("text").substitute


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"d\xe9j\xe0", "e.txt", r"--essays .*e\.txt is not UTF-8 text"),
        (b" \n", "e.txt", r"--essays .*e\.txt is empty"),
        (b"{", "e.json", r"--essays .*e\.json is not valid JSON"),
        (b'["text"]', "e.json", r'--essays .*e\.json: must be an object with a "text"'),
    ],
)
def test_files_without_text_are_refused(tmp_path, content, name, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        _ = Sources(essays=tmp_path / name).essay_words
