"""Whole models of true size with random weights: full attention and TCA side by side, from prompt to answer.

tca-jax bench end-to-end                                        # the committed table, minutes on one GPU
tca-jax bench end-to-end --lengths 1048576 --models qwen2.5-7b --kept 0.185 --new-tokens 64 --repeats 1
tca-jax bench end-to-end --models llama3.1-8b --shares 0.05:0.25 --new-tokens 8 --no-compilation
tca-jax bench end-to-end --models llama3.1-8b --mesh 1x4        # the model on four devices
tca-jax bench end-to-end --models llama3.1-8b --mesh 1x1 --mesh 1x2 --mesh 1x4     # on one, two and four
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.sharding import Mesh

import tca_jax
from tca_jax.benchmarks.common import (
    COMPILED_AT_ONCE,
    COPIED_BYTES,
    check_sizes,
    check_whole_models,
    device_copy,
    find_layers,
    matrix_rate,
    plot_bars,
    print_row,
    write_results,
)
from tca_jax.benchmarks.decode_models import decoding_arguments, time_steps
from tca_jax.benchmarks.mesh_columns import Peaks, describe_meshes, held_columns, plot_meshes, with_speed_ups
from tca_jax.benchmarks.models import CONFIGS, abstract_model, random_model, under_share, weight_bytes
from tca_jax.benchmarks.options import (
    RESULTS,
    BackendOption,
    CopyBytesOption,
    LengthsOption,
    ModelsOption,
    NameOption,
    OutOption,
    RepeatsOption,
    WindowOption,
)
from tca_jax.benchmarks.shares import FULL, Share, SharesOption, check_shares, describe_config
from tca_jax.engine.decoding import STATE, DecodingState, decode, row_keys
from tca_jax.engine.generation import kept_share
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, OverMesh, mesh_entry, num_devices, parse_mesh
from tca_jax.engine.programs import Program, results_of
from tca_jax.engine.sampling import Sampling
from tca_jax.engine.starting import PROMPTS, prefill
from tca_jax.models.sharding import DATA, axis_size, check_mesh

PANELS = {"TTFT s": "time to first token, s", "ms/token": "time per further token, ms", "KV GB": "KV cache, GB"}

MeshesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--mesh",
        help="Devices that share a model: those on data x those on model; several are compared with the first.",
        show_default="one device",
    ),
]


@dataclasses.dataclass(frozen=True)
class Run:
    """Programs of one model under one attention at one prompt length."""

    lm: LM
    tokens: jax.Array
    lengths: jax.Array
    new_tokens: int
    backend: str
    prefill: Program = dataclasses.field(default_factory=lambda: Program(OverMesh(prefill, PROMPTS, STATE)))
    decode: Program = dataclasses.field(
        default_factory=lambda: Program(OverMesh(decode, (STATE, SAME, SAME), STATE), donate=(1,))
    )

    @property
    def prompt(self) -> tuple[Any, ...]:
        """Arguments of prefill."""
        keys = row_keys(jax.random.key(0), self.tokens.shape[0])
        return self.lm, self.tokens, self.lengths, keys, Sampling(), jnp.zeros(0, jnp.int32)

    def compile(self) -> tuple[Callable[..., DecodingState], Callable[..., DecodingState], float]:
        """Both programs and the seconds that they took to trace and compile."""
        first, seconds = self.prefill.prepare(*self.prompt, new_tokens=self.new_tokens, backend=self.backend)
        state = results_of(first)
        rest, more = self.decode.prepare(*decoding_arguments(self.lm, state, 1), backend=self.backend)
        return first, rest, seconds + more


def share_of_ranked(kept: float, config: tca_jax.TCAConfig, tokens: int) -> Share:
    """The share of ranked blocks that keeps about `kept` of a prompt, window and reserve included; 1 is full attention.

    Raises:
        ValueError: these alone are more than `kept`.
    """
    if kept == FULL.cache:
        return FULL
    window = config.window + config.block_size / 2  # the mean: the window's left edge lies on a block
    ranked = config.num_ranked_blocks(tokens) * config.block_size
    selected = (kept * tokens - window - config.reserve_tokens) / max(ranked, 1)
    if selected <= 0:
        raise ValueError(
            f"a window of {config.window} and a reserve of {config.reserve_tokens} are more than {kept:.1%} of "
            f"{tokens:,} tokens"
        )
    return Share(selected)


def attentions(
    kept: Sequence[float], shares: Sequence[Share], config: tca_jax.TCAConfig, tokens: int
) -> dict[str, Share]:
    """What is compared, by the names in the tables: shares of all tokens, then of ranked blocks.

    Raises:
        ValueError: window and reserve alone are more than is to be kept.
    """
    of_tokens = {
        "full" if share == FULL.cache else f"TCA {100 * share:g}%": share_of_ranked(share, config, tokens)
        for share in kept
    }
    return of_tokens | {share.name: share for share in shares}


def prefill_flops(lm: LM, tokens: int, area: float) -> float:
    """Operations of a prompt's matrix products and of `area` of its causal attention."""
    c = lm.config
    width = c.num_heads * c.head_dim
    weights = c.hidden_size * (2 * width + 2 * c.num_kv_heads * c.head_dim + 3 * c.intermediate_size)
    return c.num_layers * (2 * weights * tokens + 4 * width * area * tokens**2 / 2)


