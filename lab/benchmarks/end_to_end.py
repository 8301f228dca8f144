"""Whole models of true size with random weights: full attention and TCA side by side, from prompt to answer.

tca-jax bench end-to-end                                        # the committed table, minutes on one GPU
tca-jax bench end-to-end --lengths 1048576 --models qwen2.5-7b --kept 0.185 --new-tokens 64 --repeats 1
tca-jax bench end-to-end --models llama3.1-8b --block-shares 0.05:0.25 --new-tokens 8 --no-compilation
tca-jax bench end-to-end --models llama3.1-8b --block-shares 0.05:0.25 --fetching 16 --new-tokens 1  # reading
tca-jax bench end-to-end --models llama3.1-8b --fp8 nothing --fp8 weights --fp8 both --block-shares 0.05:0.25
tca-jax bench end-to-end --models llama3.1-70b --fp8 both --block-shares 0.05:0.25 --no-full    # on one H200
tca-jax bench end-to-end --models llama3.1-8b --mesh 1x4        # the model on four devices
tca-jax bench end-to-end --models llama3.1-8b --mesh 1x1 --mesh 1x2 --mesh 1x4     # on one, two and four
"""

from __future__ import annotations

import enum
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Annotated, Any

import jax.numpy as jnp
import typer
from jax.sharding import Mesh

import tca_jax
from tca_jax.cli.options import BackendOption, launched_in_order
from tca_jax.engine.mesh import mesh_name, parse_mesh
from tca_jax.errors import UserError, least_share
from tca_jax.lab.benchmarks.common import (
    COPIED_BYTES,
    check_sizes,
    check_whole_models,
    device_copy,
    find_layers,
    matrix_rate,
    plot_bars,
    print_row,
    tca_config,
    write_results,
)
from tca_jax.lab.benchmarks.mesh_columns import describe_meshes, plot_meshes, with_speed_ups
from tca_jax.lab.benchmarks.models import CONFIGS, abstract_model, under_share
from tca_jax.lab.benchmarks.options import (
    RESULTS,
    CopyBytesOption,
    LengthsOption,
    ModelsOption,
    NameOption,
    OutOption,
    RepeatsOption,
    WindowOption,
)
from tca_jax.lab.benchmarks.shares import (
    FULL,
    BlockSharesOption,
    FetchingOption,
    Share,
    check_fetching,
    check_shares,
    describe_config,
    describe_fetching,
    with_fetching,
)
from tca_jax.lab.benchmarks.whole_models import Conditions, Run, make_weights, measure_model
from tca_jax.models.sharding import DATA, axis_size, check_mesh

PANELS = {"TTFT s": "time to first token, s", "ms/token": "time per further token, ms", "KV GB": "KV cache, GB"}

_ROOM = 1e-4  # of a prompt, the least share of it that ranked blocks are left with
_LEAST_STEPS = 4  # new tokens that a step can be timed by


class Stored(enum.StrEnum):
    """What a model stores in eight bits."""

    NOTHING = "nothing"
    WEIGHTS = "weights"
    KV = "kv"
    BOTH = "both"

    @property
    def options(self) -> dict[str, str | None]:
        """Options of `tca_jax.load`."""
        return {
            "weights": "fp8" if self in (Stored.WEIGHTS, Stored.BOTH) else None,
            "kv": "fp8" if self in (Stored.KV, Stored.BOTH) else None,
        }


MeshesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--mesh",
        help="Devices that share a model: those on data x those on model; several are compared with the first.",
        show_default="one device",
        callback=launched_in_order,
    ),
]


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
        least = (window + config.reserve_tokens) / tokens + _ROOM
        raise UserError(
            f"--kept {kept}: must be {f'at least {least_share(least)}' if least < 1 else '1'} at --lengths {tokens}: "
            f"window {config.window} and reserve {config.reserve_tokens} take more; a smaller --window takes less"
        )
    return Share(selected)


