"""Log-probabilities of given text: `score` of texts, `score_answers` of answers to prompts and contexts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.engine.cache import require_memory
from tca_jax.engine.contexts import Context, Prompts
from tca_jax.engine.extend import align, feed, num_columns
from tca_jax.engine.lm import LM, require_lm
from tca_jax.engine.mesh import LAYER_WEIGHTS, ROWS, OverMesh, mean_of_devices, on_host, rows_of_device
from tca_jax.engine.prompts import Prompt, encode_continuation, encode_prompt, encode_prompts, pad_tokens
from tca_jax.engine.read import OUT, Calls, Layers, require_finite
from tca_jax.engine.sampling import pairs
from tca_jax.errors import check_integer, require
from tca_jax.models.decoder import Decoder
from tca_jax.pallas_kernels.backends import Backend, resolve_backend
from tca_jax.programs import Program

_LOGIT_ELEMENTS = 2**27  # of a chunk: half a gigabyte in float32


@dataclasses.dataclass(frozen=True)
class Scores:
    """Result of `score`, one entry a text.

    Attributes:
        tokens: Token ids, n of each text.
        logprobs: Natural log-probability of each token but the first, given all before it; float32 `[n - 1]`.
        attended_share: Share of the text's causal pairs (query, key) that its queries attended to, mean over layers
            and query heads.
        top_logprobs: At the position of each token but the first the likeliest tokens, as pairs (token id,
            log-probability), the likeliest first; None unless a number of them was asked for.
    """

    tokens: list[list[int]]
    logprobs: list[np.ndarray]
    attended_share: list[float]
    top_logprobs: list[list[list[tuple[int, float]]]] | None = None


def score(lm: LM, texts: Prompt | Sequence[Prompt], *, top_logprobs: int = 0, backend: str = "auto") -> Scores:
    """Log-probabilities of every token of a text, or of a batch of texts, in one forward pass.

    The model reads a text as it reads a prompt. A method that chooses tokens by a prompt's last queries has so chosen
    by the text's end, which an honest measure of its quality on a part of the text should bear in mind.

    Args:
        lm: From `tca_jax.load`; under any method.
        texts: Strings, chats or token ids; one or a sequence. From 2 tokens each to one more than the model has
            positions: the last token of such a text is not read.
        top_logprobs: How many of the likeliest tokens to return at each position.
        backend: Kernel backend: "auto", "xla", "triton" or "mosaic".

    Returns:
        Tokens and log-probabilities.

    Raises:
        ValueError: a text is too short or too long, or not allowed as a prompt; or the model computes NaN or infinity,
            with the layer.
        TypeError: `texts` holds what is no text.
    """
    require_lm(lm)
    kernels = resolve_backend(backend)
    check_integer("top_logprobs", top_logprobs, at_least=0, at_most=lm.config.vocab_size)
    ids = encode_prompts(lm, texts, argument="texts")
    most = lm.config.max_context + 1
    for i, n in enumerate(map(len, ids)):
        allowed = f"must have from 2 to {most}, one more than the positions of {lm.name}"
        require(2 <= n <= most, f"texts[{i}] has {n} tokens: {allowed}")
    rows_of_device(lm, len(ids), "texts")
    padded, lengths = pad_tokens(ids, lm.pad_token_id)
    calls, tokens, places = Calls(), jnp.asarray(padded), jnp.minimum(lengths, lm.config.max_context)
    layers = Layers(lm.for_programs(), tokens, places, places, None, calls, kernels)
    layers.run(None)
    given = lm.last_layer_params, layers.x, layers.out, tokens, layers.shares
    graphdef = lm.for_programs().layer_graphdef
    found = calls(_score, lm.without_layers(), *given, graphdef=graphdef, top=int(top_logprobs))
    logprobs, shares, likeliest = on_host(found)
    rows = [row[: len(tokens) - 1] for row, tokens in zip(logprobs, ids, strict=True)]
    require_finite(lm, padded, lengths, np.array([np.isfinite(row).all() for row in rows]), "texts")
    if likeliest is None:
        return Scores(ids, rows, shares.tolist())
    of_texts = zip(likeliest.ids, likeliest.logprobs, rows, strict=True)
    return Scores(ids, rows, shares.tolist(), [pairs(top, values, len(row)) for top, values, row in of_texts])


def _score_layers(
    lm: LM,  # without layers
    weights: Any,  # of the last layer
    x: Float[Array, "B L D"],
    out: Float[Array, "B L Hq d"],
    tokens: Int[Array, "B L"],
    shares: Float32[Array, " B"],
    *,
    graphdef: Any,
    top: int,
) -> tuple[Float32[Array, "B L1"], Float32[Array, " B"], Top | None]:
    """Log-probability of tokens 1 to L - 1 given all before each, arbitrary past a length; the share of each text's
    pairs that its queries attended to; and the `top` likeliest tokens at each position."""
    x = nnx.merge(graphdef, weights).after_attention(x, out)
    hidden = lm.decoder.final_norm(x[:, :-1])
    logprobs = scores_of_hidden(lm.decoder, hidden, tokens[:, 1:]).logprobs
    shares = mean_of_devices(shares, lm.head_shards) / lm.config.num_layers
    return logprobs, shares, _top_of_hidden(lm.decoder, hidden, top) if top else None


class TokenScores(NamedTuple):
    """A model's scores of tokens."""

    logprobs: Float32[Array, "*tokens"]  # natural log-probability of each
    greedy: Bool[Array, "*tokens"]  # whether no other token is likelier


