"""LongBench's scorers: of an answer against one reference, in [0, 1]."""

from __future__ import annotations

import importlib.util
import re
import string
from collections import Counter
from collections.abc import Sequence

from tca_jax.errors import UserError

_LIBRARIES = ("rouge", "rapidfuzz")


def require_libraries() -> None:
    """Raises ValueError unless the libraries of the scorers are installed."""
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"LongBench's scores need {' and '.join(missing)}: pip install 'tca-jax[lab]'")


def qa_f1(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """F1 over words, case, punctuation and articles aside."""
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
    """F of ROUGE-L, as the package `rouge` has it; 0 where one of the two holds no sentence."""
    from rouge import Rouge

    try:
        return float(Rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):  # what it raises of texts that are empty, or too long for it
        return 0.0


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that the answer names, if the right one is among them.

    A class whose name is part of the right one's does not count, but, as in LongBench's code, which removes from the
    list that it walks over, the one behind it is not looked at.
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
    """Similarity of the answer's first line of code, in whole percent."""
    from rapidfuzz import fuzz

    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(fuzz.ratio(code, reference)) / 100
