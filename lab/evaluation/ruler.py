"""RULER (arXiv 2404.06654): its thirteen tasks as NVIDIA/RULER defines them, drawn offline for any tokenizer."""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
import string
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tca_jax.errors import explaining, require
from tca_jax.lab.evaluation.samples import DoesNotFit, Drawing, Prompt, Sample, Task, by_protocol
from tca_jax.lab.evaluation.sources import Sources, load_words, read_json_file

_CONTROL = re.compile(r"[\x00-\x1f]")
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

# Scores.


def match_all(sample: Sample, text: str, protocol: str) -> float:
    """RULER's string_match_all: the share of references in the answer, case-insensitive."""
    answer = _CONTROL.sub("\n", text.strip()).strip().lower()
    return sum(reference.lower() in answer for reference in sample.references) / len(sample.references)


def match_part(sample: Sample, text: str, protocol: str) -> float:
    """RULER's string_match_part: whether any reference is in the answer."""
    return float(match_all(sample, text, protocol) > 0)


# Haystacks of the right size.

#: make(rng, size, index): sample `index` with a haystack of `size` pieces (sentences, words, documents).
Maker = Callable[[random.Random, int, int], Sample]


def _task(
    name: str,
    new_tokens: int,
    haystack: Callable[[Drawing], tuple[int, Maker]],  # the least size of a haystack, and the maker of samples
    needs: tuple[str, ...] = (),
    score: Callable[[Sample, str, str], float] = match_all,
) -> Task:
    """A task whose prompts under "prefix" fit the length with `new_tokens` of an answer."""

    def draw(drawing: Drawing) -> list[Sample]:
        least, make = haystack(drawing)

        def made(size: int, index: int, purpose: str = "sample") -> Sample:
            return make(_seeded(drawing.seed, drawing.length, name, purpose, index), size, index)

        def tokens(sample: Sample) -> int:
            return len(sample.prompts["prefix"].encode(drawing.lm)) + new_tokens

        size = largest(lambda size: tokens(made(size, 0, f"size {size}")) <= drawing.length, least) or least
        samples = []
        for index in range(drawing.count):
            smaller = size
            while (needed := tokens(sample := made(smaller, index))) > drawing.length:
                if smaller == least:
                    raise drawing.too_short(name, needed)
                smaller = max(least, smaller - max(1, smaller // 100))
            samples.append(sample)
        return samples

    return Task(name, "ruler", new_tokens, draw, score, needs)


def _sample(parts: Sequence[str], answers: Sequence[str], **fields: object) -> Sample:
    """A sample from templates of document, question and lead."""
    document, question, lead = (part.format(**fields) for part in parts)
    return Sample(by_protocol(Prompt(document, question, lead), Prompt(document, question)), tuple(answers))


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


def _seeded(*purpose: object) -> random.Random:
    return random.Random("/".join(map(str, purpose)))


# Needles in a haystack: sentences with magic values for keys.

_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_NEEDLE_PARTS = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}",
    "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text are",
)
#: Where needles may stand in an essay, in percent of its sentences.
_DEPTHS = tuple(round(100 * i / 39) for i in range(40))
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+")


def _needles(
    name: str,
    haystack: str,  # "noise", "essay" or "needle"
    *,
    keys: str = "words",  # or "uuids"
    values: str = "numbers",  # or "uuids"
    num_keys: int = 1,
    num_values: int = 1,  # of each key
    num_queries: int = 1,  # keys in the question
) -> Task:
    """One of RULER's eight tasks with needles."""
    num_keys = max(num_keys, num_queries)

    def haystack_of(drawing: Drawing) -> tuple[int, Maker]:
        essay = drawing.sources.essay_words if haystack == "essay" else []

        def draw(rng: random.Random, kind: str) -> str:
            if kind == "words":
                return f"{rng.choice(load_words().adjectives)}-{rng.choice(load_words().nouns)}"
            if kind == "numbers":
                return str(rng.randint(10**6, 10**7 - 1))
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))

        def needle(key: str, value: str) -> str:
            return _NEEDLE.format(kind=values, key=key, value=value)

        def make(rng: random.Random, size: int, index: int) -> Sample:
            drawn = [draw(rng, keys) for _ in range(num_keys)]
            of_keys = [[draw(rng, values) for _ in range(num_values)] for _ in drawn]
            needles = [needle(key, value) for key, of_key in zip(drawn, of_keys, strict=True) for value in of_key]
            rng.shuffle(needles)
            if haystack == "essay":
                context = _hide_in_essay(rng, needles, essay, size)
            else:
                noise = haystack == "noise"
                lines = [_NOISE if noise else needle(draw(rng, keys), draw(rng, values)) for _ in range(size)]
                for place, line in zip(sorted(rng.sample(range(size), len(needles)))[::-1], needles, strict=True):
                    lines.insert(place, line)
                context = "\n".join(lines)
            asked = rng.sample(range(num_keys), num_queries)
            answers, kind = [value for i in asked for value in of_keys[i]], values
            parts: tuple[str, ...] = _NEEDLE_PARTS
            if len(answers) == 1:
                parts = tuple(part.replace("Some", "A").replace("are all", "is").replace("are", "is") for part in parts)
                kind = kind[:-1]
            *first, last = (drawn[i] for i in asked)
            query = f"{', '.join(first)}, and {last}" if first else last
            return _sample(parts, answers, kind=kind, query=query, context=context)

        return 1 if haystack == "essay" else num_keys * num_values, make

    needs = (*(("words",) if keys == "words" else ()), *(("essays",) if haystack == "essay" else ()))
    return _task(name, 128, haystack_of, needs)