def attentions(
    kept: Sequence[float],
    shares: Sequence[Share],
    config: tca_jax.TCAConfig,
    tokens: int,
    fetching: Sequence[int] | None = None,
) -> dict[str, Share]:
    """What is compared, by the names in the tables: shares of all tokens, then of ranked blocks, by heads that fetch.

    Raises:
        ValueError: window and reserve alone are more than is to be kept.
    """
    of_tokens = {
        share: "full" if number == FULL.cache else f"TCA {100 * number:g}%{share.fetching_suffix}"
        for number in kept
        for share in with_fetching([share_of_ranked(number, config, tokens)], fetching)
    }
    named = of_tokens | {share: share.name for share in with_fetching(shares, fetching)}
    return {name: share for share, name in named.items()}


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
            command = [sys.executable, "-m", "tca_jax.lab.benchmarks.end_to_end", arguments]
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


def describe(
    conditions: Conditions,
    config: tca_jax.TCAConfig,
    with_compilation: bool,
    meshes: Sequence[Mesh],
    unfit: Sequence[str],
    fetching: Sequence[int] | None = None,
    fp8: Sequence[Stored] | None = None,
) -> str:
    """What the columns mean, and what memory did not suffice for."""
    given = conditions
    text = (
        f"Random weights of true size, batch {given.batch}, {given.new_tokens} new tokens. TCA runs a synthetic "
        f"profile, the same in every layer: budgets {describe_config(config)}. One number in its name is the share of "
        "all tokens that it keeps, window and reserve included; `kept` is the measured share, `area` that of the "
        "prompt's pairs of a query and a key which were attended to. Behind a prompt of whole blocks the first block "
        "leaves the window at new token 129. `TTFT` is the time from token ids to the first new "
        f"token, `ms/token` the mean of the tokens behind it, both medians over {given.repeats} rounds, the attentions "
        "in turns. `over arithmetic floor` is TTFT over the time of its matrix products and of the attention that is "
        f"computed at the rate of a large matrix product, {given.multiplied / 1e12:.0f} TFLOP/s; `over byte floor` the "
        "time per token over that of reading the weights and the kept keys and values at the rate of a device copy, "
        f"{given.copied / 1e9:,.0f} GB/s read and written. `KV GB` is the cache as allocated, `peak GB` the most that "
        "a program holds by the compiler's account, weights included."
    )
    text += describe_fetching(config, fetching)
    text += describe_meshes(meshes, given.batch)
    if fp8:
        text += (
            " `fp8` is what is stored in e4m3: the weights of projections and MLP, whose products with a prompt are "
            "then cuBLASLt's in e4m3, the KV cache, or both. Speed-ups are over full attention in the same storage. "
            "The arithmetic floor is that of 16 bits."
        )
    if unfit:
        text += f" Memory did not suffice for {'; '.join(unfit)}."
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
    shares: BlockSharesOption = None,
    fetching: FetchingOption = None,
    full: Annotated[bool, typer.Option(help="Measure full attention too, which speed-ups are over.")] = True,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens of an answer, at least 4; or 1: prompts are only read.", min=1)
    ] = 192,
    layers: Annotated[int | None, typer.Option(help="Layers; all by default.", min=1)] = None,
    backend: BackendOption = "auto",
    window: WindowOption = tca_jax.TCAConfig.window,
    compilation: Annotated[bool, typer.Option(help="Time compilation too, in new processes, on one device.")] = True,
    mesh: MeshesOption = None,
    fp8: Annotated[
        list[Stored] | None, typer.Option(help="What is stored in fp8; several are measured one after the other.")
    ] = None,
    copy_bytes: CopyBytesOption = COPIED_BYTES,
    repeats: RepeatsOption = 3,
    out: OutOption = RESULTS,
    name: NameOption = "end-to-end",
) -> None:
    """Time whole models with random weights, from prompt to answer, under full attention and under TCA.

    Example: [bold]tca-jax bench end-to-end --lengths 131072 --models llama3.1-8b[/]
    """
    lengths = lengths or [2**17]
    whole_models, config = find_layers(models), tca_config(window)
    kept, shares = kept or [FULL.cache, *(() if shares else (0.185, 0.39))], shares or []
    kept = [share for share in kept if full or share != FULL.cache]
    if not kept and not shares:
        raise UserError("--no-full: nothing is left to measure; give --kept below 1 or --block-shares")
    check_shares([Share(share) for share in kept if share != FULL.cache], "--kept")
    check_shares(shares)
    if 1 < new_tokens < _LEAST_STEPS:
        raise UserError(f"--new-tokens {new_tokens}: must be 1, or at least {_LEAST_STEPS}")
    names = [layer.name for layer in whole_models]
    check_whole_models(whole_models)
    for model in names:
        check_fetching(fetching, CONFIGS[model].num_kv_heads * (layers or CONFIGS[model].num_layers), model)
    check_sizes(lengths, config, [backend], out)
    by_length = {tokens: attentions(kept, shares, config, tokens, fetching) for tokens in lengths}
    meshes = [parse_mesh(text, "--mesh") for text in mesh or ()]
    compilation &= not meshes and not fp8
    for devices, model in itertools.product(meshes, names):
        check_mesh(devices, CONFIGS[model], model)
    batch = math.lcm(*(axis_size(devices, DATA) for devices in meshes))  # the same prompts on every mesh
    copied = device_copy(copy_bytes, repeats)
    multiplied = matrix_rate(repeats)
    print(f"device copy: {copied / 1e9:,.0f} GB/s, matrix product: {multiplied / 1e12:,.0f} TFLOP/s", flush=True)
    # Profiles differ in numbers, not in programs: one of each kind is compiled for the table.
    longest = by_length[max(lengths)]
    kinds = {
        (share == FULL, share.prefill is None, bool(share.fetching)): name for name, share in reversed(longest.items())
    }
    rows, compiled, unfit = list[dict[str, Any]](), list[dict[str, Any]](), list[str]()
    conditions = Conditions(batch, new_tokens, backend, repeats, copied, multiplied)
    options = {"new_tokens": new_tokens, "window": window, "backend": backend}

    def write(finished: bool) -> None:
        note = describe(conditions, config, compilation, meshes, unfit, fetching, fp8)
        note += "" if finished else " The run was going on when this was written."
        more = {"Compilation": compiled} if compilation else {}
        shown = with_speed_ups(rows) if len(meshes) > 1 else rows
        write_results(name, "Whole models, from prompt to answer", shown, out, note, more, shown=finished)

    for model in names:
        for attention in kinds.values() if compilation else ():
            cold, cached = compile_seconds(model, layers, max(lengths), longest[attention], options)
            shape = {"model": model, "tokens": max(lengths), "attention": attention}
            compiled.append({**shape, "cold s": cold, "cached s": cached})
            print_row(compiled[-1])
            write(finished=False)
        for shared_by, stored in itertools.product(meshes or (None,), fp8 or (Stored.NOTHING,)):
            place = model if shared_by is None else f"{model} on {mesh_name(shared_by)}"
            place += f", {stored} in fp8" if fp8 else ""
            make = functools.partial(make_weights, model, place, layers, 2 * max(lengths), shared_by, **stored.options)
            for found in measure_model(make, place, by_length, config, conditions, unfit):
                for row in found:
                    rows.append({"model": model, **({"fp8": str(stored)} if fp8 else {}), **row})
                    print_row(rows[-1])
                write(finished=False)
    write(finished=True)
    if not rows:
        raise typer.Exit(1)
    title = f"Whole models, batch {batch}"
    if len(meshes) > 1:
        plot_meshes(with_speed_ups(rows), title, out / f"{name}.png")
    else:
        panels = PANELS | ({"peak GB": "most memory of a program, GB"} if fp8 else {})
        panels = {column: label for column, label in panels.items() if column in rows[0]}
        plot_bars(rows, panels, title, out / f"{name}.png")


if __name__ == "__main__":
    print(_compile_once(**json.loads(sys.argv[1])))
