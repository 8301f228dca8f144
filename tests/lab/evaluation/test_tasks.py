"""Tasks: prompts to the letter, lengths that fit, scores, and the sources of samples."""

import dataclasses
import hashlib
import json
import sys

import pytest
import tiny

import tca_jax
from tca_jax.engine.score import score_answers
from tca_jax.lab.evaluation import recall_tasks, ruler, text_tasks
from tca_jax.lab.evaluation.samples import DoesNotFit, Drawing
from tca_jax.lab.evaluation.sources import Sources, load_words
from tca_jax.lab.recall.documents import draw_documents
from tca_jax.lab.recall.tasks import PREAMBLES, completion
from tca_jax.loading import open_checkpoint

RULER = {task.name: task for task in ruler.TASKS}
DIGITS, (LOSS,) = recall_tasks.TASKS[0], text_tasks.TASKS
#: Lengths in bytes at which tasks fit the byte-level tokenizer, with digests of documents, questions, first words and
#: answers. Templates are NVIDIA/RULER's at c3f5e3b.
PROMPTS = {
    "niah_single_1": (1200, "cc8b8b86e0ce"),
    "niah_single_2": (1200, "fb97cac76f96"),
    "niah_single_3": (1200, "b458b55bd689"),
    "niah_multikey_1": (1500, "6c7f31185eda"),
    "niah_multikey_2": (1200, "40894f49e07d"),
    "niah_multikey_3": (1500, "974955774613"),
    "niah_multivalue": (1500, "97f4adebcddc"),
    "niah_multiquery": (1800, "e249dbaf689f"),
    "vt": (2600, "82b187c10536"),
    "cwe": (3500, "7fc4082ed3ea"),
    "fwe": (1200, "a1bafbce127e"),
    "qa_1": (1500, "6f35828fcca0"),
    "qa_2": (1500, "2ef91cfc66c2"),
}
LENGTH = 256  # of a passage, of which 32 tokens are continued


@pytest.fixture(scope="module")
def encoder():
    return open_checkpoint("recall-tiny")


@pytest.fixture
def own_words(monkeypatch):
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    load_words.cache_clear()
    yield load_words()
    load_words.cache_clear()


