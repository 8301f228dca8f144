"""`tca-jax bench decode`: one layer's paged attention, and steps of whole models, over random caches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Array

import tca_jax
from tca_jax.cli.options import KVOption
from tca_jax.engine.cache import CacheLayout, PagedCache, kept_of_prompt
from tca_jax.engine.decode import STATE, DecodingState, decode, row_keys
from tca_jax.engine.lm import KV, LM
from tca_jax.engine.mesh import CACHES, SAME, OverMesh
from tca_jax.engine.sampling import Sampling
from tca_jax.lab.benchmarks import common
from tca_jax.lab.benchmarks import models as shapes
from tca_jax.methods import BASELINE
from tca_jax.methods.base import CachePolicy, Method
from tca_jax.models.config import ModelConfig
from tca_jax.pallas_kernels.kv import CODES, encode, num_bytes
from tca_jax.pallas_kernels.numerics import cdiv
from tca_jax.pallas_kernels.paged_attention import paged_attention
from tca_jax.programs import Program

STEPS = 32  # of one program of a layer: launch latency stays out of the time
MODEL_STEPS = 64  # timed steps of a whole model; no block leaves the window
_WARM = 2  # new tokens before the timed steps
_PAST_L2_BYTES = 2**28  # five times an H200's L2 cache

NOTE = (
    "Random caches behind a prompt of `tokens`; `attended`: share of all tokens that a step reads. One layer: {steps} "
    "dependent steps over copies of the cache that do not fit L2, less the same program without attention. Whole "
    "models: random weights, mean of {model_steps} steps without eviction; `GB/s` count weights, too. `over floor`: "
    "over the same bytes at the rate of a device copy, {copied:,.0f} GB/s. Medians over {repeats} rounds; `speed-up` "
    "is over full attention with the same `KV` and backend, `error` relative to the XLA oracle. {shares}"
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cache of some layers behind a prompt, before it is made."""

    config: ModelConfig
    policy: CachePolicy
    layers: int
    rows: int
    tokens: int  # of the prompt
    kv: Any  # dtype of keys and values
    fed: int = 1  # room for tokens behind the prompt

    @functools.cached_property
    def layout(self) -> CacheLayout:
        heads = self.config.num_kv_heads
        return CacheLayout.plan(self.policy, self.layers, heads, self.rows, self.tokens, self.fed)

    @functools.cached_property
    def kept(self) -> np.ndarray:
        """Tokens that each KV head keeps of the prompt, `[layers, H_kv]`."""
        heads = self.config.num_kv_heads
        return np.stack([kept_of_prompt(self.policy, layer, self.tokens, heads) for layer in range(self.layers)])

    @property
    def attended(self) -> int:
        """Tokens that a step reads over all rows, layers and KV heads: kept tokens, window and the new token."""
        return self.rows * int(self.kept.sum() + (min(self.tokens, self.policy.window) + 1) * self.kept.size)

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes(self.config.head_dim, self.kv)

    @property
    def read_bytes(self) -> int:
        """Bytes of keys and values that a step reads."""
        return 2 * num_bytes(self.attended, self.config.head_dim, self.kv)

    def make(self, seed: int) -> PagedCache:
        """A cache of random keys and values that holds all that it can keep of the prompt."""
        starts = self.layout.window_start(jnp.full(self.rows, self.tokens, jnp.int32))
        empty = self.layout.empty(self.config.head_dim, self.kv, starts)
        wide = jnp.bfloat16 if jnp.dtype(self.kv) == CODES else self.kv
        keys = jax.random.split(jax.random.key(seed))
        k, v = (encode(common.random_normal(key, empty.k.shape, wide), empty.k) for key in keys)
        kept = tuple(jnp.asarray(np.tile(layer, (self.rows, 1)), jnp.int32) for layer in self.kept)
        return dataclasses.replace(empty, k=k, v=v, kept=kept)

    def row(self, model: str, attention: str, backend: Any, seconds: float, read: int, copied: float) -> common.Row:
        """Columns of a step that takes `seconds` and reads so many bytes."""
        attended = self.attended / (self.rows * self.kept.size * (self.tokens + 1))
        row = {"model": model, "rows": self.rows, "tokens": self.tokens, "attention": attention}
        row |= {"KV": jnp.dtype(self.kv).name, "backend": backend, "attended": attended, "KV MB": self.num_bytes / 1e6}
        return row | {"ms": 1e3 * seconds, "GB/s": read / seconds / 1e9, "over floor": seconds * copied / read}


def attend(q: Array, cache: PagedCache, layout: CacheLayout, backend: Any) -> Array:
    """Attention `[B, H_q, d]` of the token behind the prompt."""
    at = jnp.full(layout.batch, layout.prompt_tokens, jnp.int32)
    out, _ = paged_attention(q[:, None], (cache.pages(0),), at, at, window=layout.window, backend=backend)
    return out[:, 0]


