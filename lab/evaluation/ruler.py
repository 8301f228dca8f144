"""RULER (arXiv 2404.06654): its thirteen tasks as NVIDIA/RULER defines them, drawn offline for any tokenizer.

The suite "kvpress" has the same tasks with the samples of kvpress's leaderboard (`Sources.kvpress`): 500 of each at
4,096 tokens of LLaMA-3.1-8B, without a chat template.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
import re
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tca_jax.errors import UserError
from tca_jax.lab.evaluation.samples import DoesNotFit, Drawing, Mark, Prompt, Sample, Task, asked_with_lead
from tca_jax.lab.evaluation.sources import Words, parquet_file

_CONTROL = re.compile(r"[\x00-\x1f]")
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

# Scores.


def match_all(sample: Sample, text: str, protocol: str) -> Mark:
    """RULER's string_match_all: the share of references in the answer, case-insensitive."""
    hits = _hits(sample, text)
    return Mark(sum(hits) / len(hits), hits if sample.depths else ())


def match_part(sample: Sample, text: str, protocol: str) -> Mark:
    """RULER's string_match_part: whether any reference is in the answer."""
    return Mark(float(any(_hits(sample, text))))


def _hits(sample: Sample, text: str) -> tuple[bool, ...]:
    answer = _CONTROL.sub("\n", text.strip()).strip().lower()
    return tuple(reference.lower() in answer for reference in sample.references)


# Haystacks of the right size.

_AMPLE = 0.5  # of a length: if one sample takes no more, all fit
#: make(rng, size, index): sample `index` with a haystack of `size` pieces (sentences, words, documents).
Maker = Callable[[random.Random, int, int], Sample]


def draw_fitted(drawing: Drawing, name: str, make: Maker, *, new_tokens: int, least: int) -> list[Sample]:
    """Samples whose prompts under "prefix" fit the length with `new_tokens` of an answer; sizes are from `least` on."""

    def draw(size: int, index: int, purpose: str) -> Sample:
        return make(seeded(drawing, name, purpose, index), size, index)

    def tokens(sample: Sample) -> int:
        return len(sample.prompts["prefix"].encode(drawing.lm)) + new_tokens

    if drawing.only_check:
        if tokens(draw(least, 0, "sample")) > _AMPLE * drawing.length:
            needed = _least_length(drawing, name, make, tokens, least)
            if needed > drawing.length:
                raise DoesNotFit.too_short(name, drawing.length, needed, drawing.lm.name)
        return []
    size = largest(lambda size: tokens(draw(size, 0, f"size {size}")) <= drawing.length, least)
    samples = []
    for index in range(drawing.count):
        smaller = size or least
        while (needed := tokens(sample := draw(smaller, index, "sample"))) > drawing.length:
            if smaller == least:
                raise DoesNotFit.too_short(name, drawing.length, needed, drawing.lm.name)
            smaller = max(least, smaller - max(1, smaller // 100))
        samples.append(sample)
    return samples


def _least_length(drawing: Drawing, name: str, make: Maker, tokens: Callable[[Sample], int], size: int) -> int:
    """The first length, from the drawing's on, at which all samples with the least haystack fit."""
    length = drawing.length
    while True:
        there = dataclasses.replace(drawing, length=length)
        needed = max(tokens(make(seeded(there, name, "sample", index), size, index)) for index in range(drawing.count))
        if needed <= length:
            return length
        length = needed


def largest(fits: Callable[[int], bool], least: int) -> int | None:
    """The largest size from `least` on that fits; None if `least` does not."""
    if not fits(least):
        return None
    low, high = least, 2 * least
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def seeded(drawing: Drawing, *purpose: object) -> random.Random:
    """Random numbers that depend on the seed, the length and the purpose."""
    return random.Random("/".join(map(str, (drawing.seed, drawing.length, *purpose))))


# Needles in a haystack: sentences with magic values for keys.

_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_NEEDLE_DOCUMENT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}"
)
_NEEDLE_QUESTION = "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
_NEEDLE_LEAD = " The special magic {kind} for {query} mentioned in the provided text are"
#: Where needles may stand in an essay, in percent of its sentences.
_DEPTHS = tuple(round(100 * i / 39) for i in range(40))
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+")


