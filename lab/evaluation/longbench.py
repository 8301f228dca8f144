"""LongBench-E (arXiv 2308.14508): its thirteen English data sets from a local folder."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tca_jax.engine.prompts import decode_tokens
from tca_jax.errors import UserError
from tca_jax.lab.evaluation.samples import Drawing, Mark, Prompt, Sample, Task
from tca_jax.lab.evaluation.sources import decode
from tca_jax.lab.recall.protocols import LATE_PREFIX

_LIBRARIES = ("rouge", "rapidfuzz")


def require_libraries() -> None:
    """ValueError unless the scorers' libraries are installed."""
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"LongBench's scores need {' and '.join(missing)}: pip install {' '.join(missing)}")


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

    A class whose name is part of the right one's does not count. As in LongBench's code, which removes from the list it
    iterates over, the class after such a one is skipped.
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


_ANSWER_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)
_ANSWER_ARTICLE = (
    "question based on the above article as concisely as you can, using a single phrase or sentence if possible. If "
    'the question cannot be answered based on the information in the article, write "unanswerable". If the question '
    'is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide any explanation.'
)
_PASSAGES = (
    f"{_ANSWER_PASSAGES}\n\nThe following are given passages.\n{{context}}",
    f"\n\n{_ANSWER_PASSAGES}\n\nQuestion: {{input}}",
    "\nAnswer:",
)
#: Longest text of each group, in LongBench's own count of words.
_GROUPS = {"0-4k": 4000, "4-8k": 8000, "8k+": None}
_FIELDS = ("input", "context", "answers", "length", "all_classes")


@dataclasses.dataclass(frozen=True)
class DataSet:
    """One data set."""

    name: str  # LongBench's
    template: tuple[str, str, str]  # up to the text, from there to the question's end, the answer's first words
    new_tokens: int  # most tokens of an answer
    score: Callable[[str, str, Sequence[str]], float]  # of answer, reference and all classes; in [0, 1]
    chat: bool = True  # use the chat template; prompts with examples do not
    first_line: bool = False  # only the answer's first line counts

    def draw(self, drawing: Drawing) -> list[Sample]:
        """The first samples of the file, cut in the middle to the length."""
        records = read_records(drawing.sources.longbench, self.name)[: drawing.count]
        return [] if drawing.only_check else [self._sample(drawing, record) for record in records]

    def _sample(self, drawing: Drawing, record: Mapping[str, Any]) -> Sample:
        before, after, lead = self.template
        # Questions may hold braces, which `format` leaves alone in what it fills in.
        document, question = before.format(context=record["context"]), after.format(input=record["input"])
        document, question = _cut_in_the_middle(drawing, document, question, lead, self.new_tokens)
        without = Prompt(document, question, chat=self.chat)
        given = dataclasses.replace(without, question=question + lead)
        prompts = {"prefix": given, "preamble": without, "late": without, LATE_PREFIX: given}
        return Sample(prompts, tuple(record["answers"]), source=(record["length"], record["all_classes"] or ()))

    def mark(self, sample: Sample, text: str, protocol: str) -> Mark:
        """The best score against any reference."""
        said = text.lstrip("\n").split("\n")[0] if self.first_line else text
        _, classes = sample.source
        return Mark(max((self.score(said, reference, classes) for reference in sample.references), default=0.0))

    def task(self) -> Task:
        """The task of the data set."""
        needs, stop = (f"longbench/{self.name}",), ("\n",) if self.name == "samsum" else ()
        return Task(self.name, "longbench", self.new_tokens, self.draw, self.mark, needs, stop, by_length)


def by_length(samples: Sequence[Sample], scores: Sequence[float]) -> dict[str, float]:
    """Mean scores in percent by group of text lengths; groups without texts are left out."""
    found: dict[str, list[float]] = {name: [] for name in _GROUPS}
    for sample, score in zip(samples, scores, strict=True):
        words, _ = sample.source
        found[next(name for name, most in _GROUPS.items() if most is None or words < most)].append(score)
    return {name: round(100 * float(np.mean(each)), 2) for name, each in found.items() if each}


