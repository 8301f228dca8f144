"""Loss of a text by position, and agreement with full attention on what follows a text."""

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

#: Parts of a passage whose losses are told apart.
POSITIONS = 16
_CONTINUED_TOKENS = 128  # behind a passage; their logits are held for the whole vocabulary
_CONTINUED_SHARE = 8  # of a short passage at most this part
_LEAST_TOKENS = 2 * POSITIONS


@dataclasses.dataclass(frozen=True)
class Reading:
    """What was measured on passages of a text.

    Attributes:
        samples: Figures of each passage.
        values: Their means.
        kv_cache_bytes: Of the context behind a passage, mean.
        full_kv_cache_bytes: The same under full attention.
        attended_share: Share of a passage's causal pairs (query, key) that its queries attended to, mean: of all of it
            where its loss inside is measured, otherwise of what the context behind it was read from.
        kept_share: Share of the context's own tokens that the caches hold, mean.
        prefill_seconds: Of reading a passage, mean.
    """

    samples: list[dict[str, Any]]
    values: dict[str, float]
    kv_cache_bytes: float
    full_kv_cache_bytes: float
    attended_share: float
    kept_share: float
    prefill_seconds: float


@dataclasses.dataclass(frozen=True)
class TextTask:
    """A task that measures on passages of a text.

    Attributes:
        name: Its name.
        metric: The value that tables show, and its unit.
        measure: Measures passages of one length under a model's method: figures of each, an "attended_share" among
            them, and the context behind them.
        needs: Names of its sources.
    """

    name: str
    metric: str
    measure: Callable[[LM, list[list[int]]], tuple[list[dict[str, Any]], Context]]
    needs: tuple[str, ...] = ("text",)
    suite: str = "text"

    def draw(self, drawing: Drawing) -> list[list[int]]:
        """Passages of the text, spread over it evenly; they overlap where it is short.

        Each begins with the token that the tokenizer puts in front of a text, if it does: models were trained with it,
        and without it methods that attend to little lose more than they do in use.

        Raises:
            DoesNotFit: the text is shorter than one, or the length too short to be told apart by position.
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
        """Sizes of the context behind a passage."""
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


_encoded: list[tuple[Any, str, list[int]]] = []  # the last text: by what it was encoded, and its ids


def _encode_text(lm: Encoder, text: str) -> list[int]:
    """Token ids of the text, kept for the next length."""
    if not (_encoded and _encoded[0][0] is lm.tokenizer and _encoded[0][1] == text):
        _encoded[:] = [(lm.tokenizer, text, encode_prompt(lm, text, "--text"))]
    return _encoded[0][2]


def _continued_tokens(length: int) -> int:
    """Tokens at the end of a passage that are measured behind a context of the others."""
    return min(_CONTINUED_TOKENS, max(1, length // _CONTINUED_SHARE))


def _measure_loss(lm: LM, passages: list[list[int]]) -> tuple[list[dict[str, Any]], Context]:
    """Nats a token: inside a passage, by position, and of its last tokens where the ones before were read first."""
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
    """How the next-token distributions behind passages differ from full attention's, the same tokens being fed."""
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
    """Mean nats of the tokens that came."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1).mean(axis=(1, 2))


@jax.jit
def _compare(
    exact: Float32[Array, "B n V"], logits: Float32[Array, "B n V"]
) -> tuple[Float32[Array, " B"], Float32[Array, " B"]]:
    """Mean KL(exact || other) in nats, and how often the most probable token is the same."""
    p, q = jax.nn.log_softmax(exact), jax.nn.log_softmax(logits)
    same = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1).mean(axis=1), jnp.mean(same, axis=1, dtype=jnp.float32)


def _continue(lm: LM, passages: list[list[int]]) -> tuple[Float32[Array, "B n V"], list[list[int]], Context]:
    """Logits of the passages' last tokens, these tokens, and the context that was read before them."""
    rows, length = len(passages), len(passages[0])
    count = _continued_tokens(length)
    # The last token before them is fed with them: what follows it is the first that is measured.
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
    """Logits behind each of the appended tokens, in rows that all begin at one place."""
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
