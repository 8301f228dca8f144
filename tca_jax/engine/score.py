"""`score`: log-probabilities of given text under a model and its attention method."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.engine.lm import LM, require_lm
from tca_jax.engine.mesh import ROWS, OverMesh, heads_of, mean_of_devices, on_host, rows_of_device
from tca_jax.engine.programs import Program
from tca_jax.engine.prompts import Prompt, encode_prompts, pad_tokens
from tca_jax.engine.read import require_finite
from tca_jax.errors import UserError
from tca_jax.methods.pairs import attended_share
from tca_jax.models.decoder import Decoder
from tca_jax.pallas_kernels.backends import Backend, resolve_backend

_LOGIT_ELEMENTS = 2**27  # of a chunk: half a gigabyte in float32


@dataclasses.dataclass(frozen=True)
class Scores:
    """Result of `score`, one entry a text.

    Attributes:
        tokens: Token ids, n of each text.
        logprobs: Natural log-probability of each token but the first, given all before it; float32 `[n - 1]`.
        attended_share: Share of the text's causal pairs (query, key) that its queries attended to, mean over layers
            and query heads.
    """

    tokens: list[list[int]]
    logprobs: list[np.ndarray]
    attended_share: list[float]


def score(lm: LM, texts: Prompt | Sequence[Prompt], *, backend: str = "auto") -> Scores:
    """Log-probabilities of every token of a text, or of a batch of texts, in one forward pass.

    The model reads a text as it reads a prompt. A method that chooses tokens by a prompt's last queries has so chosen
    by the text's end, which an honest measure of its quality on a part of the text should bear in mind.

    Args:
        lm: From `tca_jax.load`; under any method.
        texts: Strings, chats or token ids; one or a sequence. At least 2 tokens each.
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
    ids = encode_prompts(lm, texts, argument="texts")
    for i, tokens in enumerate(ids):
        if not 2 <= len(tokens) <= lm.config.max_context:
            raise UserError(
                f"texts[{i}] has {len(tokens)} tokens: must have from 2 to {lm.config.max_context}, the positions of "
                f"{lm.name}"
            )
    rows_of_device(lm, len(ids), "texts")
    padded, lengths = pad_tokens(ids, lm.pad_token_id)
    args = (lm.for_programs(), jnp.asarray(padded), jnp.asarray(lengths))
    program, _ = _score.prepare(*args, backend=kernels)
    logprobs, shares = on_host(program(*args))
    rows = [row[: len(tokens) - 1] for row, tokens in zip(logprobs, ids, strict=True)]
    require_finite(lm, padded, lengths, np.array([np.isfinite(row).all() for row in rows]), "texts")
    return Scores(ids, rows, shares.tolist())


def logprobs_of(
    lm: LM, tokens: Int[Array, "B L"], lengths: Int[Array, " B"], *, backend: Backend = "auto"
) -> tuple[Float32[Array, "B L1"], Float32[Array, " B"]]:
    """Log-probability of tokens 1 to L - 1 given all before each, float32 `[B, L - 1]`, arbitrary past a length; and
    the share of each text's pairs that its queries attended to."""
    method, decoder = lm.method, lm.decoder

    def attention(layer: int, q: Array, k: Array, v: Array, state: None) -> tuple[Array, Float32[Array, " B"]]:
        # Counted before the model goes on: lists of blocks would stay until then.
        heads = heads_of(lm.head_shards, layer, k.shape[2])
        return tuple(jax.lax.optimization_barrier(method.prefill.attend(layer, heads, q, k, v, lengths, None, backend)))

    positions = jnp.minimum(jnp.arange(tokens.shape[1]), lengths[:, None] - 1)
    hidden, pairs = decoder(tokens, positions, attention, (None,) * lm.config.num_layers)
    share = mean_of_devices(attended_share(pairs, lengths), lm.head_shards)
    return logprobs_of_hidden(decoder, hidden[:, :-1], tokens[:, 1:]), share


class TokenScores(NamedTuple):
    """What a model thinks of tokens.

    Attributes:
        logprobs: Natural log-probability of each, float32.
        greedy: Whether no other token is likelier.
    """

    logprobs: Float32[Array, "*tokens"]
    greedy: Bool[Array, "*tokens"]


def logprobs_of_hidden(
    decoder: Decoder, hidden: Float[Array, "B L D"], tokens: Int[Array, "B L"]
) -> Float32[Array, "B L"]:
    """`scores_of_hidden` without the second half."""
    return scores_of_hidden(decoder, hidden, tokens).logprobs


def scores_of_hidden(decoder: Decoder, hidden: Float[Array, "B L D"], tokens: Int[Array, "B L"]) -> TokenScores:
    """Log-probability of tokens, each given by the hidden state beside it, and whether greedy decoding says them.

    Logits are made of a few positions at a time: those of all would outweigh the model.
    """
    batch, length = tokens.shape
    chunk = max(1, min(length, _LOGIT_ELEMENTS // (batch * decoder.config.vocab_size)))

    def of_chunk(start: Array) -> TokenScores:
        part = jax.lax.dynamic_slice_in_dim(hidden, start, chunk, axis=1)
        target = jax.lax.dynamic_slice_in_dim(tokens, start, chunk, axis=1)
        return scores_of_logits(decoder.logits(part), target)

    # The last chunk reaches back over the one before instead of past the end.
    starts = np.minimum(np.arange(0, length, chunk), length - chunk)
    parts = jax.lax.map(of_chunk, jnp.asarray(starts, jnp.int32))
    out = TokenScores(jnp.zeros((batch, length), jnp.float32), jnp.zeros((batch, length), bool))
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


_score = Program(OverMesh(logprobs_of, (ROWS, ROWS), (ROWS, ROWS)))
