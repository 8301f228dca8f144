"""Log-probabilities of given text: `score` of texts, `score_answers` of answers to prompts and contexts."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.engine.cache import require_memory
from tca_jax.engine.contexts import Context
from tca_jax.engine.extend import Where, aligned, feed, num_columns
from tca_jax.engine.lm import LM, require_lm
from tca_jax.engine.mesh import ROWS, WEIGHTS, OverMesh, mean_of_devices, on_host, rows_of_device
from tca_jax.engine.prompt_rows import Prompts
from tca_jax.engine.prompts import (
    Prompt,
    encode_continuation,
    encode_prompt,
    encode_prompts,
    is_chat,
    is_single,
    pad_tokens,
)
from tca_jax.engine.read import OUT, Calls, Layers, require_finite
from tca_jax.engine.sampling import pairs
from tca_jax.errors import UserTypeError, check_integer, require, require_type
from tca_jax.models.decoder import Decoder
from tca_jax.pallas_kernels.backends import Backend
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
    kernels = lm.kernels(backend)
    check_integer("top_logprobs", top_logprobs, at_least=0, at_most=lm.config.vocab_size)
    ids = encode_prompts(lm, texts, argument="texts")
    most = lm.config.max_context + 1
    for i, n in enumerate(map(len, ids)):
        allowed = f"must have from 2 to {most}, one more than the positions of {lm.name}"
        require(2 <= n <= most, f"texts[{i}] has {n} tokens: {allowed}")
    rows_of_device(lm, len(ids), "texts")
    tokens, lengths = pad_tokens(ids, lm.pad_token_id)
    places = np.minimum(lengths, lm.config.max_context)
    layers = Layers(lm.for_programs, tokens, places, places, None, Calls(), kernels)
    layers.run(None)
    (logprobs, _, top), shares = on_host(layers.finish(_score_texts_program, tokens, top=int(top_logprobs)))
    rows = [row[: len(tokens) - 1] for row, tokens in zip(logprobs, ids, strict=True)]
    require_finite(lm, np.array([np.isfinite(row).all() for row in rows]), "texts", ids.__getitem__)
    likeliest = top and [pairs(best, values, len(row)) for best, values, row in zip(*top, rows, strict=True)]
    return Scores(ids, rows, shares.tolist(), likeliest)


def _score_texts(
    lm: LM,  # without layers
    weights: Any,  # of the last layer
    x: Float[Array, "B L D"],
    out: Float[Array, "B L Hq d"],
    tokens: Int[Array, "B L"],
    shares: Float32[Array, " B"],
    *,
    top: int,
) -> tuple[TokenScores, Float32[Array, " B"]]:
    """Scores of tokens 1 to L - 1, arbitrary past a length, and attended shares."""
    hidden = lm.decoder.final_norm(lm.layer(weights).after_attention(x, out)[:, :-1])
    shares = mean_of_devices(shares, lm.head_shards) / lm.config.num_layers
    return scores_of_hidden(lm.decoder, hidden, tokens[:, 1:], top), shares


class TokenScores(NamedTuple):
    """A model's scores of tokens, each given those before it."""

    logprobs: Float32[Array, "*tokens"]  # natural log-probability of each
    greedy: Bool[Array, "*tokens"]  # whether no other token is likelier
    # Ids and log-probabilities of the likeliest tokens at each position, the likeliest first; None unless asked for.
    top: tuple[Int[Array, "*tokens n"], Float32[Array, "*tokens n"]] | None = None


