"""Loss of a text by position, and agreement with full attention on the tokens that follow a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from tca_jax.engine.cache import CacheLayout, PagedCache, shared_and_own
from tca_jax.engine.contexts import Context, prefill
from tca_jax.engine.extend import align, extend, num_columns
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import CACHES, ROWS, OverMesh, on_host
from tca_jax.engine.prompts import Encoder, encode_prompt
from tca_jax.engine.score import score
from tca_jax.lab.equal_bytes import CallSizes
from tca_jax.lab.evaluation.samples import DoesNotFit, Drawing
from tca_jax.methods.full import BASELINE
from tca_jax.models.sharding import DATA, axis_size
from tca_jax.pallas_kernels.backends import Backend, resolve_backend
from tca_jax.programs import Program

#: Parts of a passage with a loss each.
POSITIONS = 16
_CONTINUED_TOKENS = 128  # after a passage; all their logits are held
_CONTINUED_SHARE = 8  # of a passage at most 1 / this part
_LEAST_TOKENS = 2 * POSITIONS


@dataclasses.dataclass(frozen=True)
class Reading:
    """Figures of passages of a text, and costs of the contexts before them, means."""

    samples: list[dict[str, Any]]  # of each passage
    values: dict[str, float]  # means of the samples
    kv_cache_bytes: float
    full_kv_cache_bytes: float  # under full attention
    attended_share: float  # of a passage if its loss inside is measured, otherwise of the context
    kept_share: float  # of the context's tokens
    prefill_seconds: float


@dataclasses.dataclass(frozen=True)
class TextTask:
    """A task that measures passages of a text."""

    name: str
    metric: str  # the value in tables
    # From passages of one length to figures of each, "attended_share" included, and the context before their end.
    measure: Callable[[LM, list[list[int]]], tuple[list[dict[str, Any]], Context]]
    needs: tuple[str, ...] = ("text",)
    suite: str = "text"

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
        return CallSizes(length - _continued_tokens(length) - 1)

    def read(self, lm: LM, passages: Sequence[list[int]], report: Callable[[int], None]) -> Reading:
        """Measures all passages, one for each device on "data" at a time."""
        samples, stats, rows = [], [], axis_size(lm.mesh, DATA)
        for first in range(0, len(passages), rows):
            chosen = list(passages[first : first + rows])
            figures, context = self.measure(lm, chosen + [chosen[-1]] * (rows - len(chosen)))
            samples += figures[: len(chosen)]
            stats.append(context.stats)
            report(len(chosen))
        names = [name for name, value in samples[0].items() if isinstance(value, float)]
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


def _measure_loss(lm: LM, passages: list[list[int]]) -> tuple[list[dict[str, Any]], Context]:
    """Nats per token inside passages, by position, and of their last tokens over a context of the others."""
    logits, continuations, context = _continue(lm, passages)
    after = on_host(_losses(logits, jnp.asarray(continuations)))
    figures = []
    scores = score(lm, passages)
    for one, logprobs, share in zip(after, scores.logprobs, scores.attended_share, strict=True):
        by_position = [float(part.mean()) for part in np.array_split(-logprobs, POSITIONS)]
        losses = {"loss": float(one), "loss_inside": float(-logprobs.mean()), "by_position": by_position}
        figures.append({**losses, "attended_share": share})
    return figures, context


def _measure_agreement(lm: LM, passages: list[list[int]]) -> tuple[list[dict[str, Any]], Context]:
    """Next-token distributions after passages compared with full attention's, teacher-forced."""
    logits, _, context = _continue(lm, passages)
    exact, _, _ = _continue(lm.with_method(BASELINE), passages)
    found = zip(*on_host(_compare(exact, logits)), np.asarray(context.attended_share), strict=True)
    figures = [
        {"top_1": float(same), "kl": float(divergence), "attended_share": float(share)}
        for divergence, same, share in found
    ]
    return figures, context


@jax.jit
def _losses(logits: Float32[Array, "B n V"], targets: Int[Array, "B n"]) -> Float32[Array, " B"]:
    """Mean nats of the target tokens."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1).mean(axis=(1, 2))


@jax.jit
def _compare(
    exact: Float32[Array, "B n V"], logits: Float32[Array, "B n V"]
) -> tuple[Float32[Array, " B"], Float32[Array, " B"]]:
    """Mean KL(exact || other) in nats, and how often the likeliest token is the same."""
    p, q = jax.nn.log_softmax(exact), jax.nn.log_softmax(logits)
    same = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1).mean(axis=1), jnp.mean(same, axis=1, dtype=jnp.float32)


def _continue(lm: LM, passages: list[list[int]]) -> tuple[Float32[Array, "B n V"], list[list[int]], Context]:
    """Logits of the passages' last tokens, these tokens, and the context before them."""
    rows, length = len(passages), len(passages[0])
    count = _continued_tokens(length)
    # The token before them is fed with them: it predicts the first measured token.
    documents, fed = ([passage[part] for passage in passages] for part in (slice(-count - 1), slice(-count - 1, -1)))
    context = prefill(lm, documents)
    b, starts = context.layout.block_size, np.full(rows, length - count - 1, np.int32)
    columns = num_columns(int(starts[0]) % b + count, b)
    tokens = align(np.array(fed, np.int32), starts, block_size=b, columns=columns)
    lengths = jnp.full(rows, count, jnp.int32)
    args = (lm.for_programs(), context.cache, jnp.asarray(tokens), jnp.asarray(starts), lengths, context.prompt_lengths)
    layout = lm.following_layout(context.layout.batch, length, columns)
    program, _ = _logits.prepare(*args, layout=layout, count=count, backend=resolve_backend("auto"))
    return program(*args), [passage[-count:] for passage in passages], context


def _logits_program(
    lm: LM,
    cache: PagedCache,
    tokens: Int[Array, "B S"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    prompt_lengths: Int[Array, " B"],
    *,
    layout: CacheLayout,
    count: int,
    backend: Backend,
) -> Float32[Array, "B n V"]:
    """Logits after each appended token, in rows that begin at one place."""
    first = (starts % cache.block_size)[0]
    shared, own = shared_and_own(cache, layout, starts)
    hidden = extend(lm, shared, own, tokens, starts, lengths, prompt_lengths, keep_hidden=True, backend=backend).hidden
    assert hidden is not None
    return lm.decoder.logits(jax.lax.dynamic_slice_in_dim(hidden, first, count, axis=1))


_logits = Program(OverMesh(_logits_program, (CACHES, ROWS, ROWS, ROWS, ROWS), ROWS))

TASKS = (
    TextTask("loss", "loss", _measure_loss),
    TextTask("agreement", "top_1", _measure_agreement),
)
