"""RULER's tasks: their text to the letter, answers that the context gives, lengths that fit, and scores."""

import json
import re
from collections import Counter

import pytest

from tca_jax.lab.evaluation.ruler import TASKS, match_all, match_part
from tca_jax.lab.evaluation.samples import DoesNotFit, Drawing, Sample
from tca_jax.lab.evaluation.sources import Sources
from tca_jax.loading import open_checkpoint

BY_NAME = {task.name: task for task in TASKS}
NEEDLE = r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\."
#: A length in bytes at which each task fits the byte-level tokenizer.
LENGTHS = {"niah_multiquery": 1800, "niah_multivalue": 1500, "niah_multikey_1": 1500, "niah_multikey_3": 1500}
LENGTHS |= {"vt": 2600, "cwe": 3500, "fwe": 1200, "qa_1": 1500, "qa_2": 1500}
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

    draw.encoder = encoder
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


@pytest.mark.parametrize("kind", ["number", "uuid"])
def test_one_needle_is_singular(draw, kind):
    document, question, lead = parts(draw("niah_single_1" if kind == "number" else "niah_single_3")[0])
    ((plural, key, value),) = re.findall(NEEDLE, document)
    assert plural == f"{kind}s"
    assert document.startswith(
        f"A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about "
        f"the {kind} afterwards.\n"
    )
    assert question == f"\nWhat is the special magic {kind} for {key} mentioned in the provided text?"
    assert lead == f" The special magic {kind} for {key} mentioned in the provided text is"
    assert re.fullmatch(r"\d{7}" if kind == "number" else r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f-]{21}", value)


def test_several_needles_are_plural(draw):
    document, question, lead = parts(draw("niah_multiquery")[0])
    keys = [key for _, key, _ in re.findall(NEEDLE, document)]
    assert document.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the numbers afterwards.\n"
    )
    asked = re.fullmatch(
        r"\nWhat are all the special magic numbers for (\S+), (\S+), (\S+), and (\S+) mentioned in the provided text\?",
        question,
    )
    assert sorted(asked.groups()) == sorted(keys)
    query = ", ".join(asked.groups()[:-1]) + f", and {asked.group(4)}"
    assert lead == f" The special magic numbers for {query} mentioned in the provided text are"


@pytest.mark.parametrize(
    ("name", "needles", "answers"),
    [("niah_single_2", 1, 1), ("niah_multikey_1", 4, 1), ("niah_multivalue", 4, 4), ("niah_multiquery", 4, 4)],
)
def test_essays_hold_needles_and_answers(draw, name, needles, answers):
    sample = draw(name)[0]
    document, question, _ = parts(sample)
    found = [(key, value) for _, key, value in re.findall(NEEDLE, document)]
    assert len(found) == needles
    assert sorted(sample.references) == sorted(value for key, value in found if key in question)
    assert len(sample.references) == answers
    for reference, depth in zip(sample.references, sample.depths, strict=True):
        assert document[round(depth * len(document)) :].startswith(reference)


def test_short_essays_are_repeated(draw, tmp_path):
    (tmp_path / "essay.txt").write_text("One  thing.\nAnother  thing! ")
    (tmp_path / "essay.json").write_text(json.dumps({"text": "One thing. Another thing!"}))
    for file in ("essay.txt", "essay.json"):
        document = parts(draw("niah_single_2", sources=Sources(essays=tmp_path / file))[0])[0]
        text = re.sub(NEEDLE + " ?", "", document.split("\n", 1)[1])
        assert text.count("One thing. Another thing!") > 10


def test_chains_of_variables_are_the_answer(draw):
    sample = draw("vt")[0]
    document, question, lead = parts(sample)
    example, text = document.split("\n\nMemorize", 1)
    value = re.fullmatch(
        r"\nQuestion: Find all variables that are assigned the value (\d{5}) in the text above\.", question
    ).group(1)
    assert lead == (
        " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned the "
        f"value {value}, they are: "
    )
    for part, letters, wanted in ((text, 5, value), (example, 3, r"\d{5}")):
        chain = re.findall(rf"^VAR ([A-Z]{{{letters}}}) = (?:VAR )?(\w+) ?$", part, re.MULTILINE)
        names = [name for name, _ in chain]
        assert len(names) == 5
        assert re.fullmatch(wanted, chain[0][1])
        assert [source for _, source in chain[1:]] == names[:-1]
        answer = list(sample.references) if letters == 5 else example.rstrip().split(": ")[-1].split()
        assert answer == names


def test_common_words_are_the_answer(draw):
    sample = draw("cwe")[0]
    document, question, lead = parts(sample)
    assert question == "\nQuestion: What are the 10 most common words in the above list?"
    assert lead == " Answer: The top 10 words that appear most often in the list are:"
    example, text = document.split("\nBelow", 1)
    listed, answered = example.split(question + lead)
    for numbered, wanted, repeats in ((text, sample.references, 6), (listed, re.findall(r"\d+\. (\S+)", answered), 3)):
        counts = Counter(re.findall(r"\d+\. (\S+)", numbered))
        assert {word for word, count in counts.items() if count == repeats} == set(wanted)
        assert set(counts.values()) == {1, repeats}


def test_frequent_coded_words_are_the_answer(draw):
    sample = draw("fwe")[0]
    document, question, lead = parts(sample)
    start = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. "
    )
    ranked = Counter(document.removeprefix(start).split(" ")).most_common(5)
    assert [word for word, _ in ranked[:4]] == ["...", *sample.references]
    assert ranked[3][1] > ranked[4][1]
    assert question == (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text?"
    )
    assert lead == " Answer: According to the coded text above, the three most frequently appeared words are:"


def test_questions_follow_numbered_documents(draw):
    instruction = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    )
    second = draw("qa_1", count=2)[1]  # question 1 of the file has no answer
    document, question, lead = parts(second)
    assert document.startswith(f"{instruction}\n\nThe following are given documents.\n\nDocument 1:\n")
    assert "Paragraph 2 says that person 2" in document
    assert question == f"\n\n{instruction}\n\nQuestion: Who is 2?"
    assert (lead, second.references) == (" Answer:", ("person 2", "the 2th"))
    first = draw("qa_2", count=1)[0]
    assert re.search(r"Document \d+:\nTitle 0\nFirst 0\. It is thing 0\.", parts(first)[0])
    assert first.references == ("thing 0",)


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