def run_steps(backend: Any, layout: CacheLayout, q: Array, rotation: Array, caches: Sequence[PagedCache]) -> Array:
    """`STEPS` dependent steps over `caches` in turn; without caches only the product, which keeps steps from fusing."""
    for step in range(STEPS):
        out = attend(q, caches[step % len(caches)], layout, backend) if caches else q
        q = (q + out) @ rotation
    return q


class Case(NamedTuple):
    """A layer's decode attention under a method, with a stored type of keys and values, on a backend."""

    name: str
    method: Method
    kv: Any  # dtype
    backend: Any


def measure_layer(
    model: str, rows: int, tokens: int, cases: Sequence[Case], copied: float, repeats: int
) -> list[common.Row]:
    """A row for each case; none where the caches do not fit together."""
    config = shapes.CONFIGS[model]
    plans = {(case.name, case.kv): Plan(config, case.method.cache, 1, rows, tokens, case.kv) for case in cases}
    sizes = [plan.num_bytes for plan in plans.values()]
    if sum(sizes) + max(sizes) > common.free_bytes():
        print(f"does not fit: a layer of {model}, {rows} rows, {tokens:,} tokens", flush=True)
        return []
    q, rotation = _queries(config, rows)
    caches: dict[Any, tuple[PagedCache, ...]] = {}
    for kind, plan in plans.items():
        cache, copies = plan.make(seed=tokens), min(STEPS, cdiv(_PAST_L2_BYTES, plan.num_bytes)) - 1
        caches[kind] = (cache, *(jax.tree.map(jnp.copy, cache) for _ in range(copies)))

    def call(case: Case, caches: tuple[PagedCache, ...]) -> Callable[[], Any]:
        program = jax.jit(functools.partial(run_steps, case.backend, plans[case.name, case.kv].layout))
        return functools.partial(program, q, rotation, caches)

    calls: dict[Any, Callable[[], Any]] = {"empty": call(cases[0], ())}
    seconds = common.time_in_turns(calls | {case: call(case, caches[case.name, case.kv]) for case in cases}, repeats)
    net = {case: (seconds[case] - seconds["empty"]) / STEPS for case in cases}
    full = {(case.kv, case.backend): net[case] for case in cases if case.method == BASELINE}
    found = []
    for case in cases:
        plan = plans[case.name, case.kv]
        row = plan.row(model, case.name, case.backend, net[case], plan.read_bytes, copied)
        error = _check(case, dataclasses.replace(plan, tokens=min(tokens, common.CHECKED_TOKENS)))
        found.append({**row, "speed-up": full[case.kv, case.backend] / net[case], "error": error})
    return found


def _queries(config: ModelConfig, rows: int) -> tuple[Array, Array]:
    """Queries `[B, H_q, d]` and a rotation `[d, d]`, bfloat16."""
    orthogonal, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((config.head_dim, config.head_dim)))
    q = common.random_normal(jax.random.key(0), (rows, config.num_heads, config.head_dim), jnp.bfloat16)
    return q, jnp.asarray(orthogonal, jnp.bfloat16)


def _check(case: Case, plan: Plan) -> float:
    """Relative error of one step against the XLA oracle."""
    cache, (q, _) = plan.make(seed=1), _queries(plan.config, plan.rows)
    step = functools.partial(attend, layout=plan.layout)
    return common.agreement(case.backend, lambda backend: jax.jit(functools.partial(step, backend=backend))(q, cache))


def plan_of(lm: LM, rows: int, tokens: int) -> Plan:
    """The cache of a whole model, with room for the timed steps."""
    config = lm.config
    return Plan(config, lm.method.cache, config.num_layers, rows, tokens, lm.cache_dtype, _WARM + MODEL_STEPS - 1)


def random_state(lm: LM, rows: int, tokens: int) -> DecodingState:
    """The state behind the first new token of prompts of `tokens`, with random caches."""
    return DecodingState(
        tokens=jnp.zeros((rows, _WARM + MODEL_STEPS), jnp.int32),
        step=jnp.ones(rows, jnp.int32),
        last=jnp.zeros(rows, jnp.int32),
        done=jnp.zeros(rows, bool),
        lengths=jnp.full(rows, tokens, jnp.int32),
        prompt_lengths=jnp.full(rows, tokens, jnp.int32),
        keys=row_keys(jax.random.key(0), rows),
        seen=None,
        stop_tokens=jnp.zeros(0, jnp.int32),
        min_new_tokens=None,
        logprobs=None,
        top=None,
        finite=jnp.ones(rows, bool),
        cache=plan_of(lm, rows, tokens).make(seed=0),
        attended_share=jnp.ones(rows, jnp.float32),
    )


