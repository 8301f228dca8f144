"""Loss of a text: inside it, and of its end over the cache of the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from tca_jax.engine.contexts import prefill
from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import encode_prompt
from tca_jax.engine.score import score, score_answers
from tca_jax.lab.evaluation.samples import DoesNotFit, Drawing, batches
from tca_jax.models.sharding import DATA, axis_size

_CONTINUED_TOKENS = 128  # at the end of a passage
_CONTINUED_SHARE = 8  # of a passage at most 1 / this part
_LEAST_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class TextTask:
    """A task that measures passages of a text."""

    protocols: ClassVar[tuple[str, ...]] = ("text",)
    name: str = "loss"
    suite: str = "text"
    needs: tuple[str, ...] = ("text",)

    def draw(self, drawing: Drawing) -> list[list[int]]:
        """Passages spread evenly over the text; they overlap if it is short."""
        ids = encode_prompt(drawing.lm, drawing.sources.user_text, "--text")
        if drawing.length < _LEAST_TOKENS:
            raise drawing.too_short(self.name, _LEAST_TOKENS)
        if drawing.length > len(ids):
            raise DoesNotFit(f"--lengths {drawing.length}: {self.name} needs at most {len(ids)}, the tokens of --text")
        # Each begins with the tokenizer's first token, as in training: without it sparse methods lose more.
        begin = ids[:1] if ids[0] == getattr(drawing.lm.tokenizer, "bos_token_id", None) else []
        starts = np.linspace(0, len(ids) - drawing.length, drawing.count).astype(int)
        return [begin + ids[start + len(begin) : start + drawing.length] for start in starts.tolist()]

    def prompt_tokens(self, lm: LM, samples: Sequence[list[int]], protocol: str) -> int:
        """Tokens of the context of a passage."""
        return len(samples[0]) - _continued_tokens(len(samples[0]))

    def measure(
        self, lm: LM, samples: Sequence[list[int]], protocol: str, batch: int, report: Callable[[int], None]
    ) -> dict[str, Any]:
        """Losses in nats per token; costs are means, bytes and kept share those of contexts before the ends."""
        found, stats, rows = list[dict[str, Any]](), [], axis_size(lm.mesh, DATA)
        count = _continued_tokens(len(samples[0]))
        for chosen, filled in batches(samples, rows):
            documents, ends = [ids[:-count] for ids in filled], [[ids[-count:]] for ids in filled]
            stats.append(prefill(lm, documents).stats)
            following, inside = score_answers(lm, documents, ends), score(lm, filled)
            each = zip(following.logprobs, inside.logprobs, inside.attended_share, strict=True)
            found += [
                {"loss": float(-after.mean()), "loss_inside": float(-logprobs.mean()), "attended_share": float(share)}
                for ((after,), logprobs, share), _ in zip(each, chosen, strict=False)
            ]
            report(len(chosen))
        values = {name: float(np.mean([sample[name] for sample in found])) for name in found[0]}
        attended = values.pop("attended_share")
        return {
            "metric": "loss",
            "score": values["loss"],
            "samples": found,
            "values": values,
            "attended_share": attended,
            "kv_cache_bytes": float(np.mean([each.kv_cache_bytes for each in stats])) / rows,
            "full_kv_cache_bytes": float(np.mean([each.full_kv_cache_bytes for each in stats])) / rows,
            "kept_share": float(np.mean([each.kept_share for each in stats])),
        }


def _continued_tokens(length: int) -> int:
    """Tokens at the end of a passage that are measured over a context of the others."""
    return min(_CONTINUED_TOKENS, max(1, length // _CONTINUED_SHARE))


TASKS = (TextTask(),)
