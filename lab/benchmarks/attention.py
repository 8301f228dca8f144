"""`tca-jax bench attention`: prefill attention of one layer, with selection, against full attention."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Array

import tca_jax
from tca_jax.errors import UserError
from tca_jax.lab.benchmarks import common
from tca_jax.lab.benchmarks import models as shapes
from tca_jax.methods.base import Attended, Heads, Method, last_queries, per_head
from tca_jax.methods.regions import Regions, Selected, causal_pairs
from tca_jax.methods.worth import BLOCK, WINDOW, ReadSettings, by_worth, choose_by_worth
from tca_jax.models.config import ModelConfig
from tca_jax.pallas_kernels.backends import can_run, resolve_backend
from tca_jax.pallas_kernels.numerics import cdiv
from tca_jax.pallas_kernels.prefill_attention import prefill_attention

NOTE = (
    "One layer, one prompt, random bfloat16 inputs; medians over {repeats} rounds in turns with full causal attention "
    "by cuDNN (XLA without a GPU). `total ms`: selection and attention in one program; `selection ms`: a program of "
    "its own. `kept`: share of the tokens in cache and window; `area`: attended share of causal pairs, which alone "
    "`TFLOP/s on area` counts, over the rest of the time. `error`: relative to the XLA oracle at up to {checked} "
    "tokens. {shares}"
)

#: Shares of the tokens that the KV heads of a layer read under predicted worth; most heads read blocks and means alone.
_READ = {"worth": (0.51, 0.32, 0.1, 0.03, 0, 0, 0, 0), "worth, one head": (0.98, 0, 0, 0, 0, 0, 0, 0)}
_SCORE = 5.4  # of blocks that are read, over that of equal ones: 2.4% of long prompts of random keys in groups of four
_EXACT, _ESTIMATED = 1e-2, 0.1  # most relative error; backends may choose other blocks of nearly the same estimate


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer's prefill under a method on a backend; arguments are `attention_inputs`."""

    name: str
    method: Method
    backend: Any

    def select(self, q: Array, k: Array, v: Array, n: Array) -> tuple[Selected, Selected | None] | None:
        """The cache's selection and that of the prompt queries; None where nothing is ranked."""
        policy, (batch, tokens, kv_heads, _) = self.method.cache, k.shape
        if not policy.num_ranked_blocks(tokens):
            return None
        heads = Heads.all(kv_heads)
        selection = policy.select(0, heads, last_queries(q, n, policy.num_queries), k, v, n)
        capacities = per_head(policy.capacities(0, tokens), kv_heads, self.name)
        regions = Regions.plan(batch, heads.widest(capacities), policy.block_size)
        kept = regions.fill(selection, k, v, block_size=policy.block_size, backend=resolve_backend(self.backend))
        return kept, kept if self.method.prefill_reads_cache else None

    def attend(self, q: Array, k: Array, v: Array, n: Array, selected: Any) -> Attended:
        readable = None if selected is None else selected[1]
        return self.method.prefill.attend(0, Heads.all(k.shape[2]), q, k, v, n, readable, resolve_backend(self.backend))

    def run(self, q: Array, k: Array, v: Array, n: Array) -> tuple[Array, Selected | None]:
        """All of the layer: output, and kept tokens of the cache."""
        selected = self.select(q, k, v, n)
        return self.attend(q, k, v, n, selected).out, None if selected is None else selected[0]


@dataclasses.dataclass(frozen=True)
class WorthCase(Case):
    """A layer's prefill under predicted worth: random tokens in given shares, blocks by score, the others' means."""

    shares: tuple[float, ...] = ()  # of the tokens, by KV head

    def select(self, q: Array, k: Array, v: Array, n: Array) -> Any:
        length, heads = k.shape[1:3]
        worth = jax.random.uniform(jax.random.key(0), (1, heads, length)) + np.resize(self.shares, heads)[:, None]
        score = _SCORE / jnp.arange(1, cdiv(length, BLOCK) + 1)[:, None]  # of the blocks of each tile
        settings, backend = ReadSettings(jnp.ones(()), score, jnp.array(True)), resolve_backend(self.backend)
        return choose_by_worth(q, k, v, worth, n, settings, backend=backend)

    def attend(self, q: Array, k: Array, v: Array, n: Array, selected: Any) -> Attended:
        (budgets, pool), sizes = selected.kept, {"block_size": BLOCK, "window": WINDOW}
        out = prefill_attention(q, k, v, pool, budgets, n, far=selected.far, backend=self.backend, **sizes)
        return Attended(out, selected.pairs)


def attention_inputs(config: ModelConfig, tokens: int, seed: int) -> tuple[Array, Array, Array, Array]:
    """Random q `[1, L, H_q, d]`, k and v `[1, L, H_kv, d]` in bfloat16, and the length `[1]`."""
    keys, heads = jax.random.split(jax.random.key(seed), 3), (config.num_heads, *[config.num_kv_heads] * 2)
    sizes = [(1, tokens, count, config.head_dim) for count in heads]
    q, k, v = (common.random_normal(key, size, jnp.bfloat16) for key, size in zip(keys, sizes, strict=True))
    return q, k, v, jnp.full(1, tokens, jnp.int32)


