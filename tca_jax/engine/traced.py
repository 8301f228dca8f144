"""`generate_tokens`: generation in one program, also inside a caller's own jit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from tca_jax.engine.cache import CacheLayout
from tca_jax.engine.decode import DecodingState, Steps, begin_program, row_keys, steps_program
from tca_jax.engine.generation_config import check_stop_ids
from tca_jax.engine.lm import LM, require_lm
from tca_jax.engine.mesh import any_row, rows_of_device
from tca_jax.engine.prompts import bucket_length, check_token_ids
from tca_jax.engine.read import Calls, read
from tca_jax.engine.sampling import Sampling
from tca_jax.errors import UserTypeError, check_integer, explaining, require, require_type
from tca_jax.methods.base import UNBOUNDED
from tca_jax.pallas_kernels.backends import Backend
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
        key: A PRNG key, of `jax.random.key` or of `jax.random.PRNGKey`. Row i draws with `fold_in(key, i)`.
        max_new_tokens: Length of the answers; static, and compiled for in buckets, as prompts are.
        sampling: How tokens are drawn; greedy by default. Its numbers are traced.
        stop_tokens: Tokens that end a row; None takes the model's own, () never stops early. Static.
        backend: Kernel backend; static.

    Returns:
        int32 `[B, max_new_tokens]`: new tokens only, the stop token included, `lm.pad_token_id` behind it.

    Raises:
        ValueError: a shape or size is not allowed, or a length or token that is known; names the argument.
        TypeError: tokens or lengths are no integers, `lm` is no LM, `sampling` no Sampling, or `key` no single key.
    """
    require_lm(lm)
    require_type("sampling", sampling, Sampling, "a Sampling")
    kernels = lm.kernels(backend)
    tokens, lengths = as_int32("tokens", tokens), as_int32("lengths", lengths)
    sizes = check_shapes({"tokens": (tokens, "B L"), "lengths": (lengths, "B")})
    require(tokens.size, f"tokens has shape {tokens.shape}: no prompt or an empty prompt; at least one token is needed")
    one = f"key is of type {type(key).__name__}: must be a single key of jax.random.key or jax.random.PRNGKey"
    with explaining(one, error=UserTypeError):
        jax.eval_shape(jax.random.fold_in, key, 0)
    rows = rows_of_device(lm, sizes["B"], "rows of tokens")
    positions = lm.config.max_context
    check_integer("max_new_tokens", max_new_tokens, at_least=1)
    max_new_tokens = int(max_new_tokens)
    room_for_prompt = f"must leave room for a prompt in the {positions} positions of {lm.name}"
    require(max_new_tokens < positions, f"max_new_tokens = {max_new_tokens}: {room_for_prompt}")
    check_range("lengths", lengths, 1, min(sizes["L"], positions - max_new_tokens))
    if not isinstance(tokens, jax.core.Tracer) and not isinstance(lengths, jax.core.Tracer):
        ids, real = np.asarray(tokens), np.arange(sizes["L"]) < np.asarray(lengths)[:, None]
        for row, column in np.argwhere(real & ((ids < 0) | (ids >= lm.config.vocab_size)))[:1]:
            check_token_ids(lm, [int(ids[row, column])], f"tokens[{row}, {column}] is")
    stops = check_stop_ids(stop_tokens, "stop_tokens")
    stops = lm.eos_token_ids if stops is None else tuple(check_token_ids(lm, list(stops), "stop_tokens holds"))
    room, limit = bucket_length(max_new_tokens), jnp.int32(max_new_tokens)
    layout = lm.cache_layout(rows, sizes["L"], room - 1)
    given = lm.for_programs, tokens, lengths, key, sampling, limit
    return _generate_tokens(*given, room, stops, layout, kernels)[:, :max_new_tokens]


@functools.partial(jax.jit, static_argnames=("room", "stop_tokens", "layout", "backend"))
def _generate_tokens(
    lm: LM,
    tokens: Int[Array, "B L"],
    lengths: Int[Array, " B"],
    key: Key[Array, ""],
    sampling: Sampling,
    limit: Int[Array, ""],
    room: int,
    stop_tokens: tuple[int, ...],
    layout: CacheLayout,
    backend: Backend,
) -> Int[Array, "B N"]:
    calls, batch = Calls(traced=True), tokens.shape[0]
    logits, rows, shares = read(lm, tokens, lengths, lengths + room - 1, layout, calls, backend=backend)
    seen = None
    if sampling.repetition_penalty is not None:
        own = jnp.where(jnp.arange(tokens.shape[1]) < lengths[:, None], tokens, logits.shape[-1])  # no padding
        seen = jnp.zeros(logits.shape, bool).at[jnp.arange(batch)[:, None], own].set(True, mode="drop")
    drawing = row_keys(key, batch), shares, sampling, jnp.asarray(stop_tokens, jnp.int32)
    state = calls(begin_program, lm.without_weights, logits, lengths, seen, *drawing, new_tokens=room)
    given = lm, dataclasses.replace(state, cache=rows), limit, sampling
    return calls(_decode_all_program, *given, backend=backend).tokens


def _decode_all(steps: Steps, state: DecodingState) -> DecodingState:
    """Steps, and blocks that leave windows between them, until all rows have ended."""
    mesh = steps.lm.mesh
    if steps.lm.method.cache.window >= UNBOUNDED:
        return steps.decode(state)

    def run(state: DecodingState) -> DecodingState:
        return jax.lax.cond(any_row(steps.leaving(state), mesh), steps.leave, steps.decode, state)

    return jax.lax.while_loop(lambda state: any_row(steps.running(state), mesh), run, state)


_decode_all_program = steps_program(_decode_all)
