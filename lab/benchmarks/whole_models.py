"""Programs of a whole model under several attentions at one prompt length, and the rows that timing them gives."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import tca_jax
from tca_jax.engine.contexts import kept_share
from tca_jax.engine.decode import PROMPTS, STARTED, STATE, DecodingState, decode, prefill, row_keys
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import CACHES, SAME, OverMesh, mesh_entry, num_devices
from tca_jax.engine.sampling import Sampling
from tca_jax.lab.benchmarks.common import COMPILED_AT_ONCE, fitted
from tca_jax.lab.benchmarks.decode_models import decoding_arguments, time_steps
from tca_jax.lab.benchmarks.mesh_columns import Peaks, held_columns
from tca_jax.lab.benchmarks.models import random_model, under_share, weight_bytes
from tca_jax.lab.benchmarks.shares import Share
from tca_jax.models.projections import WEIGHTS
from tca_jax.models.sharding import DATA, axis_size
from tca_jax.pallas_kernels.kv import num_bytes
from tca_jax.programs import Program, results_of


@dataclasses.dataclass(frozen=True)
class Run:
    """Programs of one model under one attention at one prompt length."""

    lm: LM
    tokens: jax.Array
    lengths: jax.Array
    new_tokens: int
    backend: str
    prefill: Program = dataclasses.field(default_factory=lambda: Program(OverMesh(prefill, PROMPTS, STARTED)))
    decode: Program = dataclasses.field(
        default_factory=lambda: Program(OverMesh(decode, (STATE, CACHES, SAME, SAME), STATE), donate=(1,))
    )

    @property
    def prompt(self) -> tuple[Any, ...]:
        """Arguments of prefill."""
        keys = row_keys(jax.random.key(0), self.tokens.shape[0])
        return self.lm, self.tokens, self.lengths, keys, Sampling(), jnp.zeros(0, jnp.int32)

    def compile(self) -> tuple[Callable[..., Any], Callable[..., DecodingState] | None, float]:
        """Both programs and the seconds that they took to trace and compile; no decoding for a single new token."""
        first, seconds = self.prefill.prepare(*self.prompt, new_tokens=self.new_tokens, backend=self.backend)
        require_eight_bit_products(self.lm, first)
        if self.new_tokens == 1:
            return first, None, seconds
        state, _ = results_of(first)
        rest, more = self.decode.prepare(*decoding_arguments(self.lm, state, 1), backend=self.backend)
        return first, rest, seconds + more


@dataclasses.dataclass
class Times:
    """What is measured of one attention.

    Attributes:
        run: What runs.
        programs: Its prefill and its decoding, None where only prompts are read.
        first: Seconds to the first token, a value a round.
        following: Seconds of a further token, a value a round.
        kept: Share of the tokens that the cache keeps.
        area: Share of the prompt's pairs of a query and a key that were attended to.
        cache_bytes: Bytes of the cache.
        peak: See `Peaks`.
    """

    run: Run
    programs: tuple[Callable[..., Any], Callable[..., DecodingState] | None]
    first: list[float] = dataclasses.field(default_factory=list)
    following: list[float] = dataclasses.field(default_factory=list)
    kept: float = 0.0
    area: float = 1.0
    cache_bytes: int = 0
    peak: float | str = ""

    @property
    def needed(self) -> int:
        """Device memory of its larger program."""
        return max(memory_bytes(program) for program in self.programs if program is not None)

    def time(self, peaks: Peaks) -> Times:
        """One round; returns itself."""
        start_program, step_program = self.programs
        arguments = self.run.prompt
        start = time.perf_counter()
        state, _ = jax.block_until_ready(start_program(*arguments))
        self.first.append(time.perf_counter() - start)
        if step_program is not None:
            state, step = time_steps(step_program, self.run.lm, state, self.run.new_tokens)
            self.following.append(step)
        lm, fed = self.run.lm, state.lengths + state.step - 1
        self.kept = kept_share(lm.method.cache.window, [state.cache], fed, state.prompt_lengths)
        self.area = float(np.mean(np.asarray(state.attended_share)))
        self.cache_bytes = state.cache.num_bytes // num_devices(lm.mesh)
        del state
        grown = peaks.grown()
        self.peak = self.peak or grown
        return self

    def row(self, full: Times | None, conditions: Conditions) -> dict[str, Any]:
        """Its row of the table, behind its name; `full` are the times of full attention."""
        lm, new_tokens = self.run.lm, self.run.new_tokens
        config, devices = lm.config, num_devices(lm.mesh)
        batch, tokens = self.run.tokens.shape
        seconds = statistics.median(self.first)
        held = math.ceil(self.kept * batch * tokens * config.num_kv_heads)
        kept_bytes = 2 * num_bytes(held, config.head_dim, lm.cache_dtype)
        read = axis_size(lm.mesh, DATA) * weight_bytes(lm) + config.num_layers * kept_bytes
        floor = batch * prefill_flops(lm, tokens, self.area) / (devices * conditions.multiplied)
        answers = {} if not self.following else self._answer_columns(full, read / (devices * conditions.copied))
        return {
            "kept": self.kept,
            "area": self.area,
            "TTFT s": seconds,
            "TTFT speed-up": "" if full is None else statistics.median(full.first) / seconds,
            "over arithmetic floor": seconds / floor,
            **answers,
            "KV GB": devices * self.cache_bytes / 1e9,
            "peak GB": self.needed / 1e9,
            **({} if lm.mesh is None else held_columns(lm, batch, tokens, new_tokens)),
            **({} if lm.mesh is None else {"measured peak GB": self.peak}),
        }

    def _answer_columns(self, full: Times | None, floor: float) -> dict[str, Any]:
        """What its row says of the tokens behind the first; `floor` are a step's least seconds."""
        step = statistics.median(self.following)
        return {
            "ms/token": 1e3 * step,
            "ms/token speed-up": "" if full is None else statistics.median(full.following) / step,
            "over byte floor": step / floor,
        }


