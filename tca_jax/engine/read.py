"""Prompts are read: logits after them, the rows they leave, and the source of values not finite.

Reading is a loop of the host over layers, which share a program where the method treats them equally; for short prompts
under full attention, and inside a caller's jit, the same functions are traced into one program.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.engine.cache import CacheLayout
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import (
    CACHES,
    LAYER_WEIGHTS,
    ROWS,
    SAME,
    SECOND_HEADS,
    OverMesh,
    heads_of,
    mean_of_devices,
    on_host,
    rows_of_device,
)
from tca_jax.engine.pages import Rows, Widths
from tca_jax.errors import UserError
from tca_jax.methods.base import (
    Attended,
    BlockMeans,
    CachePolicy,
    Heads,
    Method,
    ScoredCache,
    ScoredPrefill,
    last_queries,
)
from tca_jax.methods.full import BASELINE
from tca_jax.methods.regions import Regions, Selection, causal_pairs
from tca_jax.models.names import MODEL, parameters
from tca_jax.models.sharding import DATA
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.kv import Pool, num_bytes
from tca_jax.pallas_kernels.numerics import cdiv, round_up, shared_size
from tca_jax.programs import Program, results_of


def empty_rows(lm: LM, layout: CacheLayout, more_pages: int = 0) -> Rows:
    """Empty rows of a layout; on a mesh, those of one device."""
    widths = widths_of(lm, layout)
    return Rows.create(
        layout.num_layers,
        layout.batch,
        layout.num_kv_heads,
        pages=num_pages(lm, layout) + more_pages,
        columns=widths.kept,
        window_pages=widths.window,
        mean_pages=widths.means if isinstance(lm.method.cache, ScoredCache) else None,
        page_size=layout.block_size,
        head_dim=lm.config.head_dim,
        dtype=lm.cache_dtype,
    )


def widths_of(lm: LM, layout: CacheLayout) -> Widths:
    """Entries of tables for rows of a layout."""
    means = mean_columns(lm.method.cache, layout.most_tokens)
    return Widths(shared_size(max(layout.kept_columns)), layout.table_window, means)


def mean_columns(policy: CachePolicy, tokens: int) -> int:
    """Pages of a head's means, of `tokens` tokens."""
    has_means, b = isinstance(policy, ScoredCache) and policy.means, policy.block_size
    return cdiv(shared_size(cdiv(tokens, b)), b) if has_means else 0


def num_pages(lm: LM, layout: CacheLayout) -> int:
    """Pages of rows that a layout plans; on a mesh, of a device."""
    means = mean_columns(lm.method.cache, layout.most_tokens)
    return layout.num_pages + layout.batch * layout.num_layers * layout.num_kv_heads * means


def page_bytes(lm: LM) -> int:
    """Bytes of a page, keys and values."""
    return 2 * num_bytes(lm.method.cache.block_size, lm.config.head_dim, lm.cache_dtype)


def pages_of_forks(lm: LM, rows: int, prompt_tokens: int, fed_tokens: int) -> int:
    """Pages that rows need beside those of the rows that they continue; on a mesh, of a device."""
    layout, policy = lm.cache_layout(rows, prompt_tokens, fed_tokens, following=True), lm.method.cache
    begun = int(max(lm.cache_layout(1, prompt_tokens, fed_tokens).kept_columns) > 0)  # of kept tokens
    if means := mean_columns(policy, fed_tokens + policy.block_size):
        begun += 1 + means
    return layout.num_pages + rows * layout.num_layers * layout.num_kv_heads * begun


#: Tokens of prompts that are read in one program under full attention, at most: the device reads a layer of them sooner
#: than the host calls the next one. Selection in all layers would compile for half a minute.
_ONE_PROGRAM_TOKENS = 4096


class ReadRows(NamedTuple):
    """Prompts that were read."""

    logits: Float32[Array, "B V"]  # of the token after each
    rows: Rows
    attended_share: Float32[Array, " B"]  # of each prompt's causal pairs


