"""Recall tasks: facts, questions, documents and protocols."""

import itertools
import re

import numpy as np
import pytest
import sharp_lm

from tca_jax.engine.generation import Output, Stats
from tca_jax.lab.recall import PROTOCOLS, TASKS, build_document, draw_question, evaluation, facts
from tca_jax.lab.recall import corpus as module
from tca_jax.lab.recall.corpus import HELD_OUT_MODULES, corpus, line_starts, source_files
from tca_jax.lab.recall.evaluation import ask, draw_documents
from tca_jax.lab.recall.facts import ADJECTIVES, KINDS, NOUNS, Fact, draw_fact, draw_keys, draw_value, similar_keys
from tca_jax.lab.recall.protocols import PREAMBLES, chat_answer, chat_document, chat_question, completion, is_correct
from tca_jax.lab.recall.tasks import Question
from tca_jax.loading import checkpoint_folder

EVERY_TASK = tuple(TASKS)
KEY = rf"(?:{'|'.join(ADJECTIVES)}) (?:{'|'.join(NOUNS)})"
KIND = rf"(?:(?:first|second|third|fourth) )?(?:{'|'.join(kind for kinds in KINDS.values() for kind in kinds)})"
LINES = tuple(
    re.compile(f"# {pattern.format(kind=f'(?P<kind>{KIND})', key=f'(?P<key>{KEY})', value='(?P<value>.+)')}[.]")
    for pattern in (
        "The {kind} for {key} is {value}",
        "Remember that the {kind} of {key} is {value}",
        "For {key} the {kind} is {value}",
        "As agreed, the {kind} for {key} is {value}",
        "{key}: {kind} {value}",
        "Note on {key}: its {kind} reads {value}",
        "We gave {key} a {kind}, namely {value}",
    )
)


# --- texts and facts ---


@pytest.mark.parametrize(("split", "least"), [("train", 4_000_000), ("held-out", 900_000)])
def test_splits_are_ascii_lines(split, least):
    text, starts = corpus(split), line_starts(split)
    assert text.isascii()
    assert b"\r" not in text
    assert len(text) > least
    assert starts[0] == 0
    assert all(text[start - 1] == ord("\n") for start in starts[1:].tolist())


def test_splits_share_no_text():
    train, held_out = set(source_files("train")), set(source_files("held-out"))
    assert not train & held_out
    assert not [path for path in train if {"test", "tests", "site-packages", "idlelib"} & set(path.parts)]
    assert {path.name for path in held_out} <= set(HELD_OUT_MODULES)
    for path in held_out:
        text = path.read_text(encoding="utf-8", errors="ignore").encode("ascii", errors="ignore")
        assert text[len(text) // 2 :][:2000] not in corpus("train"), path.name


def test_missing_source_is_named(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"split = 'test': must be one of \['train', 'held-out'\]"):
        source_files("test")
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"no standard library source .*{tmp_path}"):
        source_files("train")


def test_keys_are_distinct_and_first_share_no_word():
    keys = list(draw_keys(np.random.default_rng(0)))
    assert len(set(keys)) == len(keys) == len(ADJECTIVES) * len(NOUNS)
    adjectives, nouns = zip(*map(str.split, keys[: len(ADJECTIVES)]), strict=True)
    assert len(set(adjectives)) == len(set(nouns)) == len(ADJECTIVES)
    kinds = list(itertools.chain.from_iterable(KINDS.values()))
    assert len(set(kinds)) == len(kinds) == 16


@pytest.mark.parametrize("count", [0, 7, len(ADJECTIVES) + len(NOUNS) - 2])
def test_similar_keys_share_one_word(count):
    others = similar_keys(np.random.default_rng(2), "amber falcon", count)
    assert len(set(others)) == len(others) == count
    assert all(("amber" in key.split()) != ("falcon" in key.split()) for key in others)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ("digits", r"[0-9]{6}"),
        ("hex", r"[0-9a-f]{32}"),
        ("words", rf"({'|'.join(ADJECTIVES)}) ({'|'.join(NOUNS)})"),
        ("passage", r"[a-z ]{199}[a-z]"),
    ],
)
def test_values_have_their_form(form, pattern):
    rng = np.random.default_rng(3)
    values = [draw_value(rng, form) for _ in range(200)]
    assert all(re.fullmatch(pattern, value) for value in values)
    assert len(set(values)) > 190
    if form == "digits":
        assert {value[0] for value in values} == set("0123456789")  # leading zeros are kept


def test_wordings_name_kind_key_and_value():
    rng = np.random.default_rng(6)
    lines = {draw_fact(rng, "access code", "amber falcon", "482913").line for _ in range(200)}
    assert len(lines) == len(facts._WORDINGS) == 7
    for line in lines:
        assert re.fullmatch(r"# [^\n]+\.\n", line)
        assert all(line.count(part) == 1 for part in ("access code", "amber falcon", "482913"))
    assert Fact("access code", "amber falcon", "482913").line == "# The access code for amber falcon is 482913.\n"


# --- questions ---


