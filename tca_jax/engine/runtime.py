"""Rows of answers: prompts are read a layer at a time, tokens are fed and drawn (DESIGN section 5).

Reading and feeding are loops of the host over layers, which share a program where the method treats them alike; inside
a caller's jit the same functions are traced. A step of decoding is one program for all layers and rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.engine.cache import CacheLayout
from tca_jax.engine.decode import DecodingState, draw
from tca_jax.engine.lm import LM
from tca_jax.engine.pages import Rows
from tca_jax.engine.sampling import Sampling
from tca_jax.methods.base import UNBOUNDED, Attended, CachePolicy, Heads, Method, last_queries, selection_for_prefill
from tca_jax.methods.pairs import causal_pairs
from tca_jax.methods.regions import Regions
from tca_jax.methods.scored import BlockMeans, ScoredCache, ScoredPrefill
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.numerics import cdiv, scaled_scores
from tca_jax.pallas_kernels.paged_attention import paged_attention
from tca_jax.pallas_kernels.select_tokens import selection_mask
from tca_jax.programs import Program


def empty_rows(lm: LM, layout: CacheLayout) -> Rows:
    """Rows for what a layout plans."""
    c, policy, b = lm.config, lm.method.cache, layout.block_size
    scored = isinstance(policy, ScoredCache)
    means = cdiv(layout.prompt_tokens + layout.window_columns * b, b * b) if scored and policy.means else 0
    return Rows.create(
        c.num_layers,
        layout.batch,
        c.num_kv_heads,
        pages=layout.num_pages + layout.batch * c.num_layers * c.num_kv_heads * means,
        columns=max(layout.kept_columns),
        window_pages=layout.num_window_pages,
        mean_pages=means if scored else None,
        page_size=b,
        head_dim=c.head_dim,
        dtype=lm.cache_dtype,
    )


class ReadRows(NamedTuple):
    """Prompts that were read."""

    logits: Float32[Array, "B V"]  # of the token after each
    rows: Rows
    attended_share: Float32[Array, " B"]  # of each prompt's causal pairs
    compile_seconds: float


def read(
    lm: LM,
    rows: Rows,
    at: Int[Array, " B"],  # the rows that get the prompts
    tokens: Int[Array, "B L"],  # right-padded
    lengths: Int[Array, " B"],
    most: Int[Array, " B"],  # tokens that the rows will have
    layout: CacheLayout,
    *,
    backend: Backend = "auto",
) -> ReadRows:
    """Reads prompts into rows."""
    call = _Calls(isinstance(tokens, jax.core.Tracer))
    lm = lm.for_programs()
    x, cos, sin, shares = call(_begin_program, lm, tokens, lengths)
    layers, method = lm.config.num_layers, lm.method
    alike = not method.layers_differ
    options: dict[str, Any] = {"graphdef": lm.layer_graphdef, "method": method, "layout": layout, "backend": backend}
    for layer in range(layers):
        arrays = cos, sin, lm.settings_of(layer), at, lengths, most, jnp.int32(layer)
        given = lm.layer_params(layer), x, shares, rows, *arrays
        x, shares, rows = call(_read_program, *given, **options, layer=None if alike else layer)
    return ReadRows(call(_end_program, lm, x, lengths), rows, shares / layers, call.compile_seconds)


@dataclasses.dataclass
class _Calls:
    """Calls of programs: compiled ahead of time, or traced into a caller's program."""

    traced: bool
    compile_seconds: float = 0.0

    def __call__(self, program: _LayerProgram, *args: Any, **static: Any) -> Any:
        if self.traced:
            return program.function(*args, **static)
        executable, seconds = program.compiled.prepare(*args, **static)
        self.compile_seconds += seconds
        return executable(*args)


class _LayerProgram:
    def __init__(self, function: Callable[..., Any], donate: tuple[int, ...] = ()) -> None:
        self.function, self.compiled = function, Program(function, donate)