def _hide_in_essay(rng: random.Random, needles: list[str], essay: Sequence[str], size: int) -> str:
    """Needles between the sentences of the essay's first `size` words; a short essay is repeated."""
    words = [*essay] * -(-size // len(essay)) if size > len(essay) else essay
    sentences = _SENTENCE_END.split(" ".join(words[:size]).strip())
    places = sorted(int(len(sentences) * depth / 100) for depth in rng.sample(_DEPTHS, len(needles)))
    parts, start = [], 0
    for place, needle in zip(places, needles, strict=True):
        parts += [" ".join(sentences[start:place]), needle]
        start = place
    return " ".join([*parts, " ".join(sentences[start:])])


# Variable tracking: a chain of assignments in noise, after a worked example.

_CHAIN_PARTS = (
    "{example}Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}",
    "\nQuestion: Find all variables that are assigned the value {query} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {query}, they are: ",
)
_HOPS = 4
_LETTERS, _EXAMPLE_LETTERS = 5, 3
_EXAMPLE_TOKENS = 500


def _tracking(drawing: Drawing) -> tuple[int, Maker]:
    def example(rng: random.Random, size: int) -> str:
        """A smaller task with its answer."""
        fields, names = _chain(rng, size, _EXAMPLE_LETTERS)
        return f"{''.join(_CHAIN_PARTS).format(example='', **fields)} {' '.join(names)}\n"

    def fits(size: int) -> bool:
        text = example(_seeded(drawing.seed, drawing.length, "vt", "example", size), size)
        return len(Prompt(text, "", chat=False).encode(drawing.lm)) <= _EXAMPLE_TOKENS

    noise = largest(fits, _HOPS + 1) or _HOPS + 1

    def make(rng: random.Random, size: int, index: int) -> Sample:
        fields, names = _chain(rng, size, _LETTERS)
        return _sample(_CHAIN_PARTS, names, example=f"{example(rng, noise)}\n", **fields)

    return _HOPS + 1, make


def _chain(rng: random.Random, size: int, letters: int) -> tuple[dict[str, object], list[str]]:
    """Fields of `_CHAIN_PARTS`, and the variables of the answer."""
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
    return {"context": context, "query": value, "count": len(names)}, names


# Aggregation: the most common words of a numbered list and of a coded text.

_COMMON_PARTS = (
    "{example}Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
    "that appear most often.\n{context}",
    "\nQuestion: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
)
_COMMON = 10
_SHORT = 4096  # tokens, below which there are fewer words
#: Words of the example, and repeats of (common, other) words in it and in the list.
_COUNTS_SHORT, _COUNTS = (20, (3, 1), (6, 1)), (40, (10, 3), (30, 3))


def _common_words(drawing: Drawing) -> tuple[int, Maker]:
    example_words, example_repeats, repeats = _COUNTS_SHORT if drawing.length < _SHORT else _COUNTS

    def numbered(words: Sequence[str]) -> str:
        return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))

    def listed(rng: random.Random, count: int, repeats: tuple[int, int]) -> tuple[str, list[str]]:
        """A list of `count` different words, each repeated, and the ten most common ones."""
        drawn = load_words().draw_distinct(rng, count)
        words = drawn[:_COMMON] * repeats[0] + drawn[_COMMON:] * repeats[1]
        rng.shuffle(words)
        return numbered(words), drawn[:_COMMON]

    def make(rng: random.Random, size: int, index: int) -> Sample:
        context, answer = listed(rng, example_words, example_repeats)
        example = f"{''.join(_COMMON_PARTS).format(example='', context=context)} {numbered(answer)}\n"
        context, answer = listed(rng, size, repeats)
        return _sample(_COMMON_PARTS, answer, example=example, context=context)

    return _COMMON + 1, make


_CODED_PARTS = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}",
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
)
_CODED_LETTERS = 6
_CODED_TOKENS = 50  # of an answer
_ZETA_2 = math.pi**2 / 6  # normalises frequencies that fall with the square of the rank


