"""RULER's tasks: their text to the letter, answers that the context gives, lengths that fit, and scores."""

import dataclasses
import hashlib
import json
import re
import sys

import pytest

from tca_jax.lab.evaluation.ruler import TASKS, match_all, match_part
from tca_jax.lab.evaluation.samples import DoesNotFit, Drawing, Sample
from tca_jax.lab.evaluation.sources import Sources, load_words
from tca_jax.loading import open_checkpoint

BY_NAME = {task.name: task for task in TASKS}
NEEDLE = r"One of the special magic (?:numbers|uuids) for \S+ is: \S+\."
#: A length in bytes at which each task fits the byte-level tokenizer.
LENGTHS = {"niah_multiquery": 1800, "niah_multivalue": 1500, "niah_multikey_1": 1500, "niah_multikey_3": 1500}
LENGTHS |= {"vt": 2600, "cwe": 3500, "fwe": 1200, "qa_1": 1500, "qa_2": 1500}
DIGESTS = {
    "niah_single_1": "cc8b8b86e0ce",
    "niah_single_2": "fb97cac76f96",
    "niah_single_3": "b458b55bd689",
    "niah_multikey_1": "6c7f31185eda",
    "niah_multikey_2": "40894f49e07d",
    "niah_multikey_3": "974955774613",
    "niah_multivalue": "97f4adebcddc",
    "niah_multiquery": "e249dbaf689f",
    "vt": "82b187c10536",
    "cwe": "7fc4082ed3ea",
    "fwe": "a1bafbce127e",
    "qa_1": "6f35828fcca0",
    "qa_2": "2ef91cfc66c2",
}
NEW_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Small files of the forms of SQuAD and HotpotQA."""
    folder = tmp_path_factory.mktemp("qa")

    def paragraph(i, **extra):
        entry = {"question": f"Who is {i}?", "answers": [{"text": f"person {i}"}, {"text": f"the {i}th"}], **extra}
        return {"context": f"Paragraph {i} says that person {i}, the {i}th, is here.", "qas": [entry]}

    articles = [[paragraph(i, is_impossible=i == 1) for i in range(3)], [paragraph(i) for i in range(3, 6)]]
    (folder / "squad.json").write_text(json.dumps({"data": [{"paragraphs": each} for each in articles]}))
    pairs = [
        {
            "question": f"Which is {i}?",
            "answer": f"thing {i}",
            "context": [[f"Title {i}", [f"First {i}. ", f"It is thing {i}."]], [f"Other {i}", ["Nothing."]]],
        }
        for i in range(4)
    ]
    (folder / "hotpotqa.json").write_text(json.dumps(pairs))
    return Sources(squad=folder / "squad.json", hotpotqa=folder / "hotpotqa.json")


@pytest.fixture(scope="module")
def draw(files):
    encoder = open_checkpoint("recall-tiny")

    def draw(name, length=None, count=2, seed=0, sources=files, only_check=False):
        drawing = Drawing(encoder, sources, length or LENGTHS.get(name, 1200), count, seed, only_check)
        return BY_NAME[name].draw(drawing)

    draw.encoder, draw.files = encoder, files
    return draw


def parts(sample: Sample) -> tuple[str, str, str]:
    prompt = sample.prompts["prefix"]
    return prompt.document, prompt.question, prompt.lead


def test_tasks_have_names_and_new_tokens():
    assert [task.name for task in TASKS] == [
        *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
        *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
    ]
    assert {task.name: task.new_tokens for task in TASKS} == {
        task.name: NEW_TOKENS.get(task.name, 128) for task in TASKS
    }


@pytest.mark.parametrize("name", BY_NAME)
def test_prompts_fill_their_length(draw, name):
    length = LENGTHS.get(name, 1200)
    for sample in draw(name, count=3):
        tokens = len(sample.prompts["prefix"].encode(draw.encoder)) + BY_NAME[name].new_tokens
        # A paragraph, a line of noise or a word that is repeated is the least by which they can grow.
        assert length - 300 < tokens <= length
    with pytest.raises(DoesNotFit, match=rf"--lengths 200: {name} needs at least \d+ tokens of recall-tiny") as raised:
        draw(name, length=200, only_check=True)
    assert f"at least {raised.value.least} tokens" in str(raised.value)
    assert len(draw(name, length=raised.value.least)) == 2  # what the message tells to ask for is enough
    assert draw(name, only_check=True) == []


@pytest.mark.parametrize("name", BY_NAME)
def test_samples_depend_on_seed_and_number(draw, name):
    three = draw(name, count=3)
    assert draw(name, count=3)[:2] == three[:2] == draw(name, count=2)
    assert three[0] != three[1]
    prefix, preamble, late = map(three[0].prompts.get, ("prefix", "preamble", "late"))
    assert preamble == late
    assert (preamble.document, preamble.question, preamble.lead) == (prefix.document, prefix.question, "")
    assert draw(name, count=1, seed=1)[0] != three[0]


@pytest.mark.parametrize("name", BY_NAME)
def test_prompts_keep_their_text(draw, name, tmp_path, monkeypatch):
    """Templates are NVIDIA/RULER's at c3f5e3b; a digest stands for documents, questions, first words and answers."""
    (tmp_path / "essay.txt").write_text("One thing. Another thing! A third? " * 9)
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    load_words.cache_clear()
    sources = dataclasses.replace(draw.files, essays=tmp_path / "essay.txt")
    samples = draw(name, sources=sources)
    load_words.cache_clear()
    text = "\0".join(part for sample in samples for part in (*parts(sample), *sample.references))
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == DIGESTS[name]
    for sample in samples:
        document = parts(sample)[0]
        for reference, depth in zip(sample.references, sample.depths, strict=bool(sample.depths)):
            assert document[round(depth * len(document)) :].startswith(reference)


def test_short_essays_are_repeated(draw, tmp_path):
    (tmp_path / "essay.txt").write_text("One  thing.\nAnother  thing! ")
    (tmp_path / "essay.json").write_text(json.dumps({"text": "One thing. Another thing!"}))
    for file in ("essay.txt", "essay.json"):
        document = parts(draw("niah_single_2", sources=Sources(essays=tmp_path / file))[0])[0]
        text = re.sub(NEEDLE + " ?", "", document.split("\n", 1)[1])
        assert text.count("One thing. Another thing!") > 10


def test_other_files_are_refused(draw, files, tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"--squad: not of SQuAD 2\.0's form: TypeError"):
        draw("qa_1", sources=Sources(squad=tmp_path / "list.json"))
    with pytest.raises(ValueError, match="--samples 9: --squad has 5 questions for qa_1"):
        draw("qa_1", count=9)


def test_scores_ignore_case():
    sample = Sample({}, ("Alpha", "beta"), (0.1, 0.9))
    assert match_all(sample, " so ALPHA\x00 it is", "prefix") == (0.5, (True, False))
    assert match_all(sample, "alphabeta", "prefix").score == 1
    assert match_part(sample, "BETA", "prefix").score == 1
    assert match_part(sample, "gamma", "prefix").score == 0