class Top(NamedTuple):
    """The likeliest tokens at each position, the likeliest first."""

    ids: Int[Array, "*tokens top"]
    logprobs: Float32[Array, "*tokens top"]


def scores_of_hidden(decoder: Decoder, hidden: Float[Array, "B L D"], tokens: Int[Array, "B L"]) -> TokenScores:
    """Log-probability of tokens, each given the hidden state beside it, and whether greedy decoding picks it.

    Logits are made of a few positions at a time: those of all would outweigh the model.
    """

    def of_chunk(part: Array, start: Array) -> TokenScores:
        target = jax.lax.dynamic_slice_in_dim(tokens, start, part.shape[1], axis=1)
        return scores_of_logits(decoder.logits(part), target)

    return _by_chunks(decoder, hidden, of_chunk)


def _top_of_hidden(decoder: Decoder, hidden: Float[Array, "B L D"], top: int) -> Top:
    """The likeliest tokens after each hidden state."""

    def of_chunk(part: Array, _: Array) -> Top:
        logprobs, ids = jax.lax.top_k(jax.nn.log_softmax(decoder.logits(part)), top)
        return Top(ids, logprobs)

    return _by_chunks(decoder, hidden, of_chunk)


def _by_chunks(decoder: Decoder, hidden: Float[Array, "B L D"], function: Callable[[Array, Array], Any]) -> Any:
    """Applies a function to chunks of hidden states `[B, chunk, D]` and their starts, and joins the results."""
    batch, length, _ = hidden.shape
    chunk = max(1, min(length, _LOGIT_ELEMENTS // (batch * decoder.config.vocab_size)))

    def of_chunk(start: Array) -> Any:
        return function(jax.lax.dynamic_slice_in_dim(hidden, start, chunk, axis=1), start)

    # The last chunk reaches back over the one before instead of past the end.
    starts = np.minimum(np.arange(0, length, chunk), length - chunk)
    parts = jax.lax.map(of_chunk, jnp.asarray(starts, jnp.int32))
    out = jax.tree.map(lambda part: jnp.zeros((batch, length, *part.shape[3:]), part.dtype), parts)
    for i, start in enumerate(starts.tolist()):
        out = jax.tree.map(
            lambda whole, part, i=i, start=start: jax.lax.dynamic_update_slice_in_dim(whole, part[i], start, axis=1),
            out,
            parts,
        )
    return out


def scores_of_logits(logits: Float[Array, "*tokens V"], tokens: Int[Array, "*tokens"]) -> TokenScores:
    """Scores of tokens, each given by the logits beside it."""
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]
    return TokenScores(logprobs, jnp.argmax(logits, axis=-1) == tokens)


_score = Program(OverMesh(_score_layers, (LAYER_WEIGHTS, ROWS, OUT, ROWS, ROWS), (ROWS, ROWS, ROWS)))


@dataclasses.dataclass(frozen=True)
class AnswerScores:
    """Result of `score_answers`; entry `[i][j]` is about answer j to prompt i.

    Attributes:
        logprobs: Natural log-probability of each token of the answer, given the prompt and the tokens before it.
        greedy: Whether greedy decoding would say the answer, token for token.
    """

    logprobs: list[list[np.ndarray]]
    greedy: list[list[bool]]


def score_answers(
    lm: LM,
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[Prompt]],
    *,
    context: Context | None = None,
    backend: str = "auto",
) -> AnswerScores:
    """Log-probability of given answers, each prompt read once for all of its answers.

    A prompt is read, and its cache made, as `generate` does; an answer's tokens are fed as if they had been drawn. So
    both parts of a method take part, and nothing that the method chooses has seen the answer: unlike `score`, which
    reads a text and its end as one prompt.

    Args:
        lm: From `tca_jax.load`; under any method.
        prompts: Strings, chats or token ids; at least 1 token each.
        answers: As many answers to each prompt, at least 1: strings, which continue the prompt's text, or token ids.
            Of an answer's last token nothing is asked but its probability: it needs no position.
        context: From `tca_jax.prefill`, of one row: prompts are appended to it.
        backend: Kernel backend: "auto", "xla", "triton" or "mosaic".

    Raises:
        ValueError: prompts and answers do not match, one is not allowed or too long, or the context belongs to another
            model or method; raised before anything is compiled. Or the model computes NaN or infinity, with the layer.
        TypeError: an argument is of a wrong type.
    """
    kernels = resolve_backend(backend)
    counts = [len(of_prompt) for of_prompt in answers]
    same = len(prompts) == len(counts) and len(set(counts)) == 1 and all(counts)
    allowed = f"must have as many for each of the {len(prompts)} prompts, at least 1"
    require(same, f"answers has {counts} entries: {allowed}")
    times = counts[0]
    checked = Prompts.create(lm, prompts, context)
    held = 1 if checked.context is None else checked.context.batch
    require(held == 1, f"context has {held} rows: must have one, which all prompts share")
    rows = [
        _encode_answer(lm, answer, checked.before(i) + checked.ids[i], f"answers[{i}][{j}]")
        for i, of_prompt in enumerate(answers)
        for j, answer in enumerate(of_prompt)
    ]
    checked.require_positions(*(max(map(len, rows[i : i + times])) - 1 for i in range(0, len(rows), times)))
    logprobs, greedy = _score_rows(dataclasses.replace(checked, times=times), rows, kernels)
    return AnswerScores(
        [logprobs[i : i + times] for i in range(0, len(rows), times)],
        [greedy[i : i + times] for i in range(0, len(rows), times)],
    )


