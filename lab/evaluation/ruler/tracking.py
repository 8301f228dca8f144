"""RULER's variable tracking: a chain of assignments in noise, behind a worked example."""

from __future__ import annotations

import itertools
import random
import string

from tca_jax.lab.evaluation.ruler.fitting import draw_fitted, largest, seeded
from tca_jax.lab.evaluation.samples import Drawing, Prompt, Sample, asked_with_lead

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_DOCUMENT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}"
_QUESTION = "\nQuestion: Find all variables that are assigned the value {query} in the text above."
_LEAD = (
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
        document, question, lead, names = _task(rng, size, _LETTERS)
        prompts = asked_with_lead(f"{_example(rng, noise)}\n{document}", question, lead)
        return Sample(prompts, tuple(names))

    return draw_fitted(drawing, name, make, new_tokens=new_tokens, least=_HOPS + 1)


def _example_noise(drawing: Drawing) -> int:
    """Lines of noise in the example, which has at most 500 tokens; the fewest where these are more."""

    def fits(size: int) -> bool:
        example = Prompt(_example(seeded(drawing, "vt", "example", size), size), "", chat=False)
        return len(example.encode(drawing.lm)) <= _EXAMPLE_TOKENS

    return largest(fits, _HOPS + 1) or _HOPS + 1


def _example(rng: random.Random, size: int) -> str:
    """A smaller task with its answer."""
    document, question, lead, names = _task(rng, size, _EXAMPLE_LETTERS)
    return f"{document}{question}{lead} {' '.join(names)}\n"


def _task(rng: random.Random, size: int, letters: int) -> tuple[str, str, str, list[str]]:
    """Document, question, the answer's first words, and the variables that are the answer."""
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
    filled = (part.format(context=context, query=value, count=len(names)) for part in (_DOCUMENT, _QUESTION, _LEAD))
    document, question, lead = filled
    return document, question, lead, names