def _begin(lm: LM, tokens: Int[Array, "B L"], lengths: Int[Array, " B"]) -> tuple[Array, Array, Array, Array]:
    positions = jnp.minimum(jnp.arange(tokens.shape[1]), lengths[:, None] - 1)
    decoder = lm.decoder
    return decoder.embed(tokens), *decoder.angles(positions), jnp.zeros(lengths.shape, jnp.float32)


def _end(lm: LM, x: Float[Array, "B L D"], lengths: Int[Array, " B"]) -> Float32[Array, "B V"]:
    last = x[jnp.arange(len(lengths)), lengths - 1]
    return lm.decoder.logits(lm.decoder.final_norm(last))


def _read_layer(
    weights: Any,
    x: Float[Array, "B L D"],
    shares: Float32[Array, " B"],
    rows: Rows,
    cos: Array,
    sin: Array,
    settings: Any,
    at: Int[Array, " B"],
    lengths: Int[Array, " B"],
    most: Int[Array, " B"],
    number: Int[Array, ""],
    *,
    graphdef: Any,
    method: Method,
    layout: CacheLayout,
    backend: Backend,
    layer: int | None,  # the number where the method's programs differ between layers
) -> tuple[Array, Array, Rows]:
    """One layer of prompts: the stream and the attended shares after it, and its tokens in pages of rows."""
    module, index = nnx.merge(graphdef, weights), number if layer is None else layer
    policy = method.cache
    scores = None
    if isinstance(policy, ScoredCache):
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        scores = policy.score(settings, module.attention_norm(x), positions)

    def attention(q: Array, k: Array, v: Array, _: None) -> tuple[Array, tuple[Array, Rows]]:
        heads = Heads.all(k.shape[2])
        if isinstance(policy, ScoredCache):
            attended, written = _attend_scored(method, policy, settings, q, k, v, scores, lengths, layout, backend)
        else:
            attended, written = _attend_selected(method, layer or 0, heads, q, k, v, lengths, layout, backend)
        filled = rows.with_prompts(index, at, written.kept, k, v, lengths, most, scores, written.means)
        # The pages are filled before the model goes on: left to itself the compiler keeps all layers' k and v.
        (out, pairs), filled = jax.lax.optimization_barrier((attended, filled))
        return out, (pairs, filled)

    x, (pairs, filled), _ = module(x, cos, sin, attention, None)
    return x, shares + pairs / causal_pairs(lengths), filled


class _Written(NamedTuple):
    kept: Any
    means: BlockMeans | None


def _attend_selected(
    method: Method,
    layer: int,
    heads: Heads,
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    layout: CacheLayout,
    backend: Backend,
) -> tuple[Attended, _Written]:
    policy, kept, readable = method.cache, None, None
    if layout.has_ranked_blocks:
        queries = last_queries(q, lengths, policy.num_queries)
        selection = policy.select(layer, heads, queries, k, v, lengths, backend)
        with jax.named_scope("select"):
            kept = layout.regions(layer).fill(selection, k, v, block_size=layout.block_size, backend=backend)
        readable = selection_for_prefill(method, layer, heads, selection, kept, k, v, backend)
    attended = method.prefill.attend(layer, heads, q, k, v, lengths, readable, backend)
    return attended, _Written(None if kept is None else kept.pool, None)


