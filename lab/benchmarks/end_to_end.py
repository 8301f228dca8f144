"""`tca-jax bench end-to-end`: models from prompt to answer, attention methods side by side."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import statistics
import timeit
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np
import typer
from jax.sharding import Mesh

import tca_jax
from tca_jax.cli.options import BackendOption, launched_in_order
from tca_jax.engine.lm import LM
from tca_jax.engine.placement import parse_mesh
from tca_jax.lab.benchmarks import common
from tca_jax.lab.benchmarks import models as shapes
from tca_jax.models.sharding import DATA, axis_size
from tca_jax.pallas_kernels.kv import num_bytes

NOTE = (
    "{new_tokens} new tokens per answer, {rows} prompts of random tokens at once; medians of {repeats} calls of "
    "`generate` in turns, after one that compiles (`compile s`). `TTFT s`: seconds to the first new token; "
    "`ms/token`: mean of further ones; speed-ups are over full attention. `kept`: share of tokens in the cache; "
    "`area`: attended share of causal pairs. `over arithmetic floor`: TTFT over matrix products and `area` at "
    "{multiplied:,.0f} TFLOP/s (a large product); `over byte floor`: a token over weights and kept keys and values at "
    "{copied:,.0f} GB/s (a device copy). `GB per device`: weights and cache; `peak GB`: the process's most. {shares}"
)
QUESTION_TOKENS = 64  # of a question about a document
#: Parts of a model that are stored in fp8.
Stored = enum.StrEnum("Stored", ["NOTHING", "WEIGHTS", "KV", "BOTH", "ATTENTION", "ALL"])


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Settings that all rows share."""

    rows: int  # prompts at once
    new_tokens: int
    backend: str
    repeats: int
    copied: float  # bytes per second of a device copy
    multiplied: float  # FLOP/s of a large matrix product


def random_prompts(lm: LM, rows: int, tokens: int, seed: int = 1) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, lm.config.vocab_size, (rows, tokens)).tolist()


def measure(lms: Mapping[str, LM], tokens: int, given: Conditions) -> list[common.Row]:
    """A row for each attention that fits; calls take turns."""

    def ask(lm: LM) -> tca_jax.Stats:
        prompts, length = random_prompts(lm, given.rows, tokens), given.new_tokens
        return tca_jax.generate(lm, prompts, max_new_tokens=length, stop_token_ids=(), backend=given.backend).stats

    stats: dict[str, list[tca_jax.Stats]] = {}
    for name, lm in lms.items():
        if first := common.fitted(functools.partial(ask, lm), f"{tokens:,} tokens, {name}"):
            stats[name] = [first]
    peaks = dict.fromkeys(stats, 0.0)
    for name in list(stats) * given.repeats:
        stats[name].append(ask(lms[name]))
        peaks[name] = common.peak_bytes() / 1e9
    found = {name: row_of(lms[name], name, tokens, of_method, given) for name, of_method in stats.items()}
    for name, row in found.items():
        row |= {"peak GB": peaks[name] or "", "compile s": stats[name][0].compile_seconds}
        for column in {"TTFT s", "ms/token"} & row.keys() if "full" in found else ():
            row[f"{column.removesuffix(' s')} speed-up"] = found["full"][column] / row[column]
    return list(found.values())


def row_of(lm: LM, name: str, tokens: int, stats: Sequence[tca_jax.Stats], given: Conditions) -> common.Row:
    """Times, floors and bytes of calls, of which the first compiled."""
    last, devices, config = stats[-1], 1 if lm.mesh is None else lm.mesh.size, lm.config
    ttft = statistics.median(each.prefill_seconds for each in stats[1:])
    flops = given.rows * prefill_flops(lm, tokens, last.attended_share)
    row = {"model": lm.name, **shapes.mesh_entry(lm), "tokens": tokens, "attention": name}
    row |= {"kept": last.kept_share, "area": last.attended_share, "TTFT s": ttft, "TTFT speed-up": ""}
    row["over arithmetic floor"] = ttft * devices * given.multiplied / flops
    if given.new_tokens > 1:
        step = statistics.median(each.seconds_per_token for each in stats[1:])
        kept = math.ceil(last.kept_share * given.rows * tokens * config.num_kv_heads * config.num_layers)
        read = axis_size(lm.mesh, DATA) * shapes.weight_bytes(lm) + 2 * num_bytes(kept, config.head_dim, lm.cache_dtype)
        row |= {"ms/token": 1e3 * step, "ms/token speed-up": ""}
        row["over byte floor"] = step * devices * given.copied / read
    weights = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(lm.params))
    return row | {"KV GB": last.kv_cache_bytes / 1e9, "GB per device": (weights + last.kv_cache_bytes_per_device) / 1e9}


