"""LongBench-E (arXiv 2308.14508): its thirteen English data sets from a local folder."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tca_jax.engine.prompts import decode_tokens
from tca_jax.errors import explaining, require
from tca_jax.lab.evaluation.samples import Drawing, Mark, Prompt, Sample, Task, by_protocol
from tca_jax.lab.evaluation.sources import decode

_LIBRARIES = ("rouge", "rapidfuzz")


def require_libraries() -> None:
    """ValueError unless the scorers' libraries are installed."""
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    require(not missing, f"LongBench's scores need {' and '.join(missing)}: pip install {' '.join(missing)}")


def qa_f1(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """F1 over words, without case, punctuation and articles."""
    said, wanted = _normalised_words(prediction), _normalised_words(reference)
    common = (Counter(said) & Counter(wanted)).total()
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _normalised_words(text: str) -> list[str]:
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def rouge_l(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """F of ROUGE-L as the package `rouge` computes it; 0 without a sentence."""
    from rouge import Rouge

    try:
        return float(Rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):  # texts that are empty or too long
        return 0.0


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 over the number of classes in the answer, if the right one is among them.

    As in LongBench's code, the class after one whose name is part of the right one's is skipped.
    """
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)
    return 1 / len(named) if reference in named else 0.0


def retrieval(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """The share of the right paragraph's number among the numbers of the answer."""
    return count(prediction, re.findall(r"Paragraph (\d+)", reference)[0], classes)


def count(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """The share of the right number among the numbers of the answer."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """Similarity of the answer's first line of code, rounded to percent."""
    from rapidfuzz import fuzz

    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(fuzz.ratio(code, reference)) / 100


#: Longest text of each group, in LongBench's own count of words.
_GROUPS = {"0-4k": 4000, "4-8k": 8000, "8k+": None}
_FIELDS = ("input", "context", "answers", "length", "all_classes")


def by_length(samples: Sequence[Sample], scores: Sequence[float]) -> dict[str, float]:
    """Mean scores in percent by group of text lengths; groups without texts are left out."""
    found: dict[str, list[float]] = {name: [] for name in _GROUPS}
    for sample, score in zip(samples, scores, strict=True):
        words, _ = sample.source
        found[next(name for name, most in _GROUPS.items() if most is None or words < most)].append(score)
    return {name: round(100 * float(np.mean(each)), 2) for name, each in found.items() if each}


def _task(
    name: str,  # LongBench's
    new_tokens: int,  # most tokens of an answer
    score: Callable[[str, str, Sequence[str]], float],  # of answer, reference and all classes; in [0, 1]
    template: str,  # the document up to {context}, the question, and the answer's first words behind {lead}
    examples: bool = False,  # no chat template; of an answer the first line counts
) -> Task:
    before, _, rest = template.partition("{context}")
    after, _, lead = rest.partition("{lead}")
    chat = not examples and score is not code_similarity

    def draw(drawing: Drawing) -> list[Sample]:
        """The first samples of the file, cut in the middle to the length."""
        samples, records = [], read_records(drawing.sources.longbench, name)[: drawing.count]
        for record in [] if drawing.only_check else records:
            question = after.format(input=record["input"])
            document = _cut_in_the_middle(drawing, before + record["context"], question + lead, new_tokens)
            given, without = (Prompt(document, asked, chat=chat) for asked in (question + lead, question))
            source = record["length"], record["all_classes"] or ()
            samples.append(Sample(by_protocol(given, without), tuple(record["answers"]), source=source))
        return samples

    def mark(sample: Sample, text: str, protocol: str) -> Mark:
        """The best score against any reference."""
        said = text.lstrip("\n").split("\n")[0] if examples else text
        _, classes = sample.source
        return Mark(max((score(said, reference, classes) for reference in sample.references), default=0.0))

    stop = ("\n",) if name == "samsum" else ()
    return Task(name, "longbench", new_tokens, draw, mark, (f"longbench/{name}",), stop, by_length)


def _cut_in_the_middle(drawing: Drawing, document: str, question: str, new_tokens: int) -> str:
    """A document that with its question and an answer fits the length; it loses its middle."""
    excess = len(Prompt(document, question).encode(drawing.lm)) + new_tokens - drawing.length
    if excess <= 0:
        return document
    ids = drawing.lm.tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
    # Text that is cut may take a token more at the seam.
    half = (len(ids) - excess - 4) // 2
    require(half >= 1, f"length {drawing.length}: a question of LongBench with its answer takes more")
    return decode_tokens(drawing.lm, ids[:half]) + decode_tokens(drawing.lm, ids[-half:])


@functools.lru_cache(maxsize=2)
def read_records(folder: Path | None, name: str) -> list[dict[str, Any]]:
    """Lines of a data set's file, `NAME_e.jsonl`."""
    path = Path(folder or "") / f"{name}_e.jsonl"
    found = folder is not None and path.is_file()
    require(found, f"--longbench {folder}: has no {name}_e.jsonl; it must be LongBench's folder of data")
    records = []
    for number, line in enumerate(decode(path, "--longbench").splitlines(), start=1):
        where = f"--longbench {path}, line {number}: not of LongBench's form"
        with explaining(where, ValueError, TypeError, KeyError):
            record = json.loads(line) if line.strip() else None
            records += [{field: record[field] for field in _FIELDS}] if record is not None else []
    require(records, f"--longbench {path} holds no sample")
    return records


_ONLY = "nly give me the answer and do not output any other words."
_PASSAGES = (
    f"Answer the question based on the given passages. O{_ONLY}\n\nThe following are given passages.\n{{context}}\n\n"
    f"Answer the question based on the given passages. O{_ONLY}\n\nQuestion: {{input}}{{lead}}\nAnswer:"
)
_CONCISELY = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.'
)
_QASPER = (
    f"You are given a scientific article and a question. Answer the question {_CONCISELY}\n\nArticle: {{context}}\n\n "
    f"Answer the question based on the above article {_CONCISELY}\n\nQuestion: {{input}}{{lead}}\n\nAnswer:"
)
_MULTIFIELD = (
    "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the above "
    f"text, o{_ONLY}\n\nQuestion: {{input}}{{lead}}\nAnswer:"
)
_REPORT = (
    "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}\n\n"
    "Now, write a one-page summary of the report.{lead}\n\nSummary:"
)
_NEWS = (
    "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
    "Now, write a one-page summary of all the news.{lead}\n\nSummary:"
)
_TREC = "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}"
_TRIVIA = (
    f"Answer the question based on the given passage. O{_ONLY} The following are some examples.\n\n{{context}}\n\n"
    "{input}"
)
_DIALOGUE = (
    "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}"
)
_COUNT = (
    "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
    "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other words, "
    "how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of unique "
    "paragraphs after removing duplicates. The output format should only contain the number, such as 1, 2, 3, and so "
    "on.{lead}\n\nThe final answer is: "
)
_RETRIEVAL = (
    "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract is "
    "from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph that "
    'the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.{lead}\n\nThe answer is: '
)
_CODE = "Please complete the code given below. \n{context}{input}{lead}Next line of code:\n"

TASKS = (
    _task("qasper", 128, qa_f1, _QASPER),
    _task("multifieldqa_en", 64, qa_f1, _MULTIFIELD),
    _task("hotpotqa", 32, qa_f1, _PASSAGES),
    _task("2wikimqa", 32, qa_f1, _PASSAGES),
    _task("gov_report", 512, rouge_l, _REPORT),
    _task("multi_news", 512, rouge_l, _NEWS),
    _task("trec", 64, classification, _TREC, examples=True),
    _task("triviaqa", 32, qa_f1, _TRIVIA, examples=True),
    _task("samsum", 128, rouge_l, _DIALOGUE, examples=True),
    _task("passage_count", 32, count, _COUNT),
    _task("passage_retrieval_en", 32, retrieval, _RETRIEVAL),
    _task("lcc", 64, code_similarity, _CODE),
    _task("repobench-p", 64, code_similarity, _CODE),
)