class Calls:
    """Calls of programs: compiled ahead of time, or traced into a caller's."""

    def __init__(self, *, traced: bool = False) -> None:
        self.traced = traced
        self.compile_seconds = 0.0

    def __call__(self, program: Program, *args: Any, **static: Any) -> Any:
        """Calls a program."""
        return self.prepare(program, *args, **static)(*args)

    def prepare(self, program: Program, *args: Any, **static: Any) -> Callable[..., Any]:
        """The program for these arguments; counts the seconds that compiling it took."""
        if self.traced:  # once for all layers
            return functools.partial(jax.jit(program.function, static_argnames=tuple(static)), **static)
        executable, seconds = program.prepare(*args, **static)
        self.compile_seconds += seconds
        return executable

    def number(self, value: int) -> Int[Array, ""]:
        """A number as programs take it."""
        return jnp.int32(value) if self.traced else _on_device(value)

    def compile_ahead(self, program: Program, *args: Any, **static: Any) -> Any:
        """Has a thread compile a program; shapes of its results, or None if it has been compiled."""
        begun = time.perf_counter()
        shapes = program.compile_ahead(*args, **static)
        if shapes is not None:
            self.compile_seconds += time.perf_counter() - begun
        return shapes


@functools.lru_cache(maxsize=4096)
def _on_device(value: int) -> Int[Array, ""]:
    """A number on the device, where it stays: a copy for each call takes longer than the call."""
    return jnp.int32(value)


def read(
    lm: LM,
    tokens: Int[Array | np.ndarray, "B L"],  # right-padded
    lengths: Int[Array | np.ndarray, " B"],
    most: Int[Array | np.ndarray, " B"],  # tokens that the rows will have
    layout: CacheLayout,  # of the rows
    calls: Calls,
    *,
    more_pages: int = 0,  # for rows that will continue these
    backend: Backend = "auto",
    then: Callable[[Any, Any, Any], None] | None = None,  # given the shapes of logits, rows and shares: compiles more
) -> ReadRows:
    """Reads prompts into rows."""
    lm = lm.for_programs()
    if not calls.traced and _are_short(lm, tokens):
        given, static = (lm, tokens, lengths, most), {"layout": layout, "more_pages": more_pages, "backend": backend}
        rest = None if then is None else lambda shapes: then(*shapes)
        return calls.prepare(_read_program, *given, then=rest, **static)(*given)
    tokens, lengths, most = map(jnp.asarray, (tokens, lengths, most))
    if lm.method.cache.reader is not None and layout.has_ranked_blocks:
        return lm.method.cache.reader(lm, tokens, lengths, most, layout, calls, more_pages=more_pages, backend=backend)
    layers = Layers(lm, tokens, lengths, most, layout, calls, backend)
    rows = layers.run(layout, more_pages, then)
    logits, shares = layers.end()
    return ReadRows(logits, rows, shares)


def _are_short(lm: LM, tokens: Int[Array | np.ndarray, "B L"]) -> bool:
    """Whether the host would call the layers of prompts later than the device could read them."""
    waits = jax.default_backend() == "gpu" and lm.mesh is None and tokens.size <= _ONE_PROGRAM_TOKENS
    return waits and lm.method == BASELINE


def _read(lm: LM, tokens: Any, lengths: Any, most: Any, *, layout: CacheLayout, **static: Any) -> ReadRows:
    return read(lm, tokens, lengths, most, layout, Calls(traced=True), **static)


_read_program = Program(_read)