def computed_area(lm: LM, tokens: int) -> float:
    """Query-key pairs over those of causal attention; blocks are taken to keep their head's mean budget."""
    policy = lm.method.cache
    w = min(policy.local_window(tokens), tokens)
    per_layer = [policy.prefill_capacities(layer, tokens) for layer in range(lm.config.num_layers)]
    selected = [
        policy.capacities(layer, tokens) if capacities is None else capacities
        for layer, capacities in enumerate(per_layer)
    ]
    beyond = tokens - w
    return (float(np.mean(selected)) * beyond / 2 + w * beyond + w * w / 2) / (tokens**2 / 2)


def memory_bytes(executable: Any) -> int:
    """Device memory that a program needs while it runs, its arguments included."""
    used = executable.memory_analysis()
    return used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes - used.alias_size_in_bytes


def under_shares(lm: LM, shares: dict[str, Share], config: tca_jax.TCAConfig) -> tuple[LM, dict[str, LM]]:
    """The model under each share, with KV heads where the last one balances: others get along with these places, and a
    mesh need not hold weights twice. Also the model that they share their weights with, in place of the given one."""
    lm = under_share(lm, list(shares.values())[-1], config)
    return lm, {attention: under_share(lm, share, config) for attention, share in shares.items()}


def compile_seconds(name: str, layers: int | None, tokens: int, share: Share, options: dict[str, Any]) -> list[float]:
    """Seconds that two new processes take, one after the other, to trace and compile both programs of a run.

    The first finds an empty compilation cache, the second what the first has left there. Processes of their own,
    for JAX numbers some kernels as it lowers them, so a process that compiled before asks for other ones.
    """
    arguments = json.dumps({"name": name, "layers": layers, "tokens": tokens, "share": str(share), **options})
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        for _ in range(2):
            command = [sys.executable, "-m", "tca_jax.benchmarks.end_to_end", arguments]
            child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            seconds.append(float(child.stdout.split()[-1]))
    return seconds


def _compile_once(
    name: str, layers: int | None, tokens: int, share: str, new_tokens: int, window: int, backend: str
) -> float:
    """What `compile_seconds` runs in each process."""
    lm = abstract_model(name, layers, max_positions=2 * tokens)
    lm = under_share(lm, Share.parse(share), tca_jax.TCAConfig(window=window))
    prompt = jnp.zeros((1, tokens), jnp.int32)
    return Run(lm, prompt, jnp.array([tokens], jnp.int32), new_tokens, backend).compile()[2]


