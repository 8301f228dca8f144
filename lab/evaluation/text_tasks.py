"""Loss of a text: inside it by position, and of its end over the cache of the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tca_jax.engine.contexts import prefill
from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import Encoder, encode_prompt
from tca_jax.engine.score import score, score_answers
from tca_jax.lab.equal_bytes import CallSizes
from tca_jax.lab.evaluation.samples import DoesNotFit, Drawing
from tca_jax.models.sharding import DATA, axis_size

#: Parts of a passage with a loss each.
POSITIONS = 16
_CONTINUED_TOKENS = 128  # at the end of a passage
_CONTINUED_SHARE = 8  # of a passage at most 1 / this part
_LEAST_TOKENS = 2 * POSITIONS


@dataclasses.dataclass(frozen=True)
class Reading:
    """Figures of passages of a text, and costs of the contexts before their ends, means."""

    samples: list[dict[str, Any]]  # of each passage
    values: dict[str, float]  # means of the samples
    kv_cache_bytes: float
    full_kv_cache_bytes: float  # under full attention
    attended_share: float  # of the passages' causal pairs
    kept_share: float  # of the contexts' tokens
    prefill_seconds: float


@dataclasses.dataclass(frozen=True)
class TextTask:
    """A task that measures passages of a text."""

    name: str = "loss"
    suite: str = "text"
    metric: str = "loss"  # the value in tables
    needs: tuple[str, ...] = ("text",)

    def draw(self, drawing: Drawing) -> list[list[int]]:
        """Passages spread evenly over the text; they overlap if it is short.

        Each begins with the tokenizer's first token, if any, as in training: without it sparse methods lose more.
        """
        ids = _encode_text(drawing.lm, drawing.sources.user_text)
        if drawing.length < _LEAST_TOKENS:
            raise DoesNotFit.too_short(self.name, drawing.length, _LEAST_TOKENS, drawing.lm.name)
        if drawing.length > len(ids):
            raise DoesNotFit(f"--lengths {drawing.length}: {self.name} needs at most {len(ids)}, the tokens of --text")
        begin = ids[:1] if ids[0] == getattr(drawing.lm.tokenizer, "bos_token_id", None) else []
        starts = np.linspace(0, len(ids) - drawing.length, drawing.count).astype(int)
        return [begin + ids[start + len(begin) : start + drawing.length] for start in starts.tolist()]

    def call_sizes(self, length: int) -> CallSizes:
        """Sizes of the context of a passage."""
        return CallSizes(length - _continued_tokens(length))

    def read(self, lm: LM, passages: Sequence[list[int]], report: Callable[[int], None]) -> Reading:
        """Measures all passages, one for each device on "data" at a time; losses in nats per token."""
        samples, stats, rows = [], [], axis_size(lm.mesh, DATA)
        count = _continued_tokens(len(passages[0]))
        for first in range(0, len(passages), rows):
            chosen = list(passages[first : first + rows])
            filled = chosen + [chosen[-1]] * (rows - len(chosen))
            documents, ends = [ids[:-count] for ids in filled], [[ids[-count:]] for ids in filled]
            stats.append(prefill(lm, documents).stats)
            behind, inside = score_answers(lm, documents, ends), score(lm, filled)
            for (after,), logprobs, share in zip(behind.logprobs, inside.logprobs, inside.attended_share, strict=True):
                by_position = [float(part.mean()) for part in np.array_split(-logprobs, POSITIONS)]
                losses = {"loss": float(-after.mean()), "loss_inside": float(-logprobs.mean())}
                samples.append({**losses, "by_position": by_position, "attended_share": float(share)})
            del samples[first + len(chosen) :]
            report(len(chosen))
        names = ("loss", "loss_inside", "attended_share")
        values = {name: float(np.mean([sample[name] for sample in samples])) for name in names}
        return Reading(
            samples=samples,
            attended_share=values.pop("attended_share"),
            values=values,
            kv_cache_bytes=float(np.mean([each.kv_cache_bytes for each in stats])) / rows,
            full_kv_cache_bytes=float(np.mean([each.full_kv_cache_bytes for each in stats])) / rows,
            kept_share=float(np.mean([each.kept_share for each in stats])),
            prefill_seconds=float(np.mean([each.prefill_seconds for each in stats])) / rows,
        )


_encoded: list[tuple[Any, str, list[int]]] = []  # tokenizer, text and ids of the last text


def _encode_text(lm: Encoder, text: str) -> list[int]:
    """Token ids of the text, kept for the next length."""
    if not (_encoded and _encoded[0][0] is lm.tokenizer and _encoded[0][1] == text):
        _encoded[:] = [(lm.tokenizer, text, encode_prompt(lm, text, "--text"))]
    return _encoded[0][2]


def _continued_tokens(length: int) -> int:
    """Tokens at the end of a passage that are measured over a context of the others."""
    return min(_CONTINUED_TOKENS, max(1, length // _CONTINUED_SHARE))


TASKS = (TextTask(),)