def _encode_answer(lm: LM, answer: Any, held: list[int], argument: str) -> list[int]:
    text = isinstance(answer, str | bytes) and len(answer)
    return encode_continuation(lm, answer, held, argument) if text else encode_prompt(lm, answer, argument)


def _score_rows(prompts: Prompts, answers: list[list[int]], backend: Backend) -> tuple[list[np.ndarray], list[bool]]:
    """Scores of each answer; those to one prompt side by side."""
    lm, b, calls, rest = prompts.lm, prompts.lm.method.cache.block_size, Calls(), None
    (given, lengths), held = pad_tokens(answers, lm.pad_token_id), prompts.row_lengths
    places = held % b
    if lengths.max() > 1:  # of a single token, what the prompt's last logits say is all
        prompts = dataclasses.replace(prompts, fed_tokens=num_columns(int(np.max(places + lengths)), b))
    require_memory(prompts.kv_cache_bytes, f"{len(answers)} answers to {len(prompts.ids)} prompts")
    begun = prompts.read(calls, backend)
    prompts.require_finite(on_host(jnp.isfinite(begun.logits).all(axis=-1)))
    first = calls(_score_logits, lm.without_layers(), begun.logits, jnp.asarray(given[:, 0]))
    if columns := prompts.fed_tokens:
        tokens = jnp.asarray(align(given, held, block_size=b, columns=columns))
        starts, counts = jnp.asarray(held), jnp.asarray(lengths)
        fed = feed(lm, begun.rows, tokens, starts, counts, calls, keep_hidden=True, backend=backend)
        rest = calls(_score_appended, lm.without_layers(), fed.hidden, tokens, starts, counts)
    first, rest = on_host((first, rest))
    return _joined(first, rest, places, answers)


def _joined(
    first: TokenScores, rest: TokenScores | None, places: Int[np.ndarray, " R"], answers: list[list[int]]
) -> tuple[list[np.ndarray], list[bool]]:
    """Scores of answers, from those of their first tokens and those of the others, which begin at `places`."""
    if rest is None:
        return [np.asarray(logprob)[None] for logprob in first.logprobs], first.greedy.tolist()
    logprobs = []
    for row, (place, answer) in enumerate(zip(places.tolist(), answers, strict=True)):
        others = rest.logprobs[row, place : place + len(answer) - 1]
        logprobs.append(np.concatenate([first.logprobs[row : row + 1], others]))
    return logprobs, (first.greedy & rest.greedy.all(axis=1)).tolist()


def _scores_of_first(lm: LM, logits: Float32[Array, "B V"], first: Int[Array, " R"]) -> TokenScores:
    """Scores of each answer's first token; R / B answers side by side belong to a prompt."""
    return scores_of_logits(jnp.repeat(logits, len(first) // len(logits), axis=0), first)


def scores_of_appended(
    lm: LM, hidden: Any, tokens: Int[Array, "B S"], starts: Int[Array, " B"], lengths: Int[Array, " B"]
) -> TokenScores:
    """Scores of appended tokens: in column c of the token in column c + 1, given all tokens up to column c.

    Args:
        lm: The model.
        hidden: `Fed.hidden`, `[B, S, D]`.
        tokens: Appended tokens, as `feed` takes them.
        starts: Tokens in the caches before, `[B]`.
        lengths: Appended tokens, `[B]`.

    Returns:
        Scores `[B, S - 1]`; 0.0 and True where one of the two columns has no new token.
    """
    place = jnp.arange(tokens.shape[1] - 1) - (starts % lm.method.cache.block_size)[:, None]
    both = (place >= 0) & (place + 1 < lengths[:, None])
    scores = scores_of_hidden(lm.decoder, hidden[:, :-1], tokens[:, 1:])
    return TokenScores(jnp.where(both, scores.logprobs, 0.0), scores.greedy | ~both)


_score_logits = Program(OverMesh(_scores_of_first, (ROWS, ROWS), ROWS))
_score_appended = Program(OverMesh(scores_of_appended, (ROWS,) * 4, ROWS))