def measure(
    lms: dict[str, LM],
    batch: int,
    tokens: int,
    new_tokens: int,
    backend: str,
    repeats: int,
    copied: float,
    multiplied: float,
) -> list[dict[str, Any]]:
    """One row for each attention; their prefills and their decodings take turns."""
    lm = next(iter(lms.values()))
    devices = num_devices(lm.mesh)
    prompt = jax.random.randint(jax.random.key(1), (batch, tokens), 0, lm.config.vocab_size)
    runs = {
        name: Run(lm, prompt.astype(jnp.int32), jnp.full(batch, tokens, jnp.int32), new_tokens, backend)
        for name, lm in lms.items()
    }
    with ThreadPoolExecutor(COMPILED_AT_ONCE) as pool:
        programs = dict(zip(runs, pool.map(lambda run: run.compile()[:2], runs.values()), strict=True))
    first: dict[str, list[float]] = {name: [] for name in runs}
    following: dict[str, list[float]] = {name: [] for name in runs}
    kept: dict[str, tuple[float, int]] = {}
    needed = {name: max(memory_bytes(program) for program in programs[name]) for name in runs}
    peaks = Peaks(lm.mesh)
    peak: dict[str, float | str] = dict.fromkeys(runs, "")
    for _ in range(repeats):
        for name in sorted(runs, key=needed.__getitem__):  # see `Peaks`
            run = runs[name]
            start_program, step_program = programs[name]
            arguments = run.prompt
            start = time.perf_counter()
            state = jax.block_until_ready(start_program(*arguments))
            first[name].append(time.perf_counter() - start)
            state, step = time_steps(step_program, run.lm, state, new_tokens)
            following[name].append(step)
            head_dim, dtype = run.lm.config.head_dim, state.caches[0].ring.k.dtype
            kept[name] = kept_share(state), sum(cache.layout.num_bytes(head_dim, dtype) for cache in state.caches)
            del state
            grown = peaks.grown()
            peak[name] = peak[name] or grown
    rows = []
    for name, run in runs.items():
        share, cache_bytes = kept[name]
        seconds, step = statistics.median(first[name]), statistics.median(following[name])
        config = run.lm.config
        kept_bytes = (
            2 * share * batch * tokens * config.num_kv_heads * config.head_dim * jnp.dtype(config.dtype_name).itemsize
        )
        read = axis_size(lm.mesh, DATA) * weight_bytes(run.lm) + config.num_layers * kept_bytes
        floor = batch * prefill_flops(run.lm, tokens, computed_area(run.lm, tokens)) / (devices * multiplied)
        rows.append(
            {
                **mesh_entry(lm.mesh),
                "tokens": tokens,
                "attention": name,
                "kept": share,
                "TTFT s": seconds,
                "TTFT speed-up": statistics.median(first["full"]) / seconds if "full" in first else "",
                "over arithmetic floor": seconds / floor,
                "ms/token": 1e3 * step,
                "ms/token speed-up": statistics.median(following["full"]) / step if "full" in first else "",
                "over byte floor": step / (read / (devices * copied)),
                "KV GB": devices * cache_bytes / 1e9,
                "peak GB": needed[name] / 1e9,
                **({} if lm.mesh is None else held_columns(run.lm, batch, tokens, new_tokens)),
                **({} if lm.mesh is None else {"measured peak GB": peak[name]}),
            }
        )
    return rows


def describe(
    new_tokens: int,
    config: tca_jax.TCAConfig,
    repeats: int,
    copied: float,
    multiplied: float,
    with_compilation: bool,
    meshes: Sequence[Mesh] = (),
    batch: int = 1,
) -> str:
    """What the columns mean; `copied` is what `device_copy` says, `multiplied` what `matrix_rate` does."""
    text = (
        f"Random weights of true size, batch {batch}, {new_tokens} new tokens. TCA runs a synthetic profile, the same "
        f"in every layer: budgets {describe_config(config)}. One number in its name is the share of all tokens that it "
        "keeps, window and reserve included; `kept` is the measured share. Behind a prompt of whole blocks the first "
        "block leaves the window at new token 129. `TTFT` is the time from token ids to the first new token, "
        f"`ms/token` the mean of the tokens behind it, both medians over {repeats} rounds, the attentions in turns. "
        "`over arithmetic floor` is TTFT over "
        "the time of its matrix products and of the attention that is computed at the rate of a large matrix product, "
        f"{multiplied / 1e12:.0f} TFLOP/s; `over byte floor` the time per token over that of reading the weights and "
        f"the kept keys and values at the rate of a device copy, {copied / 1e9:,.0f} GB/s read and written. `KV GB` is "
        "the cache as allocated, `peak GB` the most that a program holds by the compiler's account, weights included."
    )
    text += describe_meshes(meshes, batch)
    return text + (
        " The second table has the seconds that new processes take to trace and compile both programs of a shape, the "
        "first with an empty compilation cache, the second with what it leaves there."
        if with_compilation
        else ""
    )