def read_facts(text):
    """Values of a text by kind and key; nothing twice."""
    found = {}
    for line in text.splitlines():
        for match in filter(None, (pattern.fullmatch(line) for pattern in LINES)):
            where = match["kind"], match["key"]
            assert where not in found, f"{where} has two values"
            found[where] = match["value"]
    return found


def solve(text, question):
    """The answer to a question, from the text alone."""
    values, keys = read_facts(text), re.findall(KEY, question)
    kind = re.search(KIND, re.sub(KEY, "#", question))[0]
    if count := re.search(r"\ball (\d)\b", question):
        ordinals = ("first", "second", "third", "fourth")[: int(count[1])]
        found = [(f"{ordinal} {kind}", keys[0]) for ordinal in ordinals]
    else:
        found = [(kind, key) for key in keys]
    while follows := re.fullmatch(f"that of ({KEY})", values[found[-1]]):
        found.append((kind, follows[1]))
    sentence = ", ".join(f"the {kind} for {key} is {values[kind, key]}" for kind, key in found)
    return f"{sentence[0].upper()}{sentence[1:]}."


def draw(task, seed):
    rng = np.random.default_rng(seed)
    return draw_question(rng, task, draw_keys(rng))


@pytest.mark.parametrize("seed", range(10))
def test_documents_answer_their_questions(seed):
    document = build_document(np.random.default_rng(seed), 12000, [*TASKS, *TASKS])
    assert [question.task for question in document.questions] == [*TASKS, *TASKS]
    for question in document.questions:
        assert solve(document.text, question.text) == question.sentence


@pytest.mark.parametrize("task", TASKS)
def test_questions_have_wordings_and_lead(task):
    drawn = [draw(task, seed) for seed in range(100)]
    assert len({re.sub(rf"{KEY}|\d", "#", re.sub(KIND, "#", question.text)) for question in drawn}) >= 5
    for question in drawn:
        assert question.lead == f"The {question.facts[0].kind} for {question.facts[0].key} is "
        assert question.answer.startswith(question.facts[0].value)
        assert is_correct(question, chat_answer(question), "late")
        assert len(chat_answer(question)) < evaluation.ANSWER_TOKENS
    with pytest.raises(ValueError, match=r"task = 'sums': must be one of \['digits', 'words', .*'copy'\]"):
        draw("sums", 0)


def test_tracking_follows_hops_beside_a_distractor():
    hops = set()
    for seed in range(60):
        question = draw("tracking", seed)
        *chain, distractor, end = question.facts
        assert [fact.value for fact in chain[:-1]] == [f"that of {fact.key}" for fact in chain[1:]]
        assert re.fullmatch(r"\d{6}", chain[-1].value)
        assert distractor.value == f"that of {end.key}"
        assert end.key not in question.sentence
        assert "step by step" in question.text
        hops.add(len(chain) - 1)
    assert hops == {2, 3, 4}


def test_distractors_share_kind_and_a_word():
    for seed in range(20):
        asked, *others = draw("keys", seed).facts
        assert len({fact.key for fact in others} - {asked.key}) == 7
        assert {fact.kind for fact in others} == {asked.kind}
        assert all(len(set(fact.key.split()) & set(asked.key.split())) == 1 for fact in others)


@pytest.mark.parametrize(("task", "keys"), [("values", 1), ("queries", None)])
def test_several_are_two_to_four(task, keys):
    drawn = [draw(task, seed) for seed in range(60)]
    assert {len(question.facts) for question in drawn} == {2, 3, 4}
    for question in drawn:
        assert len({fact.key for fact in question.facts}) == (keys or len(question.facts))
        assert question.answer.count(" is ") == len(question.facts) - 1


# --- documents ---


@pytest.mark.parametrize("split", ["train", "held-out"])
@pytest.mark.parametrize(("num_bytes", "tasks"), [(500, ["digits"]), (4095, EVERY_TASK), (16383, EVERY_TASK * 4)])
def test_documents_have_their_bytes_and_places(num_bytes, tasks, split):
    document, again, other = (build_document(np.random.default_rng(s), num_bytes, tasks, split) for s in (0, 0, 1))
    assert document == again
    assert document.text != other.text
    assert len(document.text.encode("ascii")) == num_bytes
    offsets, passage = [offset for _, offset in document.places], document.text
    assert offsets == sorted(offsets)
    assert len(offsets) == sum(len(question.facts) for question in document.questions)
    for fact, place in document.places:
        assert document.place(fact) == place
        assert document.text.startswith(fact.line, place)
        assert place == 0 or document.text[place - 1] == "\n"
        passage = passage.replace(fact.line, "", 1)
    assert b"\n" + passage.encode() in b"\n" + corpus(split)


def test_facts_spread_in_random_order():
    rng = np.random.default_rng(4)
    documents = [build_document(rng, 8191, ["digits"] * 4) for _ in range(100)]
    depths = [offset / 8191 for document in documents for _, offset in document.places]
    counts, _ = np.histogram(depths, bins=5, range=(0, 1))
    assert counts.min() > 400 / 5 / 2
    firsts = [[fact for fact, _ in d.places].index(d.questions[0].facts[0]) for d in documents]
    assert set(firsts) == {0, 1, 2, 3}


