"""`tca-jax bench decode`: one layer's paged attention over random caches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Array

import tca_jax
from tca_jax.cli.options import BackendOption, KVOption
from tca_jax.engine.pages import Rows
from tca_jax.lab.benchmarks import common
from tca_jax.lab.benchmarks import models as shapes
from tca_jax.methods.base import Method
from tca_jax.pallas_kernels.kv import num_bytes
from tca_jax.pallas_kernels.numerics import cdiv
from tca_jax.pallas_kernels.paged_attention import paged_attention

STEPS = 32  # of one program: launch latency stays out of the time
_PAST_L2_BYTES = 2**28  # five times an H200's L2 cache

NOTE = (
    "Caches of random prompts of `tokens`; `attended`: share of all tokens that a step reads. {steps} dependent "
    "steps over copies of the cache that do not fit L2, less the same program without attention. `over floor`: over "
    "the same bytes at the rate of a device copy, {copied:,.0f} GB/s. Medians over {repeats} rounds; `speed-up` is "
    "over full attention with the same `KV`, `error` relative to the XLA oracle. {shares}"
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cache of a layer after a prompt, before it is made."""

    model: str
    name: str  # of the attention
    method: Method
    rows: int
    tokens: int  # of the prompt
    kv: str | None  # what keys and values are stored in, as for `tca_jax.load`

    def make(self, tokens: int) -> Rows:
        """Rows that have read all tokens of random prompts but the last; of the model's KV heads alone."""
        heads, small = shapes.CONFIGS[self.model].num_kv_heads, {"hidden_size": 64, "intermediate_size": 64}
        sizes = {"num_layers": 1, "num_heads": heads, "vocab_size": 256, "max_positions": tokens, **small}
        lm = shapes.random_model(self.model, sizes=sizes, dtype="bfloat16", kv=self.kv).with_method(self.method)
        return tca_jax.prefill(lm, list(np.random.default_rng(tokens).integers(0, 256, (self.rows, tokens - 1)))).rows

    def row(self, rows: Rows, seconds: float, copied: float) -> common.Row:
        """Columns of a step that takes `seconds`; `copied` is the rate of the floor."""
        heads, (dim, dtype) = rows.kept.shape[-1], (rows.k.shape[-1], rows.k.dtype)
        attended = int(rows.kept.sum()) + heads * int((rows.length - rows.start + 1).sum())
        read = 2 * num_bytes(attended, dim, dtype)
        row = {"model": self.model, "rows": self.rows, "tokens": self.tokens, "attention": self.name}
        row |= {"KV": dtype.name, "attended": attended / (self.rows * heads * self.tokens)}
        row["KV MB"] = cache_bytes(rows) / 1e6
        return row | {"ms": 1e3 * seconds, "GB/s": read / seconds / 1e9, "over floor": seconds * copied / read}


def cache_bytes(rows: Rows) -> int:
    """Bytes of keys and values."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves((rows.k, rows.v)))


def attend(q: Array, rows: Rows, window: int, backend: Any) -> Array:
    """Attention `[B, H_q, d]` of the token after the prompt."""
    out, _ = paged_attention(q[:, None], rows.of_layer(0), rows.length, rows.length, window=window, backend=backend)
    return out[:, 0]


def run_steps(backend: Any, window: int, q: Array, rotation: Array, caches: Sequence[Rows]) -> Array:
    """`STEPS` dependent steps over `caches` in turn; without caches only the product, which keeps steps from fusing."""
    for step in range(STEPS):
        out = attend(q, caches[step % len(caches)], window, backend) if caches else q
        q = (q + out) @ rotation
    return q


def measure(plans: Sequence[Plan], backend: str, copied: float, repeats: int) -> list[common.Row]:
    """A row for each plan; their caches must fit together."""
    config = shapes.CONFIGS[plans[0].model]
    q = common.random_normal(jax.random.key(0), (plans[0].rows, config.num_heads, config.head_dim), jnp.bfloat16)
    orthogonal, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((config.head_dim, config.head_dim)))
    rotation = jnp.asarray(orthogonal, jnp.bfloat16)
    empty = jax.jit(functools.partial(run_steps, backend, plans[0].method.cache.window))
    calls: dict[Any, Callable[[], Any]] = {"empty": functools.partial(empty, q, rotation, ())}
    made = [plan.make(plan.tokens) for plan in plans]
    for plan, rows in zip(plans, made, strict=True):
        copies = min(STEPS, cdiv(_PAST_L2_BYTES, cache_bytes(rows))) - 1
        caches = (rows, *(jax.tree.map(jnp.copy, rows) for _ in range(copies)))
        program = jax.jit(functools.partial(run_steps, backend, plan.method.cache.window))
        calls[plan.name, plan.kv] = functools.partial(program, q, rotation, caches)
    seconds = common.time_in_turns(calls, repeats)
    net = {name: (each - seconds["empty"]) / STEPS for name, each in seconds.items()}
    found = []
    for plan, rows in zip(plans, made, strict=True):
        step, shorter = net[plan.name, plan.kv], plan.make(min(plan.tokens, common.CHECKED_TOKENS))
        run = functools.partial(jax.jit(attend, static_argnums=(2, 3)), q, shorter, plan.method.cache.window)
        found.append({**plan.row(rows, step, copied), "speed-up": net["full", plan.kv] / step})
        found[-1]["error"] = common.agreement(backend, run)
    return found


def main(
    lengths: common.LengthsOption = None,
    models: common.ModelsOption = None,
    rows: Annotated[list[int] | None, typer.Option(help="Rows of a batch.", show_default="1 and 8", min=1)] = None,
    shares: shapes.BlockSharesOption = None,
    kv: KVOption = None,
    backend: BackendOption = "auto",
    window: common.WindowOption = tca_jax.TCAConfig.window,
    repeats: common.RepeatsOption = 7,
    out: common.OutOption = common.RESULTS,
    name: common.NameOption = "decode",
) -> None:
    """Time one layer's decode attention over TCA's caches and full caches.

    With --kv fp8 caches in bfloat16 and in fp8 are compared.

    Example: [bold]tca-jax bench decode --lengths 131072 --block-shares 0.155[/]
    """
    lengths, config = lengths or [2**14, 2**17], common.tca_config(window)
    models, shares = shapes.find_configs(models, complete=False), shares or [0.155]
    common.check_lengths(lengths, config, out)
    common.check_backends([backend])
    copied = common.copy_rate(repeats)
    note = NOTE.format(steps=STEPS, copied=copied / 1e9, repeats=repeats, shares=shapes.describe_shares(config))
    results = common.Results(out, name, "Decoding", note)
    for model, batch, length in itertools.product(models, rows or [1, 8], lengths):
        tested = shapes.named_methods(config, shares, shapes.CONFIGS[model].num_kv_heads)
        kinds = itertools.product(tested.items(), dict.fromkeys([None, kv]))
        plans = [Plan(model, label, method, batch, length, each) for (label, method), each in kinds]
        timed = functools.partial(measure, plans, backend, copied, repeats)
        for row in common.fitted(timed, f"a layer of {model}, {batch} rows, {length:,} tokens") or ():
            results.add("Attention of one layer", row)
    results.finish()