def main(
    lengths: LengthsOption = None,
    models: ModelsOption = None,
    kept: Annotated[
        list[float] | None, typer.Option(help="Kept shares of all tokens, window included; 1 is full attention.")
    ] = None,
    shares: SharesOption = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=4)] = 192,
    layers: Annotated[int | None, typer.Option(help="Layers; all by default.", min=1)] = None,
    backend: BackendOption = "auto",
    window: WindowOption = tca_jax.TCAConfig.window,
    compilation: Annotated[bool, typer.Option(help="Time compilation too, in new processes, on one device.")] = True,
    mesh: MeshesOption = None,
    copy_bytes: CopyBytesOption = COPIED_BYTES,
    repeats: RepeatsOption = 3,
    out: OutOption = RESULTS,
    name: NameOption = "end-to-end",
) -> None:
    """Time whole models with random weights, from prompt to answer, under full attention and under TCA.

    Example: [bold]tca-jax bench end-to-end --lengths 131072 --models llama3.1-8b[/]
    """
    lengths = lengths or [2**17]
    whole_models, config = find_layers(models), tca_jax.TCAConfig(window=window)
    kept, shares = kept or [FULL.cache, *(() if shares else (0.185, 0.39))], shares or []
    check_shares([Share(share) for share in kept if share != FULL.cache], "--kept")
    check_shares(shares)
    names = [layer.name for layer in whole_models]
    check_whole_models(whole_models)
    by_length = {tokens: attentions(kept, shares, config, tokens) for tokens in lengths}
    meshes = [parse_mesh(text, "--mesh") for text in mesh or ()]
    compilation &= not meshes
    for devices, model in itertools.product(meshes, names):
        check_mesh(devices, CONFIGS[model], model)
    batch = math.lcm(*(axis_size(devices, DATA) for devices in meshes))  # the same prompts on every mesh
    check_sizes(lengths, config, [backend], out)
    copied = device_copy(copy_bytes, repeats)
    multiplied = matrix_rate(repeats)
    print(f"device copy: {copied / 1e9:,.0f} GB/s, matrix product: {multiplied / 1e12:,.0f} TFLOP/s", flush=True)
    # Profiles differ in numbers, not in programs: one of each kind is compiled for the table.
    longest = by_length[max(lengths)]
    kinds = {(share == FULL, share.prefill is None): name for name, share in reversed(longest.items())}
    rows, compiled = [], []
    options = {"new_tokens": new_tokens, "window": window, "backend": backend}
    for model in names:
        for attention in kinds.values() if compilation else ():
            cold, cached = compile_seconds(model, layers, max(lengths), longest[attention], options)
            shape = {"model": model, "tokens": max(lengths), "attention": attention}
            compiled.append({**shape, "cold s": cold, "cached s": cached})
            print_row(compiled[-1])
        for shared_by in meshes or (None,):
            lm = random_model(model, jax.random.key(0), layers, max_positions=2 * max(lengths), mesh=shared_by)
            for tokens in lengths:
                lm, lms = under_shares(lm, by_length[tokens], config)
                for row in measure(lms, batch, tokens, new_tokens, backend, repeats, copied, multiplied):
                    rows.append({"model": model, **row})
                    print_row(rows[-1])
            del lm, lms
            gc.collect()  # the next model is loaded where this one was
    if len(meshes) > 1:
        rows = with_speed_ups(rows)
    note = describe(new_tokens, config, repeats, copied, multiplied, compilation, meshes, batch)
    more = {"Compilation": compiled} if compilation else {}
    write_results(name, "Whole models, from prompt to answer", rows, out, note, more)
    title = f"Whole models, batch {batch}"
    if len(meshes) > 1:
        plot_meshes(rows, title, out / f"{name}.png")
    else:
        plot_bars(rows, PANELS, title, out / f"{name}.png")


if __name__ == "__main__":
    print(_compile_once(**json.loads(sys.argv[1])))