@pytest.mark.parametrize("num_bytes", [0, 40, 100_000_000])
def test_sizes_without_room_are_refused(num_bytes):
    with pytest.raises(ValueError, match=rf"num_bytes = {num_bytes}: the facts take \d+ bytes") as error:
        build_document(np.random.default_rng(0), num_bytes, ["digits"])
    least = int(str(error.value).rsplit("[", 1)[1].split(",")[0])
    document = build_document(np.random.default_rng(0), least, ["digits"])
    assert document.text == "".join(fact.line for fact, _ in document.places)


@pytest.mark.parametrize("task", TASKS)
def test_drawn_documents_ask_their_task_first(task):
    two, three = draw_documents((7, 1), 2, 6000, task), draw_documents((7, 1), 3, 6000, task)
    assert two == three[:2]
    for document in three:
        assert document.questions[0].task == task
        assert sorted(question.task for question in document.questions) == sorted(TASKS)
        assert len(completion(document.text, document.questions[0])) == 6000
    assert len({document.text for document in [*three, *draw_documents(7, 1, 6000, task)]}) == 4


# --- protocols ---

LEAD = "The access code for amber falcon is "
QUESTION = Question(
    "digits", (Fact("access code", "amber falcon", "482913"),), "Find the access code of amber falcon.", LEAD, "482913"
)


def test_chats_match_the_shipped_template():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder("recall-tiny"))
    document, question = chat_document("Some text."), chat_question(QUESTION)
    messages = [{"role": "user", "content": f"Some text.\n\n{QUESTION.text}"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.bos_token + document + question == rendered
    apart = tokenizer(document)["input_ids"] + tokenizer(question, add_special_tokens=False)["input_ids"]
    assert apart == tokenizer(document + question)["input_ids"]
    expected = f"Some text.\n\nQuestion: Find the access code of amber falcon.\nAnswer: {LEAD}"
    assert completion("Some text.", QUESTION) == expected


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("482913.", True),
        ("482913", False),
        ("482914.", False),
        ("4829130.", False),
        (" 482913.", False),
        ("482913. And", False),
        (f"{LEAD}482913.", False),
        ("", False),
    ],
)
def test_completions_are_right_if_exact(text, right):
    assert is_correct(QUESTION, text, "prefix") is right


@pytest.mark.parametrize("protocol", ["preamble", "late"])
@pytest.mark.parametrize(
    ("text", "right"),
    [
        *((f"{preamble} {LEAD}482913.", True) for preamble in PREAMBLES),
        (f"{LEAD}482913.", True),
        (f"{PREAMBLES[0]} {LEAD}482914.", False),
        (f"{PREAMBLES[0]} {LEAD}482913", False),
        (f"{PREAMBLES[0]} {LEAD}482913. It was there.", False),
        (f"{LEAD}111111. {LEAD}482913.", False),
        (f"{PREAMBLES[0]} 482913.", False),
        (f"{PREAMBLES[0] * 4} {LEAD}482913.", False),
        ("", False),
    ],
)
def test_chat_answers_are_right_after_a_preamble(text, right, protocol):
    assert is_correct(QUESTION, text, protocol) is right


def test_protocols_read_documents_together_or_apart(monkeypatch):
    made = []
    stats = Stats([], [], 0.0, 0.0, 0.0, kv_cache_bytes=3, full_kv_cache_bytes=10, kept_share=0.25, attended_share=0.5)

    lm = sharp_lm.make_lm()

    def generate(lm, prompts, *, max_new_tokens, context=None):
        made.append((prompts, context, max_new_tokens))
        return Output([], [], stats, None, [f"answer {prompts[0]}", *[""] * (len(prompts) - 1)])

    monkeypatch.setattr(evaluation, "generate", generate)
    monkeypatch.setattr(evaluation, "prefill", lambda lm, documents: ("read", documents))
    monkeypatch.setattr(evaluation, "is_correct", lambda question, text, protocol: bool(text))
    documents = draw_documents(0, 2, 4000, "digits")
    for protocol in PROTOCOLS:
        ask(lm, documents, protocol, max_new_tokens=99)
    questions, texts = [document.questions[0] for document in documents], [document.text for document in documents]
    read, asked = list(map(chat_document, texts)), list(map(chat_question, questions))
    assert made == [
        (list(map(completion, texts, questions)), None, 99),
        ([d + q for d, q in zip(read, asked, strict=True)], None, 99),
        (asked, ("read", read), 99),
    ]
    made.clear()
    found = ask(lm, draw_documents(1, 5, 4000, "digits"), "prefix", batch=2)
    assert [len(prompts) for prompts, *_ in made] == [2, 2, 1]
    assert found.right == [True, False, True, False, True]
    assert found.kv_cache_share == 0.3
    with pytest.raises(ValueError, match=re.escape(f"protocol = 'ruler': must be one of {list(PROTOCOLS)}")):
        ask(lm, documents, "ruler")