def time_steps(lm: LM, rows: int, tokens: int, backend: Any, repeats: int) -> float:
    """Median seconds of a decoding step."""
    program = Program(OverMesh(decode, (STATE, CACHES, SAME, SAME), STATE), donate=(1,))
    state, seconds = random_state(lm, rows, tokens), list[float]()

    def run(state: DecodingState, limit: int) -> DecodingState:
        return jax.block_until_ready(program.run(lm, state, None, jnp.int32(limit), Sampling(), backend=backend))

    for _ in range(repeats):
        state = run(dataclasses.replace(state, step=jnp.ones(rows, jnp.int32)), _WARM)
        start = time.perf_counter()
        state = run(state, _WARM + MODEL_STEPS)
        seconds.append((time.perf_counter() - start) / MODEL_STEPS)
    return statistics.median(seconds)


def measure_models(
    lms: Mapping[str, LM], rows: int, tokens: int, backend: Any, copied: float, repeats: int
) -> list[common.Row]:
    """A row for each attention whose cache fits, full attention first."""
    found: list[common.Row] = []
    full: float | None = None
    for name, lm in lms.items():
        timed = functools.partial(time_steps, lm, rows, tokens, backend, repeats)
        step = common.fitted(timed, f"{lm.name}, {rows} rows, {tokens:,} tokens, {name}")
        if step is not None:
            plan = plan_of(lm, rows, tokens)
            row = plan.row(lm.name, name, backend, step, shapes.weight_bytes(lm) + plan.read_bytes, copied)
            full = step if name == "full" else full
            row |= {"layers": lm.config.num_layers, "tokens/s": rows / step}
            found.append({**row, "speed-up": full / step if full else ""})
    return found


def main(
    lengths: common.LengthsOption = None,
    models: common.ModelsOption = None,
    rows: Annotated[list[int] | None, typer.Option(help="Rows of a batch.", show_default="1 and 8", min=1)] = None,
    shares: shapes.BlockSharesOption = None,
    whole: Annotated[bool, typer.Option(help="Time whole models, too.")] = True,
    layers: Annotated[int | None, typer.Option(help="Layers of whole models; all by default.", min=1)] = None,
    kv: KVOption = None,
    backend: Annotated[list[str] | None, typer.Option(help="Kernels; may be repeated.", show_default="auto")] = None,
    window: common.WindowOption = tca_jax.TCAConfig.window,
    copy_bytes: common.CopyBytesOption = common.COPIED_BYTES,
    repeats: common.RepeatsOption = 7,
    out: common.OutOption = common.RESULTS,
    name: common.NameOption = "decode",
) -> None:
    """Time decoding over TCA's caches and full caches: one layer's attention, and steps of whole models.

    With --kv fp8 caches in bfloat16 and in fp8 are compared.

    Example: [bold]tca-jax bench decode --lengths 131072 --block-shares 0.155[/]
    """
    lengths, config = lengths or [2**14, 2**17], common.tca_config(window)
    models, shares = shapes.find_configs(models, whole=whole), shares or [shapes.Share(0.155)]
    backends = backend or ["auto"]
    common.check_lengths(lengths, config, out)
    common.check_backends(backends)
    copied = common.copy_rate(copy_bytes, repeats)
    sizes = {"steps": STEPS, "model_steps": MODEL_STEPS, "copied": copied / 1e9, "repeats": repeats}
    results = common.Results(out, name, "Decoding", NOTE.format(**sizes, shares=shapes.describe_shares(config)))
    dtypes = [jnp.dtype(jnp.bfloat16), *([] if kv is None else [KV[kv]])]
    places = list(itertools.product(rows or [1, 8], lengths))
    for model in models:
        heads = shapes.CONFIGS[model].num_kv_heads
        tested = shapes.named_methods(config, shares, heads)
        kinds = itertools.product(tested.items(), dtypes, backends)
        cases = [Case(label, method, dtype, each) for (label, method), dtype, each in kinds]
        for place in places:
            for row in measure_layer(model, *place, cases, copied, repeats):
                results.add("Attention of one layer", row)
        for stored in [None, kv] if kv and whole else [None] * whole:
            lm = shapes.open_model(model, layers=layers, max_positions=2 * max(lengths), kv=stored)
            whole_models = shapes.named_methods(config, shares, heads, lm.config.num_layers)
            lms = {label: lm.with_method(method) for label, method in whole_models.items()}
            for place, each in itertools.product(places, backends):
                for row in measure_models(lms, *place, each, copied, cdiv(repeats, 2)):
                    results.add("Steps of whole models", row)
            del lm, lms
    results.finish()
