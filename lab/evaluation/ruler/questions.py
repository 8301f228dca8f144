"""RULER's question answering: SQuAD and HotpotQA with their paragraphs among others."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Any

from tca_jax.errors import UserError
from tca_jax.lab.evaluation.ruler.fitting import draw_fitted
from tca_jax.lab.evaluation.samples import Drawing, Sample, asked_with_lead

_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
_DOCUMENT = f"{_INSTRUCTION}\n\nThe following are given documents.\n\n{{context}}"
_QUESTION = f"\n\n{_INSTRUCTION}\n\nQuestion: {{query}}"
_LEAD = " Answer:"


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about some of the documents of a file.

    Attributes:
        text: The question.
        answers: Any of these is right.
        documents: Documents that answer it.
        related: Others of the same article, which come before those of other articles.
    """

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Collection:
    """Questions and documents of a file."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]


def draw_questions(drawing: Drawing, name: str, source: str, new_tokens: int) -> list[Sample]:
    """Samples of "qa_1" ("squad") or "qa_2" ("hotpotqa"): question i of the file is sample i; see `draw_fitted`.

    Raises:
        ValueError: the file is not of the data set's form, or has fewer questions.
    """
    collection = read_collection(drawing.sources, source)
    if drawing.count > len(collection.questions):
        raise UserError(f"--samples {drawing.count}: --{source} has {len(collection.questions)} questions for {name}")
    least = max(len(question.documents) for question in collection.questions[: drawing.count])

    def make(rng: random.Random, size: int, index: int) -> Sample:
        question = collection.questions[index]
        context = _numbered(_choose(rng, collection, question, size))
        document, asked = _DOCUMENT.format(context=context), _QUESTION.format(query=question.text)
        return Sample(asked_with_lead(document, asked, _LEAD), question.answers)

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
    """The question's documents among others, in random order; all again and again where there are not so many."""
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


def _numbered(documents: Sequence[str]) -> str:
    return "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(documents, start=1))
