"""The functional core: select and attend as pure functions of arrays, free of any model."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tca_jax.calibration.scores import calibration_scores
from tca_jax.errors import UserTypeError, require, require_type
from tca_jax.methods.base import last_queries
from tca_jax.methods.candidates import candidate_budgets
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.gradients import attend_selection
from tca_jax.methods.regions import Regions
from tca_jax.methods.selection import select_by_candidates
from tca_jax.pallas_kernels.backends import Backend, resolve_backend
from tca_jax.pallas_kernels.checks import AnyArray, as_int32, check_range, check_shapes
from tca_jax.pallas_kernels.select_tokens import selection_mask

__all__ = ["attend", "calibration_scores", "candidate_budgets", "select"]


def select(
    q_last: Float[AnyArray, "B *observed Hq d"],
    k: Float[AnyArray, "B L Hkv d"],
    candidates: Int[AnyArray, " Hkv"],
    lengths: Int[AnyArray, " B"],
    config: TCAConfig,
    backend: str = "auto",
) -> Bool[Array, "B Hkv L"]:
    """Marks each KV head's global tokens: those it keeps when they leave the window (docs/method.md, "Selection").

    Args:
        q_last: Last prompt queries after RoPE [B, o, Hq, d]: `q_last[:, -a]` is the one at position length - a, and is
            ignored where that is negative. The last one scores the blocks; the last `config.observation` choose the
            reserve. Or the last one alone, [B, Hq, d], which then chooses the reserve too.
        k: Prompt keys after RoPE [B, L, Hkv, d], right-padded.
        candidates: Row of `candidate_budgets` for every KV head [Hkv]; may be traced.
        lengths: Prompt lengths [B], at least 1; may be traced.
        config: The method's hyperparameters; static under `jax.jit`.
        backend: Used by every operation that it has a kernel for; the others run as under "auto".

    Returns:
        bool [B, Hkv, L]; nothing in a prompt without ranked blocks (n = 0).

    Raises:
        ValueError: a shape or the backend is not allowed; a known candidate or length is out of range.
        TypeError: something is no array of its type, or `config` no TCAConfig.
    """
    axes = "B o Hq d" if np.ndim(q_last) == 4 else "B Hq d"
    queries, *arrays = checked({"q_last": (q_last, axes), "k": (k, "B L Hkv d")}, candidates, lengths, config)
    queries = queries if queries.ndim == 4 else queries[:, None]
    require(queries.shape[1], f"q_last has shape {q_last.shape}: must hold at least one query of each row")
    return _select(queries, *arrays, config, resolve_backend(backend))


def attend(
    q: Float[AnyArray, "B L Hq d"],
    k: Float[AnyArray, "B L Hkv d"],
    v: Float[AnyArray, "B L Hkv d"],
    candidates: Int[AnyArray, " Hkv"],
    lengths: Int[AnyArray, " B"],
    config: TCAConfig,
    backend: str = "auto",
) -> Float[Array, "B L Hq d"]:
    """Causal attention of a prompt over local and selected tokens (Eq. 3).

    A prompt without ranked blocks (n = 0) gets exact full attention, and so does a dense head. Gradients go to q, k and
    v through the attention; which tokens are selected is a constant of them. The backward pass runs in XLA at full
    attention's cost, in O(L) memory.

    Args:
        q: Queries after RoPE [B, L, Hq, d]; query head h belongs to KV head h // (Hq // Hkv).
        k: Keys after RoPE [B, L, Hkv, d], right-padded; padding may hold anything.
        v: Values [B, L, Hkv, d].
        candidates: Row of `candidate_budgets` for every KV head [Hkv], its prefill row where it has two; may be traced.
        lengths: Prompt lengths [B], at least 1; may be traced.
        config: The method's hyperparameters; static under `jax.jit`.
        backend: Used by every operation that it has a kernel for; the others run as under "auto".

    Returns:
        [B, L, Hq, d] in the type of `q`; rows past a length are zero.

    Raises:
        ValueError: a shape or the backend is not allowed; a known candidate or length is out of range.
        TypeError: something is no array of its type, the types of q, k and v differ, or `config` is no TCAConfig.
    """
    given = {"q": (q, "B L Hq d"), "k": (k, "B L Hkv d"), "v": (v, "B L Hkv d")}
    return _attend(*checked(given, candidates, lengths, config), config, resolve_backend(backend))


@partial(jax.jit, static_argnames=("config", "backend"))
@jax.named_scope("select")
def _select(
    q_last: Float[Array, "B O Hq d"],
    k: Float[Array, "B L Hkv d"],
    candidates: Int[Array, " Hkv"],
    lengths: Int[Array, " B"],
    config: TCAConfig,
    backend: Backend,
) -> Bool[Array, "B Hkv L"]:
    selection = select_by_candidates(q_last, k, candidates, lengths, config)
    return selection_mask(selection.scores, selection.budgets, block_size=config.block_size)


@partial(jax.jit, static_argnames=("config", "backend"))
@jax.named_scope("attend")
def _attend(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    candidates: Int[Array, " Hkv"],
    lengths: Int[Array, " B"],
    config: TCAConfig,
    backend: Backend,
) -> Float[Array, "B L Hq d"]:
    (batch, length, kv_heads, _), b = k.shape, config.block_size
    # The candidates may be traced, so a region must hold what dense keeps: all ranked tokens.
    regions = Regions.plan(batch, (config.num_ranked_blocks(length) * b,) * kv_heads, b)
    # Which tokens are selected is no smooth function of q and k, and kernels have no derivatives.
    q_last, keys = jax.lax.stop_gradient((last_queries(q, lengths, config.num_queries), k))
    selection = select_by_candidates(q_last, keys, candidates, lengths, config)
    return attend_selection(q, k, v, selection, lengths, regions, b, config.window, backend)


def checked(
    tokens: dict[str, tuple[Any, str]], candidates: AnyArray, lengths: AnyArray, config: TCAConfig
) -> list[Array]:
    """All arrays, those of tokens by name with their axes; raises UserError where one is not allowed."""
    require_type("config", config, TCAConfig, "a TCAConfig")
    for name, (array, _) in tokens.items():
        require_type(name, array, (jax.Array, np.ndarray), "a JAX or NumPy array")
        floating = jnp.issubdtype(array.dtype, jnp.floating)
        require(floating, f"{name} has dtype {array.dtype}: must be floating point", UserTypeError)
    given = ", ".join(f"{name} {array.dtype}" for name, (array, _) in tokens.items())
    one = len({array.dtype for array, _ in tokens.values()}) == 1
    require(one, f"dtypes differ: {given}; must be one and the same", UserTypeError)
    sizes = check_shapes({**tokens, "candidates": (candidates, "Hkv"), "lengths": (lengths, "B")})
    require(sizes["B"], f"{', '.join(tokens)} have 0 rows: at least one is needed")
    check_range("candidates", candidates, 0, config.num_candidates)
    check_range("lengths", lengths, 1, sizes["L"])
    floats = [jnp.asarray(array) for array, _ in tokens.values()]
    return [*floats, as_int32("candidates", candidates), as_int32("lengths", lengths)]
