"""Methods at equal held bytes: each method's one knob, turned until its cache takes a share of full attention's."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tca_jax.engine.lm import LM
from tca_jax.engine.prompts import bucket_length
from tca_jax.errors import UserError, check_integer, check_number
from tca_jax.methods.full import BASELINE
from tca_jax.methods.registry import get, option_names

_SHARES = 4096  # of these steps `share` is a whole number


def with_bytes(lm: LM, name: str, kv_share: float, prompt_tokens: int, **options: Any) -> LM:
    """The model under a method whose cache takes at most `kv_share` of full attention's bytes, in (0, 1].

    Sets the method's one knob: `share` where it has that option, `window` of streaming, `candidate` of uniform; of a
    pair, that of the cache's part. Bytes are those of a context of `prompt_tokens`, without room for an answer, on one
    device with the complete model. `options` are those of `lm.with_method`. ValueError if the smallest budget is too
    large or the method has no knob.
    """
    check_number("kv_share", kv_share, above=0, at_most=1)
    check_integer("prompt_tokens", prompt_tokens, at_least=1)
    knob, values = _knob(name, prompt_tokens, options)
    cache = name.split("+")[-1]

    def turned(lm: LM, place: int) -> LM:
        of_cache = {**(options if cache == name else options.get(cache, {})), knob: values[place]}
        return lm.with_method(name, **(of_cache if cache == name else {**options, cache: of_cache}))

    def taken(place: int) -> float:
        return held_share(turned(lm, place), prompt_tokens)

    if not (fitting := bisect.bisect_right(range(len(values)), kv_share, key=taken)):
        raise UserError(
            f"kv_share = {kv_share}: must be at least {least_share(taken(0))}, what {name!r} takes of full attention's "
            f"bytes at {prompt_tokens} tokens ({knob} = {values[0]}); a smaller window takes less"
        )
    return turned(lm, fitting - 1)


def least_share(share: float) -> str:
    """The least share that is allowed, for messages: rounded up, so that it is allowed as shown."""
    nearest = round(float(share), 4)
    return f"{nearest if nearest >= share else nearest + 1e-4:.4f}"


def _knob(name: str, prompt_tokens: int, options: dict[str, Any]) -> tuple[str, Sequence[Any]]:
    """The option that moves a method's budget, and its values from the smallest budget to the largest."""
    cache = name.split("+")[-1]
    known = option_names(cache)
    if "share" in known:
        return "share", [i / _SHARES for i in range(1, _SHARES + 1)]
    if cache == "uniform":
        return "candidate", range(get(name, **options).cache.config.num_candidates + 1)  # type: ignore[attr-defined]
    if cache == "streaming":
        policy = get(name, **options).cache
        return "window", range(policy.block_size, max(policy.block_size, prompt_tokens) + 1, policy.block_size)
    raise UserError(
        f"method {name!r} has no option that moves its budget ({cache!r} takes {list(known)}); that of a profile is "
        "chosen by `calibrate(..., kept=)`"
    )


def held_share(lm: LM, prompt_tokens: int) -> float:
    """Cache bytes of a context over full attention's, on one device with the complete model."""
    lm = dataclasses.replace(lm, mesh=None, head_orders=None)
    tokens, size = bucket_length(prompt_tokens), (lm.config.head_dim, jnp.float32)  # of a share, any dtype
    held, full = (each.cache_layout(1, tokens).num_bytes(*size) for each in (lm, lm.with_method(BASELINE)))
    return held / full
