"""LongBench-E's tasks: prompts, lengths of answers, truncation in the middle, and scores by length of the text."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tca_jax.engine.prompts import decode_tokens
from tca_jax.errors import UserError
from tca_jax.lab.evaluation.longbench import scores
from tca_jax.lab.evaluation.samples import Drawing, Mark, Prompt, Sample, Task
from tca_jax.lab.evaluation.sources import decode
from tca_jax.lab.recall.protocols import LATE_PREFIX

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
    """One data set.

    Attributes:
        name: LongBench's name of it.
        template: The prompt: up to the text, from there to the question's end, and the first words of the answer that
            close it.
        new_tokens: Most tokens of an answer.
        score: Of an answer against one reference, with all classes of the data set; in [0, 1].
        chat: Whether it goes into a chat template; examples of answers do not.
        first_line: Whether the answer's first line alone counts.
    """

    name: str
    template: tuple[str, str, str]
    new_tokens: int
    score: Callable[[str, str, Sequence[str]], float]
    chat: bool = True
    first_line: bool = False

    def draw(self, drawing: Drawing) -> list[Sample]:
        """The first samples of the file, cut in the middle to the length.

        Raises:
            ValueError: the folder has no such file, or a line of it is not of LongBench's form.
        """
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
        return Task(
            name=self.name,
            suite="longbench",
            new_tokens=self.new_tokens,
            draw=self.draw,
            score=self.mark,
            needs=(f"longbench/{self.name}",),
            stop=("\n",) if self.name == "samsum" else (),
            groups=by_length,
        )


def by_length(samples: Sequence[Sample], scores: Sequence[float]) -> dict[str, float]:
    """Mean scores in percent of the texts of each group that has any."""
    found: dict[str, list[float]] = {name: [] for name in _GROUPS}
    for sample, score in zip(samples, scores, strict=True):
        words, _ = sample.source
        found[next(name for name, most in _GROUPS.items() if most is None or words < most)].append(score)
    return {name: round(100 * float(np.mean(each)), 2) for name, each in found.items() if each}


def _cut_in_the_middle(drawing: Drawing, document: str, question: str, lead: str, new_tokens: int) -> tuple[str, str]:
    """Document and question whose tokens, with the answer's, fit the length: the document's middle is left out."""
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
    """Lines of a data set's file, `NAME_e.jsonl`.

    Raises:
        ValueError: no such file, or a line is not of LongBench's form.
    """
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


def require_libraries() -> None:
    """Raises ValueError, which says what to install, unless the scorers' libraries are there."""
    scores.require_libraries()


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
        scores.qa_f1,
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
        scores.qa_f1,
    ),
    DataSet("hotpotqa", _PASSAGES, 32, scores.qa_f1),
    DataSet("2wikimqa", _PASSAGES, 32, scores.qa_f1),
    DataSet(
        "gov_report",
        (
            "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n"
            "{context}",
            "\n\nNow, write a one-page summary of the report.",
            "\n\nSummary:",
        ),
        512,
        scores.rouge_l,
    ),
    DataSet(
        "multi_news",
        (
            "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}",
            "\n\nNow, write a one-page summary of all the news.",
            "\n\nSummary:",
        ),
        512,
        scores.rouge_l,
    ),
    DataSet(
        "trec",
        (
            "Please determine the type of the question below. Here are some examples of questions.\n\n{context}",
            "\n{input}",
            "",
        ),
        64,
        scores.classification,
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
        scores.qa_f1,
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
        scores.rouge_l,
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
        scores.count,
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
        scores.retrieval,
    ),
    DataSet("lcc", _CODE, 64, scores.code_similarity, chat=False),
    DataSet("repobench-p", _CODE, 64, scores.code_similarity, chat=False),
)
TASKS = tuple(data_set.task() for data_set in DATA_SETS)