def measure(model: str, tokens: int, cases: Sequence[Case], repeats: int) -> list[common.Row]:
    """A row for each case; all take turns with full attention."""
    config = shapes.CONFIGS[model]
    inputs = attention_inputs(config, tokens, seed=tokens)
    implementation: Any = "cudnn" if can_run("cudnn") else "xla"
    full = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
    calls: dict[Any, Callable[[], Any]] = {"full": functools.partial(jax.jit(full), *inputs[:3])}
    rows: list[common.Row] = []
    for i, case in enumerate(cases):
        select = jax.jit(case.select)
        selected = select(*inputs)
        pairs = jax.jit(lambda *args, case=case: case.attend(*args).pairs)(*inputs, selected)
        calls[i, "total"] = functools.partial(jax.jit(case.run), *inputs)
        if selected is not None:
            calls[i, "selection"] = functools.partial(select, *inputs)
        row = {"model": model, "tokens": tokens, "attention": case.name, "backend": case.backend}
        held = tokens if selected is None else np.mean(np.asarray(selected[0].pool.lengths)) + case.method.cache.window
        row |= {"kept": float(held / tokens), "area": float(pairs[0] / causal_pairs(inputs[3])[0])}
        rows.append(row | {"error": check(config, case, min(tokens, common.CHECKED_TOKENS))})
    seconds = common.time_in_turns(calls, repeats)
    flops = 4 * config.head_dim * config.num_heads * tokens**2 / 2
    for i, row in enumerate(rows):
        total, selection = seconds[i, "total"], seconds.get((i, "selection"), 0.0)
        row |= {"full ms": 1e3 * seconds["full"], "speed-up": seconds["full"] / total}
        row |= {"total ms": 1e3 * total, "selection ms": 1e3 * selection}
        row["TFLOP/s on area"] = flops * row["area"] / (total - selection) / 1e12
        row["full TFLOP/s"] = flops / seconds["full"] / 1e12
    return rows


def check(config: ModelConfig, case: Case, tokens: int) -> float:
    """Relative error of attention over one selection against the XLA oracle."""
    inputs = attention_inputs(config, tokens, seed=1)
    selected = jax.jit(case.select)(*inputs)
    run = lambda backend: jax.jit(dataclasses.replace(case, backend=backend).attend)(*inputs, selected).out  # noqa: E731
    exact = case.method.prefill_reads_cache
    return common.agreement(case.backend, run, _EXACT if exact else _ESTIMATED)


def main(
    lengths: common.LengthsOption = None,
    models: common.ModelsOption = None,
    shares: shapes.BlockSharesOption = None,
    methods: shapes.MethodsOption = None,
    worth: Annotated[
        bool, typer.Option("--worth", help="Predicted worth: tokens, blocks (all up to 4,096 tokens), means.")
    ] = False,
    backend: Annotated[list[str] | None, typer.Option(help="Kernels.", show_default="all that run here")] = None,
    window: common.WindowOption = tca_jax.TCAConfig.window,
    reserve: Annotated[int | None, typer.Option(help="Reserve, tokens.", show_default="window / 8", min=0)] = None,
    repeats: common.RepeatsOption = 5,
    out: common.OutOption = common.RESULTS,
    name: common.NameOption = "attention",
) -> None:
    """Time one layer's prefill attention, selection included, against full attention.

    Example: [bold]tca-jax bench attention --lengths 32768 --block-shares 0.25[/]
    """
    lengths, config = lengths or [2**14, 2**15, 2**16, 2**17], common.tca_config(window, reserve)
    models = shapes.find_configs(models, complete=False, default=("llama3.1-8b", "llama3.2-1b"))
    shares = shares or ([] if methods or worth else [0.25, 0.155])
    others = shapes.parse_methods(methods)
    common.check_lengths(lengths, config, out)
    backends = backend or [each for each in ("mosaic", "triton") if can_run(each)] or ["xla"]
    common.check_backends(backends)
    note = NOTE.format(repeats=repeats, checked=common.CHECKED_TOKENS, shares=shapes.describe_shares(config))
    results = common.Results(out, name, "Prefill attention of one layer", note)
    for model in models:
        heads = shapes.CONFIGS[model].num_kv_heads
        tested = shapes.named_methods(config, shares, heads, full=False, others=others)
        cases = [Case(label, method, each) for each in backends for label, method in tested.items()]
        read = _READ if worth else {}
        cases += [WorthCase(label, by_worth(), each, parts) for each in backends for label, parts in read.items()]
        for tokens in lengths:
            try:
                rows = measure(model, tokens, cases, repeats)
            except NotImplementedError as error:
                raise UserError(f"--backend: {error}") from error
            for row in rows:
                results.add("Prefill attention", row)
    results.finish()
