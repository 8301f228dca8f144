"""`generate_tokens`: padded token ids in, new ones out, in one jitted call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from tca_jax.engine.buckets import bucket_length
from tca_jax.engine.decoding import decode, row_keys
from tca_jax.engine.lm import LM, require_lm
from tca_jax.engine.mesh import ROWS, SAME, OverMesh, rows_of_device
from tca_jax.engine.sampling import Sampling
from tca_jax.engine.starting import prefill
from tca_jax.errors import UserError, require_type
from tca_jax.methods.checks import check_integer
from tca_jax.pallas_kernels.backends import Backend, whole
from tca_jax.pallas_kernels.checks import as_int32, check_range, check_shapes


def generate_tokens(
    lm: LM,
    tokens: Int[Array | np.ndarray, "B L"],
    lengths: Int[Array | np.ndarray, " B"],
    key: Key[Array, ""],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen, so one shared default is safe)
    stop_tokens: Sequence[int] | None = None,
    backend: str = "auto",
) -> Int[Array, "B N"]:
    """Generates token ids in one jitted call; callable inside the caller's own jit.

    Args:
        lm: The model, from `tca_jax.load`.
        tokens: Prompts, right-padded, int32 `[B, L]`. What the padding holds does not matter.
        lengths: True lengths, int32 `[B]`, from 1 to L. Traced: other lengths run the same program.
        key: A typed PRNG key (`jax.random.key`). Row i draws with `fold_in(key, i)`.
        max_new_tokens: Length of the answers; static, and compiled for in buckets, as prompts are.
        sampling: How tokens are drawn; greedy by default. Its numbers are traced.
        stop_tokens: Tokens that end a row; None takes the model's own, () never stops early. Static.
        backend: Kernel backend; static.

    Returns:
        int32 `[B, max_new_tokens]`: new tokens only, the stop token included, `lm.pad_token_id` behind it.

    Raises:
        ValueError: a shape or size is not allowed, or a length or token that is known; names the argument.
        TypeError: tokens or lengths are no integers, `lm` is no LM, or `sampling` no Sampling.
    """
    require_lm(lm)
    require_type("sampling", sampling, Sampling, "a Sampling")
    kernels = whole(backend)
    tokens, lengths = as_int32("tokens", tokens), as_int32("lengths", lengths)
    sizes = check_shapes({"tokens": (tokens, "B L"), "lengths": (lengths, "B")})
    if sizes["L"] < 1:
        raise UserError(f"tokens has shape {tokens.shape}: an empty prompt; at least one token is needed")
    rows_of_device(lm, sizes["B"], "rows of tokens")
    positions = lm.config.max_context
    check_integer("max_new_tokens", max_new_tokens, at_least=1)
    max_new_tokens = int(max_new_tokens)
    if max_new_tokens >= positions:
        raise UserError(
            f"max_new_tokens = {max_new_tokens}: must leave room for a prompt in the {positions} positions of {lm.name}"
        )
    check_range("lengths", lengths, 1, min(sizes["L"], positions - max_new_tokens))
    _check_vocabulary(lm, tokens, lengths)
    stops = tuple(int(t) for t in (lm.eos_token_ids if stop_tokens is None else stop_tokens))
    room = bucket_length(max_new_tokens)
    limit = jnp.int32(max_new_tokens)
    lm = lm.for_programs()
    return _generate_tokens(lm, tokens, lengths, key, sampling, limit, room, stops, kernels)[:, :max_new_tokens]


def _check_vocabulary(lm: LM, tokens: Any, lengths: Any) -> None:
    """Raises ValueError if a prompt that is known holds an id outside the vocabulary; padding may hold anything."""
    if isinstance(tokens, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        return
    ids = np.asarray(tokens)
    outside = (ids < 0) | (ids >= lm.config.vocab_size)
    outside &= np.arange(ids.shape[1]) < np.asarray(lengths)[:, None]
    if outside.any():
        row, column = np.argwhere(outside)[0]
        raise UserError(
            f"tokens[{row}, {column}] = {ids[row, column]}: ids of {lm.name} lie in [0, {lm.config.vocab_size})"
        )


@functools.partial(jax.jit, static_argnames=("room", "stop_tokens", "backend"))
def _generate_tokens(
    lm: LM,
    tokens: Int[Array, "B L"],
    lengths: Int[Array, " B"],
    key: Key[Array, ""],
    sampling: Sampling,
    limit: Int[Array, ""],
    room: int,
    stop_tokens: tuple[int, ...],
    backend: Backend,
) -> Int[Array, "B N"]:
    stops = jnp.asarray(stop_tokens, jnp.int32)
    keys = row_keys(key, tokens.shape[0])
    return _answer(lm, tokens, lengths, keys, sampling, stops, limit, room=room, backend=backend)


def _answer_program(
    lm: LM,
    tokens: Int[Array, "B L"],
    lengths: Int[Array, " B"],
    keys: Key[Array, " B"],
    sampling: Sampling,
    stops: Int[Array, " S"],
    limit: Int[Array, ""],
    *,
    room: int,
    backend: Backend,
) -> Int[Array, "B N"]:
    state = prefill(lm, tokens, lengths, keys, sampling, stops, new_tokens=room, backend=backend)
    return decode(lm, state, limit, sampling, backend=backend).tokens


_answer = OverMesh(_answer_program, (ROWS, ROWS, ROWS, SAME, SAME, SAME), ROWS)