def _attend_scored(
    method: Method,
    policy: ScoredCache,
    settings: Any,
    q: Array,
    k: Array,
    v: Array,
    scores: Float32[Array, "B H L"],
    lengths: Array,
    layout: CacheLayout,
    backend: Backend,
) -> tuple[Attended, _Written]:
    b, (batch, length, heads, _) = layout.block_size, k.shape
    kept, means = None, None
    if layout.has_ranked_blocks:
        edge = (lengths // b * b - policy.window)[:, None, None]
        stays = policy.stays(settings, scores) & (jnp.arange(length) < edge)
        with jax.named_scope("select"):
            regions = Regions.plan(batch, [length] * heads, b, shared=length * heads)
            kept = regions.fill(policy.selection(stays), k, v, block_size=b, backend=backend).pool
        if policy.means:
            means = policy.block_means(k, v, scores, ~policy.stays(settings, scores))
    if isinstance(method.prefill, ScoredPrefill):
        attended = method.prefill.attend_scored(settings, q, k, v, scores, lengths, backend)
    else:
        attended = method.prefill.attend(0, Heads.all(heads), q, k, v, lengths, None, backend)
    return attended, _Written(kept, means)


_begin_program = _LayerProgram(_begin)
_read_program = _LayerProgram(_read_layer, donate=(1, 2, 3))
_end_program = _LayerProgram(_end)


def decode(
    lm: LM,
    state: DecodingState,  # its cache is `Rows`
    limit: Int[Array, "*B"],  # tokens of an answer
    sampling: Sampling,
    *,
    backend: Backend = "auto",
) -> DecodingState:
    """Draws tokens until every row has `limit` of them or has ended. A row that has stays as it is."""
    steps = Steps(lm, limit, sampling, None, backend)

    def unfinished(state: DecodingState) -> Bool[Array, ""]:
        return steps.running(state).any()

    def plain_steps(state: DecodingState, until_leaving: bool) -> DecodingState:
        def more(state: DecodingState) -> Bool[Array, ""]:
            return unfinished(state) & ~steps.leaving(state).any() if until_leaving else unfinished(state)

        take = functools.partial(steps.take, summaries=steps.summaries(state.cache))
        return jax.lax.while_loop(more, take, state)

    if lm.method.cache.window >= UNBOUNDED:
        return plain_steps(state, until_leaving=False)

    def run(state: DecodingState) -> DecodingState:
        state = plain_steps(state, until_leaving=True)
        return jax.lax.while_loop(lambda s: unfinished(s) & steps.leaving(s).any(), steps.take_evicting, state)

    return jax.lax.while_loop(unfinished, run, state)


@dataclasses.dataclass(frozen=True)
class Steps:
    """What all steps of answers share; the arguments of `decode`."""

    lm: LM
    limit: Int[Array, "*B"]
    sampling: Sampling
    allowed: Array | None
    backend: Backend

    def running(self, state: DecodingState) -> Bool[Array, " B"]:
        """Rows that take a step."""
        return ~state.done & (state.step < self.limit)

    def leaving(self, state: DecodingState) -> Bool[Array, " B"]:
        """Rows in which a block leaves the window at the next step."""
        return self.running(state) & state.cache.are_full(state.lengths + state.step - 1, state.cache.start)

    def summaries(self, rows: Rows) -> list[Any]:
        """What the policy knows of each layer's pages, until a block leaves a window."""
        policy, layers = self.lm.method.cache, range(self.lm.config.num_layers)
        return [policy.summarize(layer, rows.of_layer(layer)[0]) for layer in layers]

    def take_evicting(self, state: DecodingState) -> DecodingState:
        """A step in which a block may leave the window of some row."""
        leaving, policy = self.leaving(state), self.lm.method.cache
        if not isinstance(policy, ScoredCache):
            return self.take(state, None, leaving)
        rows = evict_scored(self.lm, state.cache, leaving)  # needs no query: all layers at once
        return self.take(dataclasses.replace(state, cache=rows), self.summaries(rows))

    def take(
        self, state: DecodingState, summaries: list[Any] | None, leaving: Bool[Array, " B"] | None = None
    ) -> DecodingState:
        """A step; without summaries blocks of rows that are `leaving` leave first, in each layer by its query."""
        lm, rows, fed = self.lm, state.cache, self.running(state)
        positions, decoder, policy = state.lengths + state.step - 1, lm.decoder, lm.method.cache
        before = rows.start
        start = before if leaving is None else before + jnp.where(leaving, rows.page_size, 0)
        new = None if fed.size == 1 else fed[:, None]  # a single row is written without looking
        x, (cos, sin) = decoder.embed(state.last[:, None]), decoder.angles(positions[:, None])
        for layer, module in enumerate(decoder.layers):
            settings, scores = lm.settings_of(layer), None
            if isinstance(policy, ScoredCache):
                scores = policy.score(settings, module.attention_norm(x), positions[:, None]).swapaxes(1, 2)

            def attention(
                q: Array, k: Array, v: Array, rows: Rows, layer: int = layer, scores: Any = scores
            ) -> tuple[Array, Rows]:
                heads = Heads.all(k.shape[2])
                if leaving is not None:
                    rows = evict_block(
                        policy, layer, heads, q[:, 0], k[:, 0], rows, before, positions, leaving, self.backend
                    )
                rows = rows.with_tokens(layer, k, v, positions[:, None], new, start, scores)
                pages = rows.of_layer(layer, start)
                known = policy.summarize(layer, pages[0]) if summaries is None else summaries[layer]
                pages = policy.attended(layer, q[:, 0], pages, (known,))
                out, _ = paged_attention(
                    q, pages, positions, positions, window=policy.window, backend=self.backend
                )
                return out, rows

            with jax.named_scope(f"layer_{layer}"):
                x, rows, _ = module(x, cos, sin, attention, rows)
        logits = decoder.logits(decoder.final_norm(x)[:, 0])
        rows = dataclasses.replace(rows, start=start, length=jnp.where(fed, positions + 1, rows.length))
        return draw(lm, dataclasses.replace(state, cache=rows), logits, self.sampling, fed, self.allowed)


def evict_scored(lm: LM, rows: Rows, leaving: Bool[Array, " R"]) -> Rows:
    """Blocks leave the windows of rows in all layers, by their tokens' scores."""
    policy: Any = lm.method.cache
    b = rows.page_size

    def of_layer(layer: Array, rows: Rows) -> Rows:
        assert rows.scored is not None
        settings = jax.tree.map(lambda x: x[layer], lm.settings)
        chosen = policy.stays(settings, rows.scored.scores[layer][..., :b])
        return rows.evict(layer, leaving, chosen, rows.start)

    rows = jax.lax.fori_loop(0, lm.config.num_layers, of_layer, rows)
    return dataclasses.replace(rows, start=rows.start + jnp.where(leaving, b, 0))


def evict_block(
    policy: CachePolicy,
    layer: int,
    heads: Heads,
    q: Float[Array, "R Hq d"],  # query of the token that starts a block; `k` its key
    k: Float[Array, "R Hkv d"],
    rows: Rows,  # without that token
    start: Int[Array, " R"],  # of the windows
    positions: Int[Array, " R"],  # the token's
    leaving: Bool[Array, " R"],
    backend: Backend,
    *,
    rare: bool = False,  # whether there mostly are none, so that the device asks the host to leave out what is for them
) -> Rows:
    """Keeps the policy's choice from the block that leaves the window, in rows where one leaves.

    The policy sees the current query's attention probabilities over all that it can see at this step: what is kept, the
    window with the leaving block still in it, and itself.
    """
    before = jnp.maximum(positions - 1, 0)

    def log_sum_exp() -> Float32[Array, "R Hq"]:
        newest = jnp.where(leaving, before, before - 1)  # other rows ask nothing, which costs nothing
        pages = rows.of_layer(layer, start)
        return paged_attention(q[:, None], pages, before, newest, window=policy.window, backend=backend)[1][:, 0]

    # A pass over all that is kept, of which only the normaliser is wanted, and only in rows where a block leaves.
    nothing = functools.partial(jnp.zeros, q.shape[:2], jnp.float32)
    lse = jax.lax.cond(jnp.any(leaving), log_sum_exp, nothing) if rare else log_sum_exp()
    batch, kv_heads, head_dim = k.shape
    queries = q.reshape(batch, kv_heads, -1, head_dim)
    own = scaled_scores("bhgd,bhd->bhg", queries, k)
    lse = jnp.logaddexp(lse.reshape(own.shape), own)
    k_block, _ = rows.leaving_block(layer, k.dtype)
    attention = jnp.exp(scaled_scores("bhgd,bhtd->bhgt", queries, k_block) - lse[..., None])  # [R, H_kv, G, b]
    selection = policy.evict(layer, heads, attention, start // policy.block_size)
    chosen = selection_mask(selection.scores, selection.budgets, block_size=policy.block_size)
    return rows.evict(layer, leaving, chosen, start)