def scores_of_hidden(
    decoder: Decoder, hidden: Float[Array, "B L D"], tokens: Int[Array, "B L"], top: int = 0
) -> TokenScores:
    """Scores of tokens, each given the hidden state beside it; by chunks, since all logits would outweigh the model."""
    batch, length, _ = hidden.shape
    chunk = max(1, min(length, _LOGIT_ELEMENTS // (batch * decoder.config.vocab_size)))

    def of_chunk(start: Array) -> TokenScores:
        part, target = (jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=1) for x in (hidden, tokens))
        return scores_of_logits(decoder.logits(part), target, top)

    def joined(parts: Array) -> Array:
        flat, before = jnp.moveaxis(parts, 0, 1).reshape(batch, -1, *parts.shape[3:]), (len(parts) - 1) * chunk
        return jnp.concatenate([flat[:, :before], flat[:, before - length :]], axis=1)

    # The last chunk reaches back over the one before instead of past the end.
    starts = np.minimum(np.arange(0, length, chunk, dtype=np.int32), length - chunk)
    return jax.tree.map(joined, jax.lax.map(of_chunk, jnp.asarray(starts)))


def scores_of_logits(logits: Float[Array, "*tokens V"], tokens: Int[Array, "*tokens"], top: int = 0) -> TokenScores:
    """Scores of tokens, each given by the logits beside it."""
    of_all = jax.nn.log_softmax(logits)
    own, greedy = jnp.take_along_axis(of_all, tokens[..., None], axis=-1)[..., 0], jnp.argmax(logits, axis=-1) == tokens
    if not top:
        return TokenScores(own, greedy)
    values, ids = jax.lax.top_k(of_all, top)
    return TokenScores(own, greedy, (ids, values))


_score_texts_program = Program(OverMesh(_score_texts, (WEIGHTS, ROWS, OUT, ROWS, ROWS), (ROWS, ROWS)))


@dataclasses.dataclass(frozen=True)
class AnswerScores:
    """Result of `score_answers`; entry `[i][j]` is about answer j to prompt i."""

    logprobs: list[list[np.ndarray]]  # natural log-probability of each token, given the prompt and the tokens before it
    greedy: list[list[bool]]  # whether greedy decoding would say the answer, token for token


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

    `answers` are as many to each prompt, at least 1: strings, which continue the prompt's text, or token ids. Of an
    answer's last token nothing is asked but its probability: it needs no position. `context` is of one row. Other
    arguments and errors are those of `generate`; ValueError also where prompts and answers do not match.
    """
    require_lm(lm)
    require_type("answers", answers, Collection, "a list with a list of answers for each prompt")
    for name, x in {"prompts": prompts, **{f"answers[{i}]": own for i, own in enumerate(answers)}}.items():
        require(not is_single(x, name), f"{name} is a single one: must be a list of texts, chats or ids", UserTypeError)
    kernels, counts = lm.kernels(backend), [len(of_prompt) for of_prompt in answers]
    same = len(prompts) == len(counts) and len(set(counts)) == 1 and all(counts)
    allowed = f"must have as many for each of the {len(prompts)} prompts, at least 1"
    require(same, f"answers has {counts} entries: {allowed}")
    times, checked = counts[0], Prompts.of(lm, prompts, context)
    held = 1 if context is None else context.batch
    require(held == 1, f"context has {held} rows: must have one, which all prompts share")
    before = checked.all_tokens
    rows = [
        _encode_answer(lm, answer, before[i], f"answers[{i}][{j}]")
        for i, of_prompt in enumerate(answers)
        for j, answer in enumerate(of_prompt)
    ]
    of_prompts = [slice(i, i + times) for i in range(0, len(rows), times)]
    checked.require_positions(*(max(map(len, rows[own])) - 1 for own in of_prompts))
    logprobs, greedy = _score_rows(dataclasses.replace(checked, times=times), rows, kernels)
    return AnswerScores([logprobs[own] for own in of_prompts], [greedy[own] for own in of_prompts])


def _encode_answer(lm: LM, answer: Any, held: list[int], argument: str) -> list[int]:
    require(not is_chat(answer), f"{argument} is a chat: must be a string or token ids", UserTypeError)
    text = isinstance(answer, str | bytes) and len(answer)
    return encode_continuation(lm, answer, held, argument) if text else encode_prompt(lm, answer, argument)


def _score_rows(prompts: Prompts, answers: list[list[int]], backend: Backend) -> tuple[list[np.ndarray], list[bool]]:
    """Scores of each answer; those to one prompt side by side."""
    lm, b, calls, hidden = prompts.lm, prompts.lm.method.cache.block_size, Calls(), None
    starts, counts = prompts.row_lengths, [len(answer) for answer in answers]
    columns = num_columns(int(np.max(starts % b + counts)), b)
    if max(counts) > 1:  # of a single token, what the prompt's last logits say is all
        prompts = dataclasses.replace(prompts, fed_tokens=columns)
    require_memory(prompts.kv_cache_bytes, f"{len(answers)} answers to {len(prompts.ids)} prompts")
    logits, rows, _ = prompts.read(calls, backend)
    prompts.require_finite(on_host(jnp.isfinite(logits).all(axis=-1)))
    tokens, lengths = pad_tokens(answers, lm.pad_token_id, columns)
    if prompts.fed_tokens:
        _, _, hidden = feed(lm, rows, tokens, starts, lengths, calls, keep_hidden=True, backend=backend)
    found = on_host(calls(_score_answers_program, lm.without_layers, logits, hidden, tokens, starts))
    logprobs = [row[:count] for row, count in zip(found.logprobs, counts, strict=True)]
    return logprobs, [bool(row[:count].all()) for row, count in zip(found.greedy, counts, strict=True)]


def _score_answers(
    lm: LM,  # without layers
    logits: Float32[Array, "B V"],  # after each prompt; R / B answers side by side belong to it
    hidden: Float[Array, "R S D"] | None,  # of answers that were fed; None for answers of one token
    tokens: Int[Array, "R S"],
    starts: Int[Array, " R"],  # tokens before each answer
) -> TokenScores:
    """Scores of the tokens of answers, arbitrary past a length."""
    first = scores_of_logits(jnp.repeat(logits, len(tokens) // len(logits), axis=0)[:, None], tokens[:, :1])
    if hidden is None:
        return first
    b, columns = lm.method.cache.block_size, tokens.shape[1]
    targets = aligned(tokens, Where(starts // b * b, starts, starts), columns)
    others = scores_of_hidden(lm.decoder, hidden[:, :-1], targets[:, 1:])
    places = jnp.minimum((starts % b)[:, None] + jnp.arange(columns - 1), columns - 2)
    own = jax.tree.map(lambda x: jnp.take_along_axis(x, places, axis=1), others)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), first, own)


_score_answers_program = Program(OverMesh(_score_answers, (ROWS,) * 4, ROWS))