def _frequent_words(drawing: Drawing) -> tuple[int, Maker]:
    vocabulary_size = max(6, (drawing.length - _CODED_TOKENS) // 50)

    def counts(words: int, vocabulary_size: int = vocabulary_size) -> list[int]:
        """Frequency of each word of a vocabulary in a text of about `words` words."""
        return [int(words / (rank**2 * _ZETA_2)) for rank in range(1, vocabulary_size + 1)]

    def make(rng: random.Random, size: int, index: int) -> Sample:
        words: set[str] = set()
        while len(words) < vocabulary_size:
            words.add("".join(rng.choices(string.ascii_lowercase, k=_CODED_LETTERS)))
        vocabulary = rng.sample(sorted(words), vocabulary_size)
        vocabulary[0] = "..."  # the most frequent one is noise
        text = [word for word, count in zip(vocabulary, counts(size), strict=True) for _ in range(count)]
        rng.shuffle(text)
        return _sample(_CODED_PARTS, vocabulary[1:4], context=" ".join(text))

    return next(n for n in range(1, 1000) if counts(n, 5)[3] > counts(n, 5)[4] > 0), make


# Question answering: SQuAD and HotpotQA with their paragraphs among others.

_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
_QA_PARTS = (
    f"{_INSTRUCTION}\n\nThe following are given documents.\n\n{{context}}",
    f"\n\n{_INSTRUCTION}\n\nQuestion: {{query}}",
    " Answer:",
)


class Question(NamedTuple):
    """A question about some documents of a file."""

    text: str
    answers: tuple[str, ...]  # any of these is right
    documents: tuple[str, ...]  # answer the question
    related: tuple[str, ...] = ()  # of the same article; precede those of other articles


def _questions(drawing: Drawing, name: str, source: str) -> tuple[int, Maker]:
    """Question i of the file is sample i."""
    if getattr(drawing.sources, source) is None:
        raise DoesNotFit(f"{name}: needs --{source} FILE")
    questions, documents = _read_collection(drawing.sources, source)
    enough = drawing.count <= len(questions)
    require(enough, f"--samples {drawing.count}: --{source} has {len(questions)} questions for {name}")

    def make(rng: random.Random, size: int, index: int) -> Sample:
        question = questions[index]
        chosen = _choose(rng, documents, question, size)
        context = "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(chosen, start=1))
        return _sample(_QA_PARTS, question.answers, context=context, query=question.text)

    return max(len(question.documents) for question in questions[: drawing.count]), make


@functools.lru_cache(maxsize=2)
def _read_collection(sources: Sources, source: str) -> tuple[list[Question], list[str]]:
    """Questions and documents of a file in the form of SQuAD or HotpotQA."""
    read, form = {"squad": (_read_squad, "SQuAD 2.0"), "hotpotqa": (_read_hotpotqa, "HotpotQA (distractor)")}[source]
    content = read_json_file(getattr(sources, source), f"--{source}")
    with explaining(f"--{source}: not of {form}'s form", KeyError, TypeError, IndexError, AttributeError):
        questions = read(content)
    require(questions, f"--{source}: holds no question")
    return questions, sorted({text for question in questions for text in (*question.documents, *question.related)})


def _read_squad(content: Any) -> list[Question]:
    questions = []
    for article in content["data"]:
        texts = [paragraph["context"] for paragraph in article["paragraphs"]]
        for own, paragraph in zip(texts, article["paragraphs"], strict=True):
            related = tuple(text for text in texts if text != own)
            for entry in paragraph["qas"]:
                if not entry.get("is_impossible", False):
                    answers = tuple(answer["text"] for answer in entry["answers"])
                    questions.append(Question(entry["question"], answers, (own,), related))
    return questions


def _read_hotpotqa(content: Any) -> list[Question]:
    questions = []
    for entry in content:
        documents = tuple(f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"])
        questions.append(Question(entry["question"], (entry["answer"],), documents))
    return questions


def _choose(rng: random.Random, documents: Sequence[str], question: Question, size: int) -> list[str]:
    """The question's documents among others, in random order; all documents repeatedly if there are too few."""
    own, related = list(question.documents), list(question.related)
    wanted = size - len(own)
    if size >= len(documents):
        chosen = (list(documents) * -(-size // len(documents)))[:size]
    elif wanted > len(related):
        held = {*own, *related}
        others = [document for document in documents if document not in held]
        chosen = own + related + rng.sample(others, wanted - len(related))
    else:
        chosen = own + rng.sample(related, wanted)
    rng.shuffle(chosen)
    return chosen


TASKS = (
    _needles("niah_single_1", "noise"),
    _needles("niah_single_2", "essay"),
    _needles("niah_single_3", "essay", values="uuids"),
    _needles("niah_multikey_1", "essay", num_keys=4),
    _needles("niah_multikey_2", "needle"),
    _needles("niah_multikey_3", "needle", keys="uuids", values="uuids"),
    _needles("niah_multivalue", "essay", num_values=4),
    _needles("niah_multiquery", "essay", num_queries=4),
    _task("vt", 30, _tracking),
    _task("cwe", 120, _common_words, ("words",)),
    _task("fwe", _CODED_TOKENS, _frequent_words),
    *(
        _task(name, 32, functools.partial(_questions, name=name, source=source), (source,), match_part)
        for name, source in (("qa_1", "squad"), ("qa_2", "hotpotqa"))
    ),
)