@dataclasses.dataclass(frozen=True)
class Needles:
    """One of RULER's eight tasks."""

    name: str
    haystack: str  # "noise", "essay" or "needle"
    keys: str = "words"  # or "uuids"
    values: str = "numbers"  # or "uuids"
    num_keys: int = 1
    num_values: int = 1  # of each key
    num_queries: int = 1  # keys in the question

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of sources."""
        words = ("words",) if self.keys == "words" else ()
        return (*words, "essays") if self.haystack == "essay" else words

    def draw(self, drawing: Drawing, new_tokens: int) -> list[Sample]:
        """Samples; see `draw_fitted`."""
        essay = drawing.sources.essay_words if self.haystack == "essay" else []

        def make(rng: random.Random, size: int, index: int) -> Sample:
            return self._make(rng, size, drawing, essay)

        least = 1 if self.haystack == "essay" else self.num_needles
        return draw_fitted(drawing, self.name, make, new_tokens=new_tokens, least=least)

    @property
    def num_needles(self) -> int:
        """Needles in a haystack."""
        return max(self.num_keys, self.num_queries) * self.num_values

    def _make(self, rng: random.Random, size: int, drawing: Drawing, essay: Sequence[str]) -> Sample:
        def draw(kind: str) -> str:
            if kind == "words":
                return drawing.sources.words.draw_pair(rng)
            if kind == "numbers":
                return str(rng.randint(10**6, 10**7 - 1))
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))

        def needle(key: str, value: str) -> str:
            return _NEEDLE.format(kind=self.values, key=key, value=value)

        keys = [draw(self.keys) for _ in range(max(self.num_keys, self.num_queries))]
        values = [[draw(self.values) for _ in range(self.num_values)] for _ in keys]
        needles = [needle(key, value) for key, of_key in zip(keys, values, strict=True) for value in of_key]
        rng.shuffle(needles)
        if self.haystack == "essay":
            context = _hide_in_essay(rng, needles, essay, size)
        elif self.haystack == "noise":
            context = _hide_in_lines(rng, needles, [_NOISE] * size)
        else:
            context = _hide_in_lines(rng, needles, [needle(draw(self.keys), draw(self.values)) for _ in range(size)])
        asked = rng.sample(range(len(keys)), self.num_queries)
        return self._ask(context, [keys[i] for i in asked], [value for i in asked for value in values[i]])

    def _ask(self, context: str, keys: list[str], answers: list[str]) -> Sample:
        query = f"{', '.join(keys[:-1])}, and {keys[-1]}" if len(keys) > 1 else keys[0]
        parts, kind = [_NEEDLE_DOCUMENT, _NEEDLE_QUESTION, _NEEDLE_LEAD], self.values
        if len(answers) == 1:
            parts, kind = list(map(_singular, parts)), kind[:-1]
        document, question, lead = (part.format(kind=kind, query=query, context=context) for part in parts)
        depths = tuple(document.find(answer) / len(document) for answer in answers)
        return Sample(asked_with_lead(document, question, lead), tuple(answers), depths)


def _singular(template: str) -> str:
    return template.replace("Some", "A").replace("are all", "is").replace("are", "is")


def _hide_in_lines(rng: random.Random, needles: list[str], lines: list[str]) -> str:
    places = sorted(rng.sample(range(len(lines)), len(needles)), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines)


def _hide_in_essay(rng: random.Random, needles: list[str], essay: Sequence[str], size: int) -> str:
    """Needles between the sentences of the essay's first `size` words; a short essay is repeated."""
    words = [*essay] * -(-size // len(essay)) if size > len(essay) else essay
    sentences = _SENTENCE_END.split(" ".join(words[:size]).strip())
    places = sorted(int(len(sentences) * depth / 100) for depth in rng.sample(_DEPTHS, len(needles)))
    edges = [0, *places, len(sentences)]
    parts = []
    for i, needle in enumerate([*needles, None]):
        parts.append(" ".join(sentences[edges[i] : edges[i + 1]]))
        if needle is not None:
            parts.append(needle)
    return " ".join(parts)


# Variable tracking: a chain of assignments in noise, after a worked example.

_CHAIN_DOCUMENT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}"
_CHAIN_QUESTION = "\nQuestion: Find all variables that are assigned the value {query} in the text above."
_CHAIN_LEAD = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {query}, they are: "
)
_HOPS = 4
_LETTERS, _EXAMPLE_LETTERS = 5, 3
_EXAMPLE_TOKENS = 500