class Layers:
    """The layers of prompts, read one after the other; arguments are those of `read`.

    `x` is the residual stream before a layer, `out` the layer's output of attention, `shares` are attended shares
    summed over layers.
    """

    def __init__(
        self, lm: LM, tokens: Any, lengths: Any, most: Any, layout: Any, calls: Calls, backend: Backend
    ) -> None:
        self._lm, self._tokens, self._lengths, self._most, self._calls = lm, tokens, lengths, most, calls
        of_prompts, self._room = (None, 0) if layout is None else layout_of_prompts(lm, layout)
        self._graphdef: dict[str, Any] = {"graphdef": lm.layer_graphdef}
        self._static = self._graphdef | {"layout": of_prompts, "backend": backend}
        self._programs: dict[Any, Callable[..., Any]] = {}
        self.x: Any = None  # shapes of these and of `out` are there after `prepare`
        self.shares: Any = None
        self.out: Any = None
        self._angles: Any = ()

    def begin(self, layout: CacheLayout | None = None, more_pages: int = 0) -> Any:
        """Embeds the prompts. Returns empty rows of a layout, if there is one."""
        given = self._lm.without_layers(), self._tokens, self._lengths
        found = self._program(begin_program, *given, layout=layout, more_pages=more_pages)(*given)
        self.x, *self._angles, self.shares, rows = found
        return rows

    def read(self, number: int, rows: Any) -> Any:
        """Reads a layer, up to the second half of the last one, into rows."""
        if number:
            given = self._second_half(number - 1)
            self.x = self._program(after_program, *given, **self._graphdef)(*given)
        given, static = self._first_half(number, rows)
        self.out, self.shares, rows = self._program(attend_program, *given, **static)(*given)
        return rows

    def end(self) -> tuple[Float32[Array, "B V"], Float32[Array, " B"]]:
        """Logits after the prompts, and their attended shares."""
        return self._program(end_program, *self._end(), **self._graphdef)(*self._end())

    def run(
        self, layout: CacheLayout | None, more_pages: int = 0, then: Callable[[Any, Any, Any], None] | None = None
    ) -> Any:
        """Reads all layers. Returns the rows."""
        rows = self.begin(layout, more_pages)
        if not self._calls.traced and self._lm.mesh is None:
            self._compile_ahead(rows, then)
        for number in range(self._lm.config.num_layers):
            rows = self.read(number, rows)
        return rows

    def prepare(self, rows: Any) -> None:
        """Compiles all programs for rows of these shapes, before `begin`."""
        given = self._lm.without_layers(), self._tokens, self._lengths
        begin = self._program(begin_program, *given, layout=None, more_pages=0)
        self.x, *self._angles, self.shares, _ = results_of(begin)
        if self._lm.mesh is None:
            self._compile_ahead(rows, None)
        for number in self._different_layers:
            given, static = self._first_half(number, rows)
            self.out = results_of(self._program(attend_program, *given, **static))[0]
        self._program(after_program, *self._second_half(0), **self._graphdef)
        self._program(end_program, *self._end(), **self._graphdef)

    def _compile_ahead(self, rows: Any, then: Callable[[Any, Any, Any], None] | None) -> None:
        """Compiles the programs of layers in threads, the slowest first, unless the first layer's is there."""
        calls = self._calls
        for number in self._different_layers:
            given, static = self._first_half(number, rows)
            found = calls.compile_ahead(attend_program, *given, **static)
            if number == 0:
                if found is None:
                    return
                self.out = found[0]
                if then is not None:
                    shape = len(self._lengths), self._lm.config.vocab_size
                    then(jax.ShapeDtypeStruct(shape, jnp.float32), rows, self.shares)
        calls.compile_ahead(after_program, *self._second_half(0), **self._graphdef)
        if rows is not None:  # else the caller needs no end
            calls.compile_ahead(end_program, *self._end(), **self._graphdef)

    @property
    def _different_layers(self) -> range:
        """Layers that have programs of their own."""
        return range(self._lm.config.num_layers if self._lm.method.layers_differ else 1)

    def _program(self, program: Program, *args: Any, **static: Any) -> Callable[..., Any]:
        """A program for all layers that share it: to look it up takes longer than to call it."""
        key = program, static.get("layer")
        if key not in self._programs:
            self._programs[key] = self._calls.prepare(program, *args, **static)
        return self._programs[key]

    def _first_half(self, number: int, rows: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = self._lm.layer_params(number), self.x, self.shares, rows, *self._angles, self._lengths, self._most
        given = self._lm.without_weights(), *own, *map(self._calls.number, (self._room, number))
        return given, {**self._static, "layer": static_layer(self._lm.method, number)}

    def _second_half(self, number: int) -> tuple[Any, ...]:
        return self._lm.without_weights(), self._lm.layer_params(number), self.x, self.out

    def _end(self) -> tuple[Any, ...]:
        return self._lm.without_layers(), self._lm.last_layer_params, self.x, self.out, self._lengths, self.shares


def layout_of_prompts(lm: LM, layout: CacheLayout) -> tuple[CacheLayout, int]:
    """The layout of the prompts alone, and the most tokens that scores keep of a row, else 0."""
    found = lm.cache_layout(layout.batch, layout.prompt_tokens)
    if not isinstance(lm.method.cache, ScoredCache):
        return found, 0
    return dataclasses.replace(found, shared_pages=()), layout.shared_pages[0][0] * layout.block_size


def static_layer(method: Method, layer: int) -> int | None:
    """The static argument `layer` of programs of a layer."""
    return layer if method.layers_differ else None


def _begin(
    lm: LM, tokens: Int[Array, "B L"], lengths: Int[Array, " B"], *, layout: CacheLayout | None, more_pages: int
) -> tuple[Any, ...]:
    positions = jnp.minimum(jnp.arange(tokens.shape[1]), lengths[:, None] - 1)
    shares = jnp.zeros(lengths.shape, jnp.float32)
    rows = None if layout is None else empty_rows(lm, layout, more_pages)
    return lm.decoder.embed(tokens), *lm.decoder.angles(positions), shares, rows


def _end(
    lm: LM,  # without layers
    weights: Any,  # of the last layer
    x: Float[Array, "B L D"],
    out: Float[Array, "B L Hq d"],
    lengths: Int[Array, " B"],
    shares: Float32[Array, " B"],
    *,
    graphdef: Any,
) -> tuple[Float32[Array, "B V"], Float32[Array, " B"]]:
    """The second half of the last layer, of each prompt's last token, and the logits after it."""
    x, out = (each[jnp.arange(len(lengths)), lengths - 1][:, None] for each in (x, out))
    x = nnx.merge(graphdef, weights).after_attention(x, out)[:, 0]
    logits = lm.decoder.logits(lm.decoder.final_norm(x))
    return logits, mean_of_devices(shares, lm.head_shards) / lm.config.num_layers


def _after_attention(
    lm: LM, weights: Any, x: Float[Array, "B L D"], out: Float[Array, "B L Hq d"], *, graphdef: Any
) -> Float[Array, "B L D"]:
    """The second half of a layer of prompts."""
    return nnx.merge(graphdef, weights).after_attention(x, out)


def _attend_layer(
    lm: LM,  # without weights
    weights: Any,  # of the layer
    x: Float[Array, "B L D"],
    shares: Float32[Array, " B"],
    rows: Rows | None,
    cos: Array,
    sin: Array,
    lengths: Int[Array, " B"],
    most: Int[Array, " B"],
    room: Int[Array, ""],  # tokens of a row that scores may keep
    number: Int[Array, ""],
    *,
    graphdef: Any,
    layout: CacheLayout | None,
    backend: Backend,
    layer: int | None,  # the number where the method's programs differ between layers
) -> tuple[Array, Array, Rows | None]:
    """The first half of a layer of prompts: attention's output, attended shares, and the tokens in pages of rows."""
    module, index, method = nnx.merge(graphdef, weights), number if layer is None else layer, lm.method
    policy, settings = method.cache, lm.settings_of(index)
    scores: Any = None
    if isinstance(policy, ScoredCache):
        settings = policy.of_heads(settings, heads_of(lm.head_shards, index, lm.config.num_kv_heads))
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        scores = policy.score(settings, module.attention_norm(x), positions)

    def attention(q: Array, k: Array, v: Array, _: None) -> tuple[Array, tuple[Array, Rows | None]]:
        if isinstance(policy, ScoredCache):
            kept_so_far = None if rows is None else rows.kept
            attended, written = _attend_scored(
                method, policy, settings, index, q, k, v, scores, lengths, layout, kept_so_far, room, backend
            )
        else:
            heads = heads_of(lm.head_shards, index, k.shape[2])
            attended, written = attend_selected(method, index, heads, q, k, v, lengths, layout, backend)
        if rows is None:
            (out, pairs), filled = attended, None
            return out, (pairs, filled)
        at = jnp.arange(len(lengths))
        filled = rows.with_prompts(index, at, written.kept, k, v, lengths, most, scores, written.means, written.raised)
        # The pages are filled before the model goes on: left to itself the compiler keeps all layers' k and v.
        (out, pairs), filled = jax.lax.optimization_barrier((attended, filled))
        return out, (pairs, filled)

    out, (pairs, filled) = module.attend(x, cos, sin, attention, None)
    return out, shares + pairs / causal_pairs(lengths), filled


class _Written(NamedTuple):
    """Arguments of `Rows.with_prompts` from a layer's selection."""

    kept: Pool | None
    means: BlockMeans | None = None
    raised: Bool[Array, " B"] | None = None


def attend_selected(
    method: Method,
    layer: int | Array,
    heads: Heads,
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    layout: CacheLayout | None,
    backend: Backend,
) -> tuple[Attended, _Written]:
    """Attention of prompts, and the tokens of a layer for their rows."""
    policy, kept, readable = method.cache, None, None
    if layout is not None and layout.has_ranked_blocks:
        queries = last_queries(q, lengths, policy.num_queries)
        selection = policy.select(layer, heads, queries, k, v, lengths)
        with jax.named_scope("select"):
            kept = layout.regions(layer if isinstance(layer, int) else None).fill(
                selection, k, v, block_size=layout.block_size, backend=backend
            )
        readable = kept if method.prefill_reads_cache else None
    attended = method.prefill.attend(layer, heads, q, k, v, lengths, readable, backend)
    return attended, _Written(None if kept is None else kept.pool)


def _attend_scored(
    method: Method,
    policy: ScoredCache,
    settings: Any,
    layer: int | Array,
    q: Array,
    k: Array,
    v: Array,
    scores: Float32[Array, "B H L"],
    lengths: Array,
    layout: CacheLayout | None,
    kept_so_far: Int[Array, "layers B H"] | None,
    room: Int[Array, ""],  # for kept tokens of a row
    backend: Backend,
) -> tuple[Attended, _Written]:
    """`attend_selected` where tokens have scores."""
    b, (batch, length, heads, _), written = policy.block_size, k.shape, _Written(None)
    if layout is not None and layout.has_ranked_blocks:
        edge = (lengths // b * b - policy.window)[:, None, None]
        stays, raised, ranks = policy.stays(settings, scores) & (jnp.arange(length) < edge), None, scores
        if policy.reserve:
            with jax.named_scope("reserve"):
                reserved = policy.reserved(last_queries(q, lengths, policy.num_queries), k, lengths)
            stays, ranks = stays | reserved, jnp.where(reserved, jnp.inf, scores)
        if kept_so_far is not None:  # begun pages come besides
            own = jnp.clip(edge[:, 0, 0], 0, policy.reserve) * heads  # the reserve of a layer
            left = room - kept_so_far.sum(axis=(0, 2)) - own * (len(kept_so_far) - layer)
            part = jnp.maximum(left * policy.part_of_pages(settings), 0).astype(jnp.int32) + own
            stays, raised = _highest(stays, ranks, part)
        with jax.named_scope("select"):
            regions = Regions.plan(batch, [length] * heads, b)
            kept = regions.fill(Selection.of_tokens(stays, b), k, v, block_size=b, backend=backend).pool
        means = policy.block_means(k, v, scores, ~stays) if policy.means else None  # of whole blocks
        written = _Written(kept, means, raised)
    if isinstance(method.prefill, ScoredPrefill):
        attended = method.prefill.attend_scored(settings, q, k, v, scores, lengths, backend)
    else:
        attended = method.prefill.attend(0, Heads.all(heads), q, k, v, lengths, None, backend)
    return attended, written


def _highest(
    stays: Bool[Array, "B H L"], scores: Float32[Array, "B H L"], room: Int[Array, " B"]
) -> tuple[Bool[Array, "B H L"], Bool[Array, " B"]]:
    """The tokens that stay, at most the `room` of highest scores in a row, and whether these are fewer."""
    full = stays.sum(axis=(1, 2)) > room
    # Sorted in any case: for a branch the host would wait in every layer.
    ranked = jnp.sort(jnp.where(stays, scores, -jnp.inf).reshape(len(room), -1), axis=-1, descending=True)
    least = jnp.take_along_axis(ranked, jnp.minimum(room, ranked.shape[1] - 1)[:, None], axis=-1)[..., None]
    highest = (scores > least) | jnp.isposinf(scores) | ~full[:, None, None]  # the first tokens stay in any case
    return stays & highest, full


begin_program = Program(OverMesh(_begin, (ROWS, ROWS), (ROWS, ROWS, ROWS, ROWS, CACHES)))
#: Queries and attention's output on a mesh.
OUT = PartitionSpec(DATA, None, MODEL)
attend_program = Program(
    OverMesh(_attend_layer, (LAYER_WEIGHTS, ROWS, ROWS, CACHES, *(ROWS,) * 4, SAME, SAME), (OUT, ROWS, CACHES)),
    donate=(3, 4),
    one_layer=True,
)
after_program = Program(OverMesh(_after_attention, (LAYER_WEIGHTS, ROWS, OUT), ROWS), donate=(2,), one_layer=True)
end_program = Program(OverMesh(_end, (LAYER_WEIGHTS, ROWS, OUT, ROWS, ROWS), (ROWS, ROWS)))


def _named_pages(lm: LM, rows: Rows) -> Int[Array, "1 1"]:
    return rows.named_pages()


def _compact(lm: LM, rows: Rows, *, pages: int) -> Rows:
    return rows.compacted(pages)


_named_program = Program(OverMesh(_named_pages, (CACHES,), PartitionSpec(DATA, MODEL)))
_compact_program = Program(OverMesh(_compact, (CACHES,), CACHES))


def compacted(lm: LM, rows: Rows, calls: Calls) -> Rows:
    """The rows in a pool of about the pages that they name."""
    lm = lm.without_weights()
    named = int(np.max(on_host(calls(_named_program, lm, rows))))
    step = max(1, 2 ** (named.bit_length() - 4))  # at most 8 sizes an octave
    pages = round_up(named, step)
    return rows if pages >= rows.num_pages else calls(_compact_program, lm, rows, pages=pages)


def _fork(
    lm: LM,
    pool: Rows,
    table: Rows,
    source: Int[Array, " R"],
    most: Int[Array, " R"],
    *,
    more_pages: int,
    widths: Widths,
) -> Rows:
    rows = dataclasses.replace(table, k=pool.k, v=pool.v)
    rows = rows.with_pages(more_pages) if more_pages else rows
    return rows.with_widths(widths).forked(source, most)


_FORKED: tuple[Any, ...] = (CACHES, CACHES, ROWS, ROWS)
_fork_program = Program(OverMesh(_fork, _FORKED, CACHES))
_fork_in_place_program = Program(OverMesh(_fork, _FORKED, CACHES), donate=(1,))


def fork(
    lm: LM,
    rows: Rows,
    times: int,  # rows that continue each
    most: Int[Array, " R"],  # tokens that they will have
    prompt_tokens: int,  # most tokens that they have now; static
    fed_tokens: int,  # most tokens that follow; static
    calls: Calls,
    *,
    private: bool,  # whether the pool has room for it, and `rows` is not used afterwards
) -> Rows:
    """Forks of rows, side by side; they share pages that they do not write to."""
    of_device = rows_of_device(lm, len(most), "rows")
    layout = lm.cache_layout(of_device, prompt_tokens, fed_tokens)
    pages = 0 if private else pages_of_forks(lm, of_device, prompt_tokens, fed_tokens)
    static: dict[str, Any] = {"more_pages": pages, "widths": widths_of(lm, layout)}
    source = jnp.tile(jnp.repeat(jnp.arange(of_device // times), times), len(most) // of_device)
    program = _fork_in_place_program if private else _fork_program
    no_pool: dict[str, Any] = {"k": None, "v": None}
    nothing: dict[str, Any] = dict.fromkeys(("free", "pages", "kept", "start", "own", "length", "scored"))
    pool, table = dataclasses.replace(rows, **nothing), dataclasses.replace(rows, **no_pool)
    return calls(program, lm.without_weights(), pool, table, source, most, **static)


def require_finite(
    lm: LM,
    tokens: Int[np.ndarray, "B L"],
    lengths: Int[np.ndarray, " B"],
    finite: Bool[np.ndarray, " B"],
    argument: str,
) -> None:
    """Raises ValueError unless the logits of all rows are finite; the message names the cause in one row."""
    if finite.all():
        return
    row = int(np.argmin(finite))
    cause = _cause(lm, tokens[row, : lengths[row]])
    raise UserError(f"{lm.name} computes NaN or infinity for {argument}[{row}]: {cause}")


def _cause(lm: LM, prompt: Int[np.ndarray, " L"]) -> str:
    for parameter in parameters(lm.decoder):
        tensors = parameter.layout.split(parameter.variable[...])
        for name, tensor in zip(parameter.names, tensors, strict=True):
            if not bool(jnp.isfinite(tensor).all()):
                return f"the weight {name} is not finite"
    layers = on_host(_finite_layers(lm, jnp.asarray(prompt)[None])).all(axis=1)
    if layers.all():
        return f"the values behind layer {len(layers) - 1} are not finite, in dtype {lm.dtype.name}"
    first = int(np.argmin(layers))
    return f"its weights are finite, the values in layer {first} are not, in dtype {lm.dtype.name}; try another dtype"


def _finite_heads(lm: LM, tokens: Int[Array, "1 L"]) -> Bool[Array, "layers 1"]:
    """Whether each layer's queries, keys, values and attention are finite, on a device."""
    lengths = jnp.array([tokens.shape[1]], jnp.int32)

    def attention(layer: int, q: Array, k: Array, v: Array, state: None) -> tuple[Array, Array]:
        out = causal_attention(q, k, v, lengths)
        return out, jnp.all(jnp.stack([jnp.isfinite(x).all() for x in (q, k, v, out)]))

    positions = jnp.arange(tokens.shape[1])[None]
    _, finite = lm.decoder(tokens, positions, attention, (None,) * lm.config.num_layers)
    return jnp.stack(finite)[:, None]


_finite_layers = jax.jit(OverMesh(_finite_heads, (SAME,), SECOND_HEADS))
