"""Methods at equal held bytes: each method's one knob, turned until its cache takes a share of full attention's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tca_jax.engine.buckets import bucket_length
from tca_jax.engine.layouts import total_bytes
from tca_jax.engine.lm import LM
from tca_jax.methods import BASELINE, get
from tca_jax.methods.checks import check_integer, check_number
from tca_jax.methods.registry import option_names

_SHARES = 4096  # of these steps `share` is a whole number


def with_bytes(
    lm: LM, name: str, share: float, prompt_tokens: int, new_tokens: int | None = None, **options: Any
) -> LM:
    """The model under a method whose cache takes at most a share of the bytes that full attention's takes.

    The method's one knob is turned: `share` where its factory has that option, `window` of `streaming`, `candidate` of
    `uniform`; of a pair, that of the cache's part. Bytes are those of `stats.kv_cache_bytes`: padding, window and room
    for what is kept while decoding count. On a mesh they are those of one device that holds the whole model.

    Args:
        lm: The model.
        name: A registered method, or a pair by "+".
        share: Share of the bytes, in (0, 1].
        prompt_tokens: Tokens of the longest prompt.
        new_tokens: Most tokens of an answer; None for a context (`tca_jax.prefill`).
        **options: Further options of the method, as `lm.with_method` takes them, without the knob.

    Returns:
        The model under the largest budget that fits.

    Raises:
        ValueError: the smallest budget is too large (the message tells its share), the method has no knob, or an
            argument or option is not allowed.
    """
    check_number("share", share, above=0, at_most=1)
    check_integer("prompt_tokens", prompt_tokens, at_least=1)
    if new_tokens is not None:
        check_integer("new_tokens", new_tokens, at_least=1)
    knob, values = _knob(lm, name, prompt_tokens, options)
    alone = dataclasses.replace(lm, mesh=None, head_orders=None)  # no weights move while the knob is turned
    whole = _num_bytes(alone.with_method(BASELINE), prompt_tokens, new_tokens)

    def turned(lm: LM, place: int) -> LM:
        return lm.with_method(name, **_with_knob(name, knob, values[place], options))

    def taken(place: int) -> float:
        return _num_bytes(turned(alone, place), prompt_tokens, new_tokens) / whole

    if (least := taken(0)) > share:
        raise ValueError(
            f"share = {share}: {name!r} takes at least {least:.4f} of full attention's bytes at {prompt_tokens} tokens "
            f"({knob} = {values[0]}); a smaller window takes less"
        )
    low, high = 0, len(values)  # the first fits; the one past the last does not count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if taken(middle) <= share else (low, middle)
    return turned(lm, low)


def _knob(lm: LM, name: str, prompt_tokens: int, options: dict[str, Any]) -> tuple[str, Sequence[Any]]:
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
    raise ValueError(
        f"method {name!r} has no option that moves its budget ({cache!r} takes {list(known)}); that of a profile is "
        "chosen by `calibrate(..., kept=)`"
    )


def _with_knob(name: str, knob: str, value: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options with the knob's value among those of the cache's part."""
    if "+" not in name:
        return {**options, knob: value}
    cache = name.split("+")[-1]
    return {**options, cache: {**options.get(cache, {}), knob: value}}


def _num_bytes(lm: LM, prompt_tokens: int, new_tokens: int | None) -> int:
    """Bytes of the caches behind one prompt, as `generate` and `prefill` allocate them."""
    if new_tokens is None:
        lm = lm.for_contexts()
    room = None if new_tokens is None else bucket_length(new_tokens)
    layouts = lm.cache_layouts(1, bucket_length(prompt_tokens), room)
    return total_bytes(layouts, lm.config.head_dim, jnp.float32)  # of a share, the dtype does not matter