def draw_tracking(drawing: Drawing, name: str, new_tokens: int) -> list[Sample]:
    """Samples of "vt"; see `draw_fitted`."""
    noise = _example_noise(drawing)

    def make(rng: random.Random, size: int, index: int) -> Sample:
        document, question, lead, names = _chain(rng, size, _LETTERS)
        prompts = asked_with_lead(f"{_example(rng, noise)}\n{document}", question, lead)
        return Sample(prompts, tuple(names))

    return draw_fitted(drawing, name, make, new_tokens=new_tokens, least=_HOPS + 1)


def _example_noise(drawing: Drawing) -> int:
    """Lines of noise in the example of at most 500 tokens; the fewest if these are more."""

    def fits(size: int) -> bool:
        example = Prompt(_example(seeded(drawing, "vt", "example", size), size), "", chat=False)
        return len(example.encode(drawing.lm)) <= _EXAMPLE_TOKENS

    return largest(fits, _HOPS + 1) or _HOPS + 1


def _example(rng: random.Random, size: int) -> str:
    """A smaller task with its answer."""
    document, question, lead, names = _chain(rng, size, _EXAMPLE_LETTERS)
    return f"{document}{question}{lead} {' '.join(names)}\n"


def _chain(rng: random.Random, size: int, letters: int) -> tuple[str, str, str, list[str]]:
    """Document, question, first words of the answer, and the variables of the answer."""
    names: list[str] = []
    while len(names) <= _HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in (*names, "VAR"):
            names.append(name)
    value = str(rng.randrange(10000, 99999))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {after} = VAR {before} " for before, after in itertools.pairwise(names)]
    lines = [_NOISE] * size
    for i, place in enumerate(sorted(rng.sample(range(size), len(chain)))):
        lines.insert(place + i, chain[i])
    context = "\n".join(lines).replace(". \n", ".\n")
    templates = (_CHAIN_DOCUMENT, _CHAIN_QUESTION, _CHAIN_LEAD)
    document, question, lead = (part.format(context=context, query=value, count=len(names)) for part in templates)
    return document, question, lead, names


# Aggregation: the most common words of a numbered list and of a coded text.

_COMMON_DOCUMENT = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}"
)
_COMMON_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
_COMMON_LEAD = " Answer: The top 10 words that appear most often in the list are:"
_COMMON = 10
#: Repeats of (common, other) words in the example and in the list; fewer below `_SHORT` tokens.
_SHORT = 4096
_REPEATS_SHORT, _REPEATS = ((3, 1), (6, 1)), ((10, 3), (30, 3))
_EXAMPLE_WORDS_SHORT, _EXAMPLE_WORDS = 20, 40

_CODED_DOCUMENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}"
)
_CODED_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?"
)
_CODED_LEAD = " Answer: According to the coded text above, the three most frequently appeared words are:"
_CODED_LETTERS = 6
_ZETA_2 = math.pi**2 / 6  # normalises frequencies that fall with the square of the rank


def draw_common_words(drawing: Drawing, name: str, new_tokens: int) -> list[Sample]:
    """Samples of "cwe"; see `draw_fitted`."""
    words, short = drawing.sources.words, drawing.length < _SHORT
    example_repeats, repeats = _REPEATS_SHORT if short else _REPEATS
    example_words = _EXAMPLE_WORDS_SHORT if short else _EXAMPLE_WORDS

    def make(rng: random.Random, size: int, index: int) -> Sample:
        context, answer = _numbered(rng, words, example_words, *example_repeats)
        numbered = " ".join(f"{i}. {word}" for i, word in enumerate(answer, start=1))
        example = f"{_COMMON_DOCUMENT.format(context=context)}{_COMMON_QUESTION}{_COMMON_LEAD} {numbered}\n"
        context, answer = _numbered(rng, words, size, *repeats)
        document = example + _COMMON_DOCUMENT.format(context=context)
        return Sample(asked_with_lead(document, _COMMON_QUESTION, _COMMON_LEAD), tuple(answer))

    return draw_fitted(drawing, name, make, new_tokens=new_tokens, least=_COMMON + 1)


def _numbered(rng: random.Random, words: Words, count: int, repeats: int, other_repeats: int) -> tuple[str, list[str]]:
    """A list of `count` different words, each repeated, and the ten most common ones."""
    drawn = words.draw_distinct(rng, count)
    common, others = drawn[:_COMMON], drawn[_COMMON:]
    listed = common * repeats + others * other_repeats
    rng.shuffle(listed)
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, start=1)), common


