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
from tca_jax.engine.cache import CacheLayout, kept_of_prompt
from tca_jax.engine.lm import KV
from tca_jax.engine.pages import Rows
from tca_jax.lab.benchmarks import common
from tca_jax.lab.benchmarks import models as shapes
from tca_jax.methods.base import CachePolicy
from tca_jax.models.config import ModelConfig
from tca_jax.pallas_kernels.kv import CODES, encode, num_bytes
from tca_jax.pallas_kernels.numerics import cdiv
from tca_jax.pallas_kernels.paged_attention import paged_attention

STEPS = 32  # of one program: launch latency stays out of the time
_PAST_L2_BYTES = 2**28  # five times an H200's L2 cache

NOTE = (
    "Random caches behind a prompt of `tokens`; `attended`: share of all tokens that a step reads. {steps} dependent "
    "steps over copies of the cache that do not fit L2, less the same program without attention. `over floor`: over "
    "the same bytes at the rate of a device copy, {copied:,.0f} GB/s. Medians over {repeats} rounds; `speed-up` is "
    "over full attention with the same `KV`, `error` relative to the XLA oracle. {shares}"
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cache of a layer after a prompt, before it is made."""

    model: str
    config: ModelConfig
    name: str  # of the attention
    policy: CachePolicy
    rows: int
    tokens: int  # of the prompt
    kv: Any  # dtype of keys and values

    @functools.cached_property
    def layout(self) -> CacheLayout:
        return CacheLayout.plan(self.policy, 1, self.config.num_kv_heads, self.rows, self.tokens, 1)

    @functools.cached_property
    def kept(self) -> np.ndarray:
        """Tokens that each KV head keeps of the prompt, `[H_kv]`."""
        return kept_of_prompt(self.policy, 0, self.tokens, self.config.num_kv_heads)

    @property
    def attended(self) -> int:
        """Tokens that a step reads over all rows and KV heads: kept tokens, window and the new token."""
        return self.rows * int(self.kept.sum() + (min(self.tokens, self.policy.window) + 1) * self.kept.size)

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes(self.config.head_dim, self.kv)

    def make(self, seed: int) -> Rows:
        """Rows of random keys and values that hold all that they can keep of the prompt."""
        layout, (heads,) = self.layout, self.kept.shape
        rows = Rows.create(
            1,
            self.rows,
            heads,
            pages=layout.num_pages,
            columns=layout.kept_columns[0],
            window_pages=layout.num_window_pages,
            mean_pages=None,
            page_size=layout.block_size,
            head_dim=self.config.head_dim,
            dtype=self.kv,
        )
        wide = jnp.bfloat16 if jnp.dtype(self.kv) == CODES else self.kv
        keys = jax.random.split(jax.random.key(seed))
        k, v = (encode(common.random_normal(key, rows.k.shape, wide), rows.k) for key in keys)
        kept = jnp.asarray(np.tile(self.kept, (1, self.rows, 1)), jnp.int32)
        kept_pages, free = rows.free.take(-(-kept // rows.page_size), rows.columns, rows.num_pages)
        blocks = jnp.full((1, self.rows, rows.window_pages), heads)  # pages of a block side by side, as the engine's
        window, free = free.take(blocks, heads, rows.num_pages)
        start = max(0, self.tokens // rows.page_size - (rows.window_pages - 1)) * rows.page_size
        return dataclasses.replace(
            rows,
            k=k,
            v=v,
            free=free,
            pages=jnp.concatenate([kept_pages, window.swapaxes(-1, -2)], axis=-1),
            kept=kept,
            start=jnp.full_like(rows.start, start),
            length=jnp.full_like(rows.length, self.tokens),
        )

    def row(self, seconds: float, copied: float) -> common.Row:
        """Columns of a step that takes `seconds`; `copied` is the rate of the floor."""
        read = 2 * num_bytes(self.attended, self.config.head_dim, self.kv)
        attended = self.attended / (self.rows * self.kept.size * (self.tokens + 1))
        row = {"model": self.model, "rows": self.rows, "tokens": self.tokens, "attention": self.name}
        row |= {"KV": jnp.dtype(self.kv).name, "attended": attended, "KV MB": self.num_bytes / 1e6}
        return row | {"ms": 1e3 * seconds, "GB/s": read / seconds / 1e9, "over floor": seconds * copied / read}


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
    q, rotation = _queries(plans[0])
    empty = jax.jit(functools.partial(run_steps, backend, plans[0].policy.window))
    calls: dict[Any, Callable[[], Any]] = {"empty": functools.partial(empty, q, rotation, ())}
    for plan in plans:
        cache, copies = plan.make(seed=plan.tokens), min(STEPS, cdiv(_PAST_L2_BYTES, plan.num_bytes)) - 1
        caches = (cache, *(jax.tree.map(jnp.copy, cache) for _ in range(copies)))
        program = jax.jit(functools.partial(run_steps, backend, plan.policy.window))
        calls[plan.name, plan.kv] = functools.partial(program, q, rotation, caches)
    seconds = common.time_in_turns(calls, repeats)
    net = {name: (each - seconds["empty"]) / STEPS for name, each in seconds.items()}
    found = []
    for plan in plans:
        step = net[plan.name, plan.kv]
        shorter = dataclasses.replace(plan, tokens=min(plan.tokens, common.CHECKED_TOKENS))
        of_backend = functools.partial(
            jax.jit(attend, static_argnums=(2, 3)), q, shorter.make(seed=1), plan.policy.window
        )
        error = common.agreement(backend, of_backend)
        found.append({**plan.row(step, copied), "speed-up": net["full", plan.kv] / step, "error": error})
    return found


def _queries(plan: Plan) -> tuple[Array, Array]:
    """Queries `[B, H_q, d]` and a rotation `[d, d]`, bfloat16."""
    dim = plan.config.head_dim
    orthogonal, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((dim, dim)))
    q = common.random_normal(jax.random.key(0), (plan.rows, plan.config.num_heads, dim), jnp.bfloat16)
    return q, jnp.asarray(orthogonal, jnp.bfloat16)


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
    models, shares = shapes.find_configs(models, complete=False), shares or [shapes.Share(0.155)]
    common.check_lengths(lengths, config, out)
    common.check_backends([backend])
    copied = common.copy_rate(repeats)
    note = NOTE.format(steps=STEPS, copied=copied / 1e9, repeats=repeats, shares=shapes.describe_shares(config))
    results = common.Results(out, name, "Decoding", note)
    dtypes = [jnp.dtype(jnp.bfloat16), *([] if kv is None else [KV[kv]])]
    for model, batch, length in itertools.product(models, rows or [1, 8], lengths):
        shape = shapes.CONFIGS[model]
        tested = shapes.named_methods(config, shares, shape.num_kv_heads)
        kinds = itertools.product(tested.items(), dtypes)
        plans = [Plan(model, shape, label, method.cache, batch, length, dtype) for (label, method), dtype in kinds]
        timed = functools.partial(measure, plans, backend, copied, repeats)
        for row in common.fitted(timed, f"a layer of {model}, {batch} rows, {length:,} tokens") or ():
            results.add("Attention of one layer", row)
    results.finish()