def measure_questions(
    lms: Mapping[str, LM], tokens: int, numbers: Sequence[int], given: Conditions
) -> list[common.Row]:
    """Seconds to read a document once, and to the first token of questions about it."""
    found = []
    for name, lm in lms.items() if numbers else ():
        (document,) = random_prompts(lm, 1, tokens)
        read = functools.partial(tca_jax.prefill, lm, document, backend=given.backend)
        if (context := common.fitted(read, f"{lm.name}, a document of {tokens:,}, {name}")) is None:
            continue
        reading = context.stats.prefill_seconds
        for number in numbers:
            questions = random_prompts(lm, number, QUESTION_TOKENS, seed=2)

            def ask(questions: Any = questions, lm: LM = lm, context: Any = context) -> Any:
                return tca_jax.generate(lm, questions, context=context, max_new_tokens=1, backend=given.backend)

            ask()
            seconds = statistics.median(timeit.repeat(ask, number=1, repeat=given.repeats))
            row = {"model": lm.name, "tokens": tokens, "attention": name, "read s": reading, "questions": number}
            found.append({**row, "first token ms": 1e3 * seconds})
        del context
    return found


def prefill_flops(lm: LM, tokens: int, area: float) -> float:
    """Operations of a prompt's matrix products and of `area` of its causal attention."""
    c = lm.config
    width = c.num_heads * c.head_dim
    weights = c.hidden_size * (2 * width + 2 * c.num_kv_heads * c.head_dim + 3 * c.intermediate_size)
    return c.num_layers * (2 * weights * tokens + 4 * width * area * tokens**2 / 2)


def main(
    lengths: common.LengthsOption = None,
    models: common.ModelsOption = None,
    profile: Annotated[str | None, typer.Option(help="Profile of a checkpoint.", show_default="none")] = None,
    shares: shapes.BlockSharesOption = None,
    worth: shapes.WorthOption = None,
    methods: shapes.MethodsOption = None,
    full: Annotated[bool, typer.Option(help="Measure full attention, too.")] = True,
    new_tokens: Annotated[int, typer.Option(help="Tokens of an answer; 1 times the prompt alone.", min=1)] = 192,
    questions: Annotated[
        list[int] | None, typer.Option(help="Questions at once about a document that was read before.", min=1)
    ] = None,
    rows: Annotated[int, typer.Option(help="Prompts at once, for each device on data.", min=1)] = 1,
    mesh: Annotated[
        list[str] | None,
        typer.Option("--mesh", help="Devices on data x model, such as 1x4.", callback=launched_in_order),
    ] = None,
    fp8: Annotated[
        list[Stored] | None, typer.Option(help="What is in fp8, both: weights and kv; may be repeated.")
    ] = None,
    backend: BackendOption = "auto",
    window: common.WindowOption = tca_jax.TCAConfig.window,
    repeats: common.RepeatsOption = 3,
    out: common.OutOption = common.RESULTS,
    name: common.NameOption = "end-to-end",
) -> None:
    """Time models from prompt to answer: first token, further tokens, memory.

    --models also takes a folder, a GGUF file, an alias or a Hub id; such a model runs under --profile, too.

    Example: [bold]tca-jax bench end-to-end --models llama3.1-8b --lengths 131072[/]
    """
    lengths, config = lengths or [2**17], common.tca_config(window)
    models = models or ["llama3.1-8b"]
    shapes.find_configs([each for each in models if each in shapes.CONFIGS] or None, complete=True, default=())
    shares = shares or ([] if methods or profile or worth else [0.25])
    others = shapes.parse_methods(methods)
    common.check_lengths(lengths, config, out)
    meshes: list[Mesh | None] = [parse_mesh(text, "--mesh") for text in mesh or ()] or [None]
    batch = rows * math.lcm(*(axis_size(devices, DATA) for devices in meshes))  # the same prompts on every mesh
    given = Conditions(batch, new_tokens, backend, repeats, common.copy_rate(repeats), common.product_rate(repeats))
    sizes = {**dataclasses.asdict(given), "copied": given.copied / 1e9, "multiplied": given.multiplied / 1e12}
    note = NOTE.format(**sizes, shares=shapes.describe_shares(config))
    results = common.Results(out, name, "Whole models, from prompt to answer", note)
    for model, devices, stored in itertools.product(models, meshes, fp8 or [Stored.NOTHING]):
        options: dict[str, Any] = {"mesh": devices}
        parts = {"both": ("weights", "kv"), "all": ("weights", "kv", "attention")}.get(stored, (stored,))
        options |= {part: "fp8" for part in parts if part != Stored.NOTHING}
        options["sizes"] = {"max_positions": max(lengths) + new_tokens + QUESTION_TOKENS}
        opened = functools.partial(shapes.open_model, model, profile, **options)
        if (lm := common.fitted(opened, f"the weights of {model}, {stored} in fp8")) is None:
            continue
        lms = shapes.named_models(lm, config, shares, worth or (), max(lengths), full=full, others=others)
        kind = {"fp8": str(stored)} if fp8 else {}
        for tokens in lengths:
            for row in measure(lms, tokens, given):
                results.add("From prompt to answer", kind | row)
            for row in measure_questions(lms, tokens, questions or (), given):
                results.add(f"Questions of {QUESTION_TOKENS} tokens about one document", kind | row)
        del lm, lms
    results.finish()