def draw_frequent_words(drawing: Drawing, name: str, new_tokens: int) -> list[Sample]:
    """Samples of "fwe"; see `draw_fitted`."""
    vocabulary_size = max(6, (drawing.length - new_tokens) // 50)
    least = next(n for n in range(1, 1000) if _counts(n, 5)[3] > _counts(n, 5)[4] > 0)

    def make(rng: random.Random, size: int, index: int) -> Sample:
        words: set[str] = set()
        while len(words) < vocabulary_size:
            words.add("".join(rng.choices(string.ascii_lowercase, k=_CODED_LETTERS)))
        vocabulary = rng.sample(sorted(words), vocabulary_size)
        vocabulary[0] = "..."  # the most frequent one is noise
        counted = zip(vocabulary, _counts(size, vocabulary_size), strict=True)
        text = [word for word, count in counted for _ in range(count)]
        rng.shuffle(text)
        document = _CODED_DOCUMENT.format(context=" ".join(text))
        return Sample(asked_with_lead(document, _CODED_QUESTION, _CODED_LEAD), tuple(vocabulary[1:4]))

    return draw_fitted(drawing, name, make, new_tokens=new_tokens, least=least)


def _counts(words: int, vocabulary_size: int) -> list[int]:
    """Frequency of each word of a vocabulary in a text of about `words` words."""
    return [int(words / (rank**2 * _ZETA_2)) for rank in range(1, vocabulary_size + 1)]


# Question answering: SQuAD and HotpotQA with their paragraphs among others.

_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
_QA_DOCUMENT = f"{_INSTRUCTION}\n\nThe following are given documents.\n\n{{context}}"
_QA_QUESTION = f"\n\n{_INSTRUCTION}\n\nQuestion: {{query}}"
_QA_LEAD = " Answer:"


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about some documents of a file."""

    text: str
    answers: tuple[str, ...]  # any of these is right
    documents: tuple[int, ...]  # answer the question
    related: tuple[int, ...] = ()  # of the same article; precede those of other articles


@dataclasses.dataclass(frozen=True)
class Collection:
    """Questions and documents of a file."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]


def draw_questions(drawing: Drawing, name: str, source: str, new_tokens: int) -> list[Sample]:
    """Samples of "qa_1" ("squad") or "qa_2" ("hotpotqa"): question i of the file is sample i; see `draw_fitted`."""
    collection = read_collection(drawing.sources, source)
    if drawing.count > len(collection.questions):
        raise UserError(f"--samples {drawing.count}: --{source} has {len(collection.questions)} questions for {name}")
    least = max(len(question.documents) for question in collection.questions[: drawing.count])

    def make(rng: random.Random, size: int, index: int) -> Sample:
        question = collection.questions[index]
        context = _numbered_documents(_choose(rng, collection, question, size))
        document, asked = _QA_DOCUMENT.format(context=context), _QA_QUESTION.format(query=question.text)
        return Sample(asked_with_lead(document, asked, _QA_LEAD), question.answers)

    return draw_fitted(drawing, name, make, new_tokens=new_tokens, least=least)


@functools.lru_cache(maxsize=2)
def read_collection(sources: Any, source: str) -> Collection:
    """Reads a file in the form of SQuAD or HotpotQA."""
    read = {"squad": _read_squad, "hotpotqa": _read_hotpotqa}[source]
    try:
        collection = read(sources.json_of(source))
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        form = {"squad": "SQuAD 2.0", "hotpotqa": "HotpotQA (distractor)"}[source]
        raise UserError(f"--{source}: not of {form}'s form: {type(error).__name__}: {error}") from None
    if not collection.questions:
        raise UserError(f"--{source}: holds no question")
    return collection


def _read_squad(content: Any) -> Collection:
    paragraphs = [[paragraph["context"] for paragraph in article["paragraphs"]] for article in content["data"]]
    documents = sorted({text for article in paragraphs for text in article})
    number = {text: i for i, text in enumerate(documents)}
    questions = []
    for article, texts in zip(content["data"], paragraphs, strict=True):
        for paragraph in article["paragraphs"]:
            own = number[paragraph["context"]]
            related = tuple(number[text] for text in texts if number[text] != own)
            for entry in paragraph["qas"]:
                if not entry.get("is_impossible", False):
                    answers = tuple(answer["text"] for answer in entry["answers"])
                    questions.append(Question(entry["question"], answers, (own,), related))
    return Collection(tuple(questions), tuple(documents))


def _read_hotpotqa(content: Any) -> Collection:
    contexts = [[f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]] for entry in content]
    documents = sorted({text for context in contexts for text in context})
    number = {text: i for i, text in enumerate(documents)}
    questions = [
        Question(entry["question"], (entry["answer"],), tuple(number[text] for text in context))
        for entry, context in zip(content, contexts, strict=True)
    ]
    return Collection(tuple(questions), tuple(documents))