def digest(texts):
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Small files of the forms of SQuAD and HotpotQA."""
    folder = tmp_path_factory.mktemp("qa")

    def paragraph(i, **extra):
        entry = {"question": f"Who is {i}?", "answers": [{"text": f"person {i}"}, {"text": f"the {i}th"}], **extra}
        return {"context": f"Paragraph {i} says that person {i}, the {i}th, is here.", "qas": [entry]}

    def pair(i):
        context = [[f"Title {i}", [f"First {i}. ", f"It is thing {i}."]], [f"Other {i}", ["Nothing."]]]
        return {"question": f"Which is {i}?", "answer": f"thing {i}", "context": context}

    articles = [[paragraph(i, is_impossible=i == 1) for i in range(3)], [paragraph(i) for i in range(3, 6)]]
    (folder / "squad.json").write_text(json.dumps({"data": [{"paragraphs": each} for each in articles]}))
    (folder / "hotpotqa.json").write_text(json.dumps([pair(i) for i in range(4)]))
    return Sources(squad=folder / "squad.json", hotpotqa=folder / "hotpotqa.json")


@pytest.fixture
def draw(encoder, files):
    def draw(name, length=None, count=2, seed=0, sources=files):
        return RULER[name].draw(Drawing(encoder, sources, length or PROMPTS[name][0], count, seed))

    return draw


@pytest.mark.parametrize("name", RULER)
def test_ruler_prompts_fill_their_length(draw, encoder, name):
    length, three = PROMPTS[name][0], draw(name, count=3)
    for sample in three:
        tokens = len(sample.prompts["prefix"].encode(encoder)) + RULER[name].new_tokens
        # A paragraph, a line of noise or a word that is repeated is the least by which they can grow.
        assert length - 300 < tokens <= length
    assert three[:2] == draw(name)
    assert three[0] not in (three[1], *draw(name, count=1, seed=1))
    with pytest.raises(DoesNotFit, match=rf"--lengths 200: {name} needs at least \d+ tokens of recall-tiny"):
        draw(name, length=200)


@pytest.mark.parametrize("name", RULER)
def test_ruler_prompts_keep_their_text(draw, files, name, tmp_path, own_words):
    essays = tmp_path / "essay.json"  # shorter than a haystack
    essays.write_text(json.dumps({"text": "One  thing. Another thing!\n A third? " * 9}))
    samples = draw(name, sources=dataclasses.replace(files, essays=essays))
    texts = []
    for sample in samples:
        prompt, late = sample.prompts["prefix"], sample.prompts["late"]
        texts += [prompt.document, prompt.question, prompt.lead, *sample.references]
        assert (late.document, late.question, late.lead) == (prompt.document, prompt.question, "")
    assert digest(texts) == PROMPTS[name][1]


def test_unfit_question_files_are_refused(draw, tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"--squad: not of SQuAD 2\.0's form: list indices"):
        draw("qa_1", sources=Sources(squad=tmp_path / "list.json"))
    with pytest.raises(ValueError, match="--samples 9: --squad has 5 questions for qa_1"):
        draw("qa_1", count=9)


def test_recall_prompts_match_the_card(encoder):
    def encoded(text):
        return encoder.tokenizer(text)["input_ids"]

    samples = DIGITS.draw(Drawing(encoder, Sources(), 4096, 2, 0))
    for sample, document in zip(samples, draw_documents((0, 2), 2, 4096, "digits"), strict=True):
        question = document.questions[0]
        assert sample.prompts["prefix"].encode(encoder) == encoded(completion(document.text, question))
        chat = f"<|user|>{document.text}\n\n{question.text}<|eos|><|assistant|>"
        assert sample.prompts["preamble"].encode(encoder) == encoded(chat)
        read, asked = sample.prompts["late"].encode_apart(encoder)
        assert read == encoded(f"<|user|>{document.text}")
        assert read + asked == encoded(chat)
        assert DIGITS.score(sample, f"{PREAMBLES[0]} {question.sentence}", "late") == 1
        assert DIGITS.score(sample, f"{question.answer}.", "late-prefix") == 1


@pytest.mark.parametrize(
    ("task", "length", "message"),
    [
        (DIGITS, 1024, "recall_digits needs at least 3500 tokens of recall-tiny"),
        (DIGITS, 16000, "recall_digits needs at most 15936, for answers take up to 448 tokens more"),
        (LOSS, 2000, "loss needs at most 1001, the tokens of --text"),
        (LOSS, 31, "loss needs at least 32 tokens of recall-tiny"),
    ],
)
def test_lengths_without_room_are_refused(encoder, task, length, message, tmp_path):
    (tmp_path / "text.txt").write_text("a" * 1000)
    with pytest.raises(DoesNotFit, match=f"^--lengths {length}: {message}"):
        task.draw(Drawing(encoder, Sources(text=tmp_path / "text.txt"), length, 1, 0))


def test_text_losses_are_those_of_score():
    lm, passage = (
        tiny.tiny_lm().with_method("streaming", sinks=0, window=16, block_size=8),
        tiny.random_prompt(3, LENGTH),
    )
    counts = []
    found = LOSS.measure(lm, [passage, passage], "text", 1, counts.append)
    expected, document = tca_jax.score(lm, passage), passage[: -LENGTH // 8]
    assert found["values"]["loss_inside"] == pytest.approx(-expected.logprobs[0].mean(), abs=1e-5)
    behind = score_answers(lm, [document], [[passage[-LENGTH // 8 :]]])
    assert found["score"] == found["values"]["loss"] == pytest.approx(-behind.logprobs[0][0].mean(), abs=1e-5)
    assert found["attended_share"] == pytest.approx(expected.attended_share[0])
    assert found["kept_share"] == pytest.approx(tca_jax.prefill(lm, [document]).stats.kept_share)
    assert max(found["kv_cache_bytes"] / found["full_kv_cache_bytes"], found["attended_share"]) < 0.9
    assert counts == [1, 1]


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"d\xe9j\xe0", "e.txt", r"--essays .*e\.txt is not UTF-8 text"),
        (b" \n", "e.txt", r"--essays .*e\.txt is empty"),
        (b"{", "e.json", r"--essays.*e\.json is not valid JSON"),
        (b'["text"]', "e.json", r'--essays .*e\.json: must be an object with a "text"'),
    ],
)
def test_files_without_text_are_refused(tmp_path, content, name, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        _ = Sources(essays=tmp_path / name).essay_words