def _cut_in_the_middle(drawing: Drawing, document: str, question: str, lead: str, new_tokens: int) -> tuple[str, str]:
    """Document and question that fit the length with an answer; the document loses its middle."""
    whole = Prompt(document, question + lead).encode(drawing.lm)
    excess = len(whole) + new_tokens - drawing.length
    if excess <= 0:
        return document, question
    ids = drawing.lm.tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
    # Text that is cut may take a token more at the seam.
    keep = len(ids) - excess - 4
    if keep < 2:
        raise UserError(f"length {drawing.length}: a question of LongBench with its answer takes more")
    half = keep // 2
    return decode_tokens(drawing.lm, ids[:half]) + decode_tokens(drawing.lm, ids[-half:]), question


@functools.lru_cache(maxsize=2)
def read_records(folder: Path | None, name: str) -> list[dict[str, Any]]:
    """Lines of a data set's file, `NAME_e.jsonl`."""
    path = Path(folder or "") / f"{name}_e.jsonl"
    if folder is None or not path.is_file():
        raise UserError(f"--longbench {folder}: has no {name}_e.jsonl; it must be LongBench's folder of data")
    records = []
    for number, line in enumerate(decode(path, "--longbench").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            records.append({field: record[field] for field in _FIELDS})
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"--longbench {path}, line {number}: not of LongBench's form: {type(error).__name__}: {error}"
            ) from None
    if not records:
        raise UserError(f"--longbench {path} holds no sample")
    return records


_CODE = ("Please complete the code given below. \n{context}", "{input}", "Next line of code:\n")

DATA_SETS = (
    DataSet(
        "qasper",
        (
            "You are given a scientific article and a question. Answer the question as concisely as you can, using a "
            "single phrase or sentence if possible. If the question cannot be answered based on the information in the "
            'article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or '
            '"unanswerable". Do not provide any explanation.\n\nArticle: {context}',
            f"\n\n Answer the {_ANSWER_ARTICLE}\n\nQuestion: {{input}}",
            "\n\nAnswer:",
        ),
        128,
        qa_f1,
    ),
    DataSet(
        "multifieldqa_en",
        (
            "Read the following text and answer briefly.\n\n{context}",
            "\n\nNow, answer the following question based on the above text, only give me the answer and do not output "
            "any other words.\n\nQuestion: {input}",
            "\nAnswer:",
        ),
        64,
        qa_f1,
    ),
    DataSet("hotpotqa", _PASSAGES, 32, qa_f1),
    DataSet("2wikimqa", _PASSAGES, 32, qa_f1),
    DataSet(
        "gov_report",
        (
            "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n"
            "{context}",
            "\n\nNow, write a one-page summary of the report.",
            "\n\nSummary:",
        ),
        512,
        rouge_l,
    ),
    DataSet(
        "multi_news",
        (
            "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}",
            "\n\nNow, write a one-page summary of all the news.",
            "\n\nSummary:",
        ),
        512,
        rouge_l,
    ),
    DataSet(
        "trec",
        (
            "Please determine the type of the question below. Here are some examples of questions.\n\n{context}",
            "\n{input}",
            "",
        ),
        64,
        classification,
        chat=False,
        first_line=True,
    ),
    DataSet(
        "triviaqa",
        (
            "Answer the question based on the given passage. Only give me the answer and do not output any other "
            "words. The following are some examples.\n\n{context}",
            "\n\n{input}",
            "",
        ),
        32,
        qa_f1,
        chat=False,
        first_line=True,
    ),
    DataSet(
        "samsum",
        (
            "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}",
            "\n\n{input}",
            "",
        ),
        128,
        rouge_l,
        chat=False,
        first_line=True,
    ),
    DataSet(
        "passage_count",
        (
            "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully "
            "read these paragraphs and determine how many unique paragraphs there are after removing duplicates. In "
            "other words, how many non-repeating paragraphs are there in total?\n\n{context}",
            "\n\nPlease enter the final count of unique paragraphs after removing duplicates. The output format should "
            "only contain the number, such as 1, 2, 3, and so on.",
            "\n\nThe final answer is: ",
        ),
        32,
        count,
    ),
    DataSet(
        "passage_retrieval_en",
        (
            "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the "
            "abstract is from.\n\n{context}",
            "\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph that the "
            'abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.',
            "\n\nThe answer is: ",
        ),
        32,
        retrieval,
    ),
    DataSet("lcc", _CODE, 64, code_similarity, chat=False),
    DataSet("repobench-p", _CODE, 64, code_similarity, chat=False),
)
TASKS = tuple(data_set.task() for data_set in DATA_SETS)