def _choose(rng: random.Random, collection: Collection, question: Question, size: int) -> list[str]:
    """The question's documents among others, in random order; all documents repeatedly if there are too few."""
    documents, own, related = collection.documents, list(question.documents), list(question.related)
    if size >= len(documents):
        chosen = (list(documents) * -(-size // len(documents)))[:size]
    else:
        wanted = size - len(own)
        if wanted > len(related):
            held = {*own, *related}
            others = [i for i in range(len(documents)) if i not in held]
            numbers = own + related + rng.sample(others, wanted - len(related))
        else:
            numbers = own + rng.sample(related, wanted)
        chosen = [documents[i] for i in numbers]
    rng.shuffle(chosen)
    return chosen


def _numbered_documents(documents: Sequence[str]) -> str:
    return "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(documents, start=1))


# The samples of kvpress's leaderboard.

_COLUMNS = ("context", "question", "answer_prefix", "answer", "task")


def _draw_stored(drawing: Drawing, task: str) -> list[Sample]:
    path = parquet_file(drawing.sources.kvpress, drawing.length)
    rows = [row for row in _read_rows(path) if row["task"] == task][: drawing.count]
    if not rows:
        raise UserError(f"--kvpress: {path} holds no sample of {task}")
    return [] if drawing.only_check else [_stored_sample(row, task) for row in rows]


def _stored_sample(row: Mapping[str, Any], task: str) -> Sample:
    document, answers = row["context"], tuple(row["answer"])
    placed = task.startswith("niah") and all(answer in document for answer in answers)
    depths = tuple(document.find(answer) / len(document) for answer in answers) if placed else ()
    return Sample(asked_with_lead(document, row["question"], row["answer_prefix"]), answers, depths)


@functools.lru_cache(maxsize=1)
def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError("kvpress's samples need pyarrow: pip install pyarrow") from None
    try:
        return parquet.read_table(path, columns=list(_COLUMNS)).to_pylist()
    except (ArrowException, OSError, KeyError) as error:
        raise UserError(f"--kvpress: {path} is not of the form of kvpress's samples: {error}") from None


def _needle_task(needles: Needles) -> Task:
    draw = functools.partial(needles.draw, new_tokens=128)
    return Task(needles.name, "ruler", 128, draw, match_all, needs=needles.needs)


_NEEDLES = (
    Needles("niah_single_1", "noise"),
    Needles("niah_single_2", "essay"),
    Needles("niah_single_3", "essay", values="uuids"),
    Needles("niah_multikey_1", "essay", num_keys=4),
    Needles("niah_multikey_2", "needle"),
    Needles("niah_multikey_3", "needle", keys="uuids", values="uuids"),
    Needles("niah_multivalue", "essay", num_values=4),
    Needles("niah_multiquery", "essay", num_queries=4),
)
TASKS = (
    *map(_needle_task, _NEEDLES),
    Task("vt", "ruler", 30, functools.partial(draw_tracking, name="vt", new_tokens=30), match_all),
    Task("cwe", "ruler", 120, functools.partial(draw_common_words, name="cwe", new_tokens=120), match_all, ("words",)),
    Task("fwe", "ruler", 50, functools.partial(draw_frequent_words, name="fwe", new_tokens=50), match_all),
    *(
        Task(
            name,
            "ruler",
            32,
            functools.partial(draw_questions, name=name, source=source, new_tokens=32),
            match_part,
            needs=(source,),
        )
        for name, source in (("qa_1", "squad"), ("qa_2", "hotpotqa"))
    ),
)
KVPRESS_TASKS = tuple(
    dataclasses.replace(
        task,
        name=f"kvpress_{task.name}",
        suite="kvpress",
        draw=functools.partial(_draw_stored, task=task.name),
        needs=("kvpress",),
    )
    for task in TASKS
)