def prefill_flops(lm: LM, tokens: int, area: float) -> float:
    """Operations of a prompt's matrix products and of `area` of its causal attention."""
    c = lm.config
    width = c.num_heads * c.head_dim
    weights = c.hidden_size * (2 * width + 2 * c.num_kv_heads * c.head_dim + 3 * c.intermediate_size)
    return c.num_layers * (2 * weights * tokens + 4 * width * area * tokens**2 / 2)


def require_eight_bit_products(lm: LM, executable: Any) -> None:
    """Raises RuntimeError where weights in fp8 do not make products in fp8 of a prompt's projections on a GPU.

    What XLA cannot give to cuBLASLt it computes in 16 bits without a word.
    """
    if lm.weights_dtype != WEIGHTS["fp8"] or jax.default_backend() != "gpu":
        return
    found, least = executable.as_text().count("__cublas$lt$matmul$f8"), 4 * (lm.config.num_layers - 1)
    if found < least:
        raise RuntimeError(f"{found} products in fp8 in the program that reads prompts: must be at least {least}")


def memory_bytes(executable: Any) -> int:
    """Device memory that a program needs while it runs, its arguments included."""
    used = executable.memory_analysis()
    return used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes - used.alias_size_in_bytes


def under_shares(lm: LM, shares: dict[str, Share], config: tca_jax.TCAConfig) -> tuple[LM, dict[str, LM]]:
    """The model under each share, with KV heads where the last one balances: others get along with these places, and a
    mesh need not hold weights twice. Also the model that they share their weights with, in place of the given one."""
    lm = under_share(lm, list(shares.values())[-1], config)
    return lm, {attention: under_share(lm, share, config) for attention, share in shares.items()}


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What all rows of a table share.

    Attributes:
        batch: Prompts.
        new_tokens: Tokens of an answer; 1 to read prompts alone.
        backend: Kernel backend.
        repeats: Rounds.
        copied: Bytes a second, see `common.device_copy`.
        multiplied: FLOP/s, see `common.matrix_rate`.
    """

    batch: int
    new_tokens: int
    backend: str
    repeats: int
    copied: float
    multiplied: float


def measure_model(
    make: Callable[[], LM],
    place: str,
    by_length: Mapping[int, dict[str, Share]],
    config: tca_jax.TCAConfig,
    conditions: Conditions,
    unfit: list[str],
) -> Iterator[list[dict[str, Any]]]:
    """Makes a model and yields the rows of one prompt length after the other, as soon as they are known.

    What memory does not suffice for has none, and `unfit` is told; see `common.fitted`. `place` is what messages call
    the model and the devices that share it.
    """
    lm = fitted(make, f"the weights of {place}", unfit)
    for tokens, shares in by_length.items():
        if lm is None:
            return
        under = fitted(functools.partial(under_shares, lm, shares, config), f"{place}, {tokens:,} tokens", unfit)
        if under is not None:
            lm, lms = under
            del under
            yield measure(lms, f"{place}, {tokens:,} tokens", tokens, conditions, unfit)
            del lms
    del lm
    gc.collect()  # the next model is loaded where this one was


def measure(
    lms: dict[str, LM], place: str, tokens: int, conditions: Conditions, unfit: list[str]
) -> list[dict[str, Any]]:
    """A row for each attention that fits; their prefills and their decodings take turns."""
    mesh, vocab_size = next((lm.mesh, lm.config.vocab_size) for lm in lms.values())
    prompt = jax.random.randint(jax.random.key(1), (conditions.batch, tokens), 0, vocab_size).astype(jnp.int32)
    lengths = jnp.full(conditions.batch, tokens, jnp.int32)

    def compiled(name: str) -> Times:
        run = Run(lms[name], prompt, lengths, conditions.new_tokens, conditions.backend)
        first, rest, seconds = run.compile()
        print(f"{place}, {name}: compiled in {seconds:.1f} s", flush=True)
        return Times(run, (first, rest))

    def fits(name: str, call: Callable[[], Times]) -> Times | None:
        return fitted(call, f"{place}, {name}", unfit)

    with ThreadPoolExecutor(COMPILED_AT_ONCE) as pool:
        ready = pool.map(lambda name: fits(name, functools.partial(compiled, name)), lms)
        timed = {name: times for name, times in zip(lms, ready, strict=True) if times is not None}
    peaks = Peaks(mesh)
    for _ in range(conditions.repeats):
        for name in sorted(timed, key=lambda name: timed[name].needed):  # see `Peaks`
            if fits(name, functools.partial(timed[name].time, peaks)) is None:
                del timed[name]
    full = timed.get("full")
    return [
        {**mesh_entry(mesh), "tokens": tokens, "attention": name, **times.row(full, conditions)}
        for name, times in timed.items()
    ]


def make_weights(
    model: str,
    place: str,
    layers: int | None,
    max_positions: int,
    mesh: Mesh | None,
    weights: str | None = None,
    kv: str | None = None,
) -> LM:
    """The model with random weights, once they are there."""
    start, key = time.perf_counter(), jax.random.key(0)
    lm = random_model(model, key, layers, max_positions=max_positions, mesh=mesh, weights=weights, kv=kv)
    jax.block_until_ready(lm.params)
    print(f"{place}: weights made in {time.perf_counter() - start:.1f} s", flush=True)
    return lm
