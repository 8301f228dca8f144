"""Decoding steps of whole models over random caches: long contexts without their prefill."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import tca_jax
from tca_jax.engine.decode import STATE, DecodingState, decode, row_keys
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import CACHES, SAME, OverMesh, mesh_entry, num_devices
from tca_jax.engine.sampling import Sampling
from tca_jax.lab.benchmarks.caches import CachePlan, plan_layers, random_cache
from tca_jax.lab.benchmarks.common import COMPILED_AT_ONCE, free_bytes, print_row
from tca_jax.lab.benchmarks.models import random_model, under_share, weight_bytes
from tca_jax.lab.benchmarks.shares import FULL, Share
from tca_jax.models.sharding import DATA, axis_size
from tca_jax.programs import Program

STEPS_OF_MODELS = 64  # timed; no block leaves the window within them
_WARM = 2  # new tokens before the timed ones: the prompt's own and one step


@dataclasses.dataclass(frozen=True)
class Timing:
    """How models are timed.

    Attributes:
        config: The method's hyperparameters.
        backend: Kernel backend.
        copied: What `device_copy` says.
        repeats: Timed runs of each cache.
        mesh: Devices that share a model; None for one.
    """

    config: tca_jax.TCAConfig
    backend: str
    copied: float
    repeats: int
    mesh: Mesh | None = None


def measure_model(
    name: str, layers: int | None, settings: Sequence[tuple[int, int]], shares: Sequence[Share], timing: Timing
) -> tuple[list[dict[str, Any]], list[str]]:
    """Times a model's decoding steps at every (batch, tokens of context) and kept share, full attention first.

    Shares whose caches fit into memory together take turns; the largest caches are left out where they do not.

    Returns:
        A row for each that was timed, and what was left out.
    """
    longest = max(tokens for _, tokens in settings)
    lm = random_model(name, jax.random.key(0), layers, max_positions=2 * longest, mesh=timing.mesh)
    rows, left_out = [], []
    for batch, tokens in settings:
        lms = {share: under_share(lm, share, timing.config) for share in (FULL, *shares)}
        devices = num_devices(lm.mesh)
        needed = {share: _cache_bytes(lms[share], batch, tokens) // devices for share in lms}  # of each
        while lms and sum(needed[share] for share in lms) > 0.95 * free_bytes():  # the rest is for a step's own
            share = max(lms, key=lambda share: needed[share])
            del lms[share]
            size = f"{needed[share] / 1e9:,.0f} GB"
            left_out.append(
                f"the whole {name} at batch {batch}, {tokens:,} tokens, share {share.cell} ({size} of cache)"
            )
            print(f"left out, for it does not fit into memory: {left_out[-1]}", flush=True)
        for row in _measure(lms, batch, tokens, timing):
            of_mesh = mesh_entry(lm.mesh)
            rows.append({"model": name, **of_mesh, "layers": lm.config.num_layers, **row})
            print_row(rows[-1])
    return rows, left_out


def random_state(lm: LM, batch: int, tokens: int) -> DecodingState:
    """The state behind prompts of `tokens`, with room for the steps; caches are full of random keys and values."""
    cache = random_cache(_plan(lm, batch, tokens), lm.config.head_dim, 0, jnp.dtype(lm.config.dtype_name))
    return DecodingState(
        tokens=jnp.zeros((batch, _WARM + STEPS_OF_MODELS), jnp.int32),
        step=jnp.ones(batch, jnp.int32),
        last=jnp.zeros(batch, jnp.int32),
        done=jnp.zeros(batch, bool),
        lengths=jnp.full(batch, tokens, jnp.int32),
        prompt_lengths=jnp.full(batch, tokens, jnp.int32),
        keys=row_keys(jax.random.key(0), batch),
        seen=None,
        stop_tokens=jnp.zeros(0, jnp.int32),
        min_new_tokens=None,
        logprobs=None,
        top=None,
        finite=jnp.ones(batch, bool),
        cache=cache,
        attended_share=jnp.ones(batch, jnp.float32),
    )


def decoding_arguments(lm: LM, state: Any, limit: int) -> tuple[Any, ...]:
    """Arguments of `decode` up to `limit` new tokens, greedily."""
    return lm, state, None, jnp.int32(limit), Sampling()


def time_steps(
    program: Callable[..., DecodingState], lm: LM, state: DecodingState, new_tokens: int
) -> tuple[DecodingState, float]:
    """Decodes until there are `new_tokens`.

    Returns:
        The state then, and the mean seconds of a step behind the second token: the first launch is not a step's time.
    """
    state = jax.block_until_ready(program(*decoding_arguments(lm, state, _WARM)))
    arguments = jax.block_until_ready(decoding_arguments(lm, state, new_tokens))
    start = time.perf_counter()
    state = jax.block_until_ready(program(*arguments))
    return state, (time.perf_counter() - start) / (new_tokens - _WARM)


def _measure(lms: dict[Share, LM], batch: int, tokens: int, timing: Timing) -> list[dict[str, Any]]:
    """A row for each share; they take turns."""
    program = Program(OverMesh(decode, (STATE, CACHES, SAME, SAME), STATE), donate=(1,))
    states = {share: random_state(lm, batch, tokens) for share, lm in lms.items()}

    def compiled(share: Share) -> Callable[..., DecodingState]:
        return program.prepare(*decoding_arguments(lms[share], states[share], 1), backend=timing.backend)[0]

    with ThreadPoolExecutor(COMPILED_AT_ONCE) as pool:
        programs = dict(zip(lms, pool.map(compiled, lms), strict=True))
    seconds: dict[Share, list[float]] = {share: [] for share in lms}
    for _ in range(timing.repeats):
        for share, run in programs.items():
            state, step = time_steps(run, lms[share], states[share], _WARM + STEPS_OF_MODELS)
            seconds[share].append(step)
            states[share] = dataclasses.replace(state, step=jnp.int32(1))
    rows = []
    for share, lm in lms.items():
        step, config = statistics.median(seconds[share]), lm.config
        attended = _plan(lm, batch, tokens).attended_tokens
        devices, copies = num_devices(lm.mesh), axis_size(lm.mesh, DATA)
        read = copies * weight_bytes(lm) + 2 * attended * config.head_dim * jnp.dtype(config.dtype_name).itemsize
        rows.append(
            {
                "batch": batch,
                "tokens": tokens,
                "share": share.cell,
                "attended": attended / (batch * config.num_layers * config.num_kv_heads * (tokens + 1)),
                "KV GB": _cache_bytes(lm, batch, tokens) / 1e9,
                "ms/step": 1e3 * step,
                "tokens/s": batch / step,
                "GB/s": read / step / 1e9,
                "of copy": read / step / (devices * timing.copied),
                "speed-up": statistics.median(seconds[FULL]) / step if FULL in seconds else "",
            }
        )
    return rows


def _plan(lm: LM, batch: int, tokens: int) -> CachePlan:
    sizes = lm.config.num_layers, lm.config.num_kv_heads, batch, tokens, _WARM + STEPS_OF_MODELS - 1
    return plan_layers(lm.method.cache, *sizes, lm.mesh, lm.head_shards)


def _cache_bytes(lm: LM, batch: int, tokens: int) -> int:
    return _plan(lm, batch, tokens).num_bytes(lm.config.head_dim, lm.config.dtype_name)
