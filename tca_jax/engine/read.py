"""Prompts are read: logits after them, the rows they leave, and the source of values not finite.

Reading is a loop of the host over layers, which share a program where the method treats them equally; for short prompts
under full attention, and inside a caller's jit, the same functions are traced into one program.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.engine.cache import CacheLayout
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import CACHES, ROWS, SAME, WEIGHTS, OverMesh, mean_of_devices, on_host, place, rows_of_device
from tca_jax.engine.pages import NO_POOL, NO_TABLE, Rows, Widths, runtime_number
from tca_jax.errors import UserError
from tca_jax.methods.base import Attended, Heads, Method, last_queries
from tca_jax.methods.full import BASELINE
from tca_jax.methods.regions import Regions, Selection, causal_pairs
from tca_jax.models.names import MODEL, parameters
from tca_jax.models.projections import single_twice
from tca_jax.models.sharding import DATA, axis_size, layer_chunks
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.numerics import cdiv
from tca_jax.programs import MANY_TOKENS, OPTIONS, Program


def empty_rows(lm: LM, rows: int, widths: Widths, pages: int, dtype: Any) -> Rows:
    """Empty rows under a pool of `pages`; on a mesh, those of one device."""
    shape = lm.config.num_layers, rows, lm.config.num_kv_heads // axis_size(lm.mesh, MODEL)
    pool = pages, lm.method.cache.block_size, lm.config.head_dim
    return Rows.create(shape, pool, widths, dtype, scored=lm.method.cache.by_scores)


#: Tokens of prompts that are read in one program under full attention, at most: the device reads a layer of them sooner
#: than the host calls the next one. Selection in all layers would compile for half a minute.
_ONE_PROGRAM = 4096

_OCTAVE_TOKENS = 65536  # length up to which scored attention compiles once an octave: padding costs up to 3% of reading

#: Starts programs that follow a reading: gets the shapes of logits, rows and shares if its own had to be compiled.
Then = Callable[[Any, Any, Any], None]
RowSizes = tuple[int, Widths, int]  # rows of a device, entries of their tables, pages of their pool


class ReadRows(NamedTuple):
    """Prompts that were read."""

    logits: Float32[Array, "B V"]  # of the token after each
    rows: Rows
    attended_share: Float32[Array, " B"]  # of each prompt's causal pairs


class Calls:
    """Calls of programs, compiled ahead of time or traced into a caller's; counts the seconds that compiling took."""

    def __init__(self, *, traced: bool = False) -> None:
        self.traced, self.compile_seconds = traced, 0.0

    def __call__(self, program: Program, *args: Any, **static: Any) -> Any:
        """Calls a program."""
        return self.wait(self.start(program, *args, **static))(*args)

    def start(self, program: Program, *args: Any, **static: Any) -> Any:
        """The program for these arguments, or for their shapes, which a thread may still be compiling."""
        if self.traced:  # once for all layers
            return functools.partial(jax.jit(program.function, static_argnames=tuple(static)), **static)
        compiled = program.start(*args, **static)
        self.compile_seconds += compiled.seconds
        return compiled

    def wait(self, program: Any) -> Callable[..., Any]:
        """A program of `start` once it has been compiled."""
        if not self.traced and not program.compiling.done():
            begun = time.perf_counter()
            program.wait()
            self.compile_seconds += time.perf_counter() - begun
        return program

    def number(self, value: int, mesh: Mesh | None) -> Int[Array, ""]:
        """A number as programs take it."""
        return runtime_number(value) if self.traced else _on_devices(value, mesh, OPTIONS.jax_default_device)


@functools.lru_cache(maxsize=4096)
def _on_devices(value: int, mesh: Mesh | None, _: Any) -> Int[Array, ""]:
    """A number where programs read it, and where it stays: a copy for each call takes longer than the call."""
    return jnp.int32(value) if mesh is None else place(SAME, jnp.int32(value), mesh)


def read(
    lm: LM,
    tokens: Int[Array | np.ndarray, "B L"],  # right-padded
    lengths: Int[Array | np.ndarray, " B"],
    most: Int[Array | np.ndarray, " B"],  # tokens that the rows will have
    layout: CacheLayout,  # of the rows
    calls: Calls,
    *,
    more_pages: int = 0,  # for rows that will continue these
    widths: Widths | None = None,  # of their tables; None for those of the layout
    backend: Backend = "auto",
    then: Then | None = None,
) -> ReadRows:
    """Reads prompts into rows."""
    lm, given = lm.for_programs, (tokens, lengths, most)
    sizes = layout.batch, widths or layout.widths, layout.num_pages + more_pages
    if not calls.traced and _are_short(lm, tokens):
        of_prompts = lm.cache_layout(layout.batch, layout.prompt_tokens)
        program = calls.start(_read_program, lm, *given, layout=of_prompts, sizes=sizes, backend=backend)
        if then is not None and program.seconds:
            then(*program.shapes)
        return calls.wait(program)(lm, *given)
    if lm.method.cache.reader is not None and layout.has_ranked_blocks:
        return lm.method.cache.reader(lm, *given, layout, calls, more_pages=more_pages, backend=backend)
    return _read_layers(Layers(lm, *given, layout, calls, backend), sizes, then)


def _are_short(lm: LM, tokens: Int[Array | np.ndarray, "B L"]) -> bool:
    """Whether the host would call the layers of prompts later than the device could read them."""
    return lm.method == BASELINE and lm.mesh is None and tokens.size <= _ONE_PROGRAM and jax.default_backend() == "gpu"


def _read_layers(layers: Layers, sizes: RowSizes, then: Then | None) -> ReadRows:
    rows = layers.run(sizes, then)
    logits, shares = layers.end()
    return ReadRows(logits, rows, shares)


def _read(lm: LM, tokens: Any, lengths: Any, most: Any, *, layout: CacheLayout, sizes: RowSizes, backend: Any) -> Any:
    return _read_layers(Layers(lm, tokens, lengths, most, layout, Calls(traced=True), backend), sizes, None)


_read_program = Program(_read)


class Layers:
    """The layers of prompts, read one after the other; arguments are those of `read`.

    `x` is the residual stream before a layer, `out` the layer's output of attention, `shares` are attended shares
    summed over layers.
    """

    def __init__(
        self, lm: LM, tokens: Any, lengths: Any, most: Any, layout: Any, calls: Calls, backend: Backend
    ) -> None:
        devices, step = axis_size(lm.mesh, DATA), sum(layer_chunks(lm.config, axis_size(lm.mesh, MODEL)))
        known = lengths.reshape(devices, -1) if isinstance(lengths, np.ndarray) else None
        self._sizes, self._chunks = chunks_of_tokens(known, tokens.size // devices, tokens.shape[1], step)
        self._lm, self._calls = lm, calls
        self._tokens, self._lengths, self._most = map(jnp.asarray, (tokens, lengths, most))
        self._columns, self._room = 0, 0  # tokens of an octave's attention; tokens of a row that scores may keep
        of_prompts = None if layout is None else lm.cache_layout(layout.batch, layout.prompt_tokens)
        if of_prompts is not None and lm.method.cache.by_scores:
            if of_prompts.has_ranked_blocks and len(tokens) == 1 and not calls.traced:
                self._columns = max(tokens.shape[1], min(1 << (tokens.shape[1] - 1).bit_length(), _OCTAVE_TOKENS))
                of_prompts = lm.cache_layout(1, self._columns)
            self._room = layout.shared_pages[0][0] * layout.block_size
            of_prompts = dataclasses.replace(of_prompts, shared_pages=())
        self._static: dict[str, Any] = {"layout": of_prompts, "backend": backend}
        self._programs: dict[Any, Any] = {}
        self.x: Any = None  # shapes of these are there after `prepare`
        self.shares = self.out = self.x
        self._angles: Any = ()

    def begin(self, sizes: RowSizes | None = None) -> Any:
        """Embeds the prompts. Returns empty rows of these sizes, if there are any."""
        self.x, *self._angles, self.shares, rows = self._call(begin_program, *self._begin(), sizes=sizes)
        return rows

    def read(self, number: int, rows: Any) -> Any:
        """Reads a layer, up to the second half of the last one, into rows."""
        if number == 1 and self._lm.mesh is not None:  # so that other lengths of the bucket compile nothing
            self._start_second_halves()
        for start, size in self._chunks if number else ():
            self.x = self._call(after_program, *self._second_half(number - 1, start), size=size)
        self.out, self.shares, rows = self._first_half(number, rows, self._call)
        return rows

    def end(self) -> tuple[Float32[Array, "B V"], Float32[Array, " B"]]:
        """Logits after the prompts, and their attended shares."""
        return self.finish(end_program, self._lengths)

    def finish(self, program: Program, of_rows: Any, **static: Any) -> Any:
        """Calls a program of the last layer's second half, with an array of rows."""
        return self._call(program, *self._end(of_rows), **static)

    def run(self, sizes: RowSizes | None, then: Then | None = None) -> Any:
        """Reads all layers. Returns the rows."""
        if not self._calls.traced and self._lm.mesh is None:
            begin = self._start(begin_program, *self._begin(), sizes=sizes)
            if begin.seconds:
                self._start_all(begin, begin.shapes[-1], then)
        rows = self.begin(sizes)
        for number in range(self._lm.config.num_layers):
            rows = self.read(number, rows)
        return rows

    def prepare(self, rows: Any) -> None:
        """Compiles all programs for rows of these shapes, before `begin`."""
        self._start_all(self._start(begin_program, *self._begin(), sizes=None), rows)
        for program in self._programs.values():
            self._calls.wait(program)

    def _start_all(self, begin: Any, rows: Any, then: Then | None = None) -> None:
        """Starts `then`'s programs and those of all layers, the slowest first."""
        self.x, *self._angles, self.shares, _ = begin.shapes
        if then is not None:
            then(jax.ShapeDtypeStruct((len(self._lengths), self._lm.config.vocab_size), jnp.float32), rows, self.shares)
        for number in range(self._lm.config.num_layers if self._lm.method.layers_differ else 1):
            self.out, *_ = self._first_half(number, rows, lambda *args, **own: self._start(*args, **own).shapes)
        self._start_second_halves()
        if rows is not None:  # else the caller needs no end
            self._start(end_program, *self._end(self._lengths))

    def _start_second_halves(self) -> None:
        for size in self._sizes:
            self._start(after_program, *self._second_half(0, 0), size=size)

    def _start(self, program: Program, *args: Any, **static: Any) -> Any:
        """A program for all layers that share it: to look it up takes longer than to call it."""
        key = program, static.get("layer"), static.get("size")
        if key not in self._programs:
            self._programs[key] = self._calls.start(program, *args, **static)
        return self._programs[key]

    def _call(self, program: Program, *args: Any, **static: Any) -> Any:
        return self._calls.wait(self._start(program, *args, **static))(*args)

    def _begin(self) -> tuple[Any, ...]:
        return self._lm.without_layers, self._tokens, self._lengths

    def _first_half(self, number: int, rows: Any, call: Callable[..., Any]) -> Any:
        sizes = [self._calls.number(each, self._lm.mesh) for each in (self._tokens.shape[1], self._room, number)]
        state, model = (self.shares, rows, self._lengths, self._most, *sizes), self._lm.without_weights
        given = model, self._lm.layer_params(number), self.x, *self._angles
        static = {**self._static, "layer": number if self._lm.method.layers_differ else None}
        if not self._columns:
            return call(attend_program, *given, *state, **static)
        inputs = call(_project_program, *given, sizes[-1], columns=self._columns)
        options = {"backend": static["backend"]}  # in two programs, which compile beside each other
        given = model, inputs, rows, self._lengths, self._most, *sizes
        rows, chosen = call(_fill_program, *given, layout=static["layout"], **options)
        given = model, inputs, chosen, self.shares, self._lengths, sizes[-1]
        return *call(_attention_program, *given, **options), rows

    def _second_half(self, number: int, start: int) -> tuple[Any, ...]:
        weights, first = self._lm.layer_params(number), self._calls.number(start, self._lm.mesh)
        return self._lm.without_weights, weights, self.x, self.out, first

    def _end(self, of_rows: Any) -> tuple[Any, ...]:
        weights = self._lm.layer_params(self._lm.config.num_layers - 1)
        return self._lm.without_layers, weights, self.x, self.out, of_rows, self.shares


def _begin(lm: LM, tokens: Int[Array, "B L"], lengths: Int[Array, " B"], *, sizes: RowSizes | None) -> tuple[Any, ...]:
    positions = jnp.minimum(jnp.arange(tokens.shape[1]), lengths[:, None] - 1)
    rows = None if sizes is None else empty_rows(lm, *sizes, lm.cache_dtype)
    return lm.decoder.embed(tokens), *lm.decoder.angles(positions), jnp.zeros(lengths.shape, jnp.float32), rows


def _end(
    lm: LM,  # without layers
    weights: Any,  # of the last layer
    x: Float[Array, "B L D"],
    out: Float[Array, "B C Hq d"],
    lengths: Int[Array, " B"],
    shares: Float32[Array, " B"],
) -> tuple[Float32[Array, "B V"], Float32[Array, " B"]]:
    """The second half of the last layer, of each prompt's last token, and the logits after it."""
    x, out = (single_twice(each[jnp.arange(len(lengths)), lengths - 1][:, None]) for each in (x, out))
    x = lm.decoder.final_norm(lm.layer(weights).after_attention(x, out)[:, 0])
    return lm.decoder.logits(x), mean_of_devices(shares, lm.head_shards) / lm.config.num_layers


def chunks_of_tokens(
    lengths: Int[np.ndarray, "devices B"] | None,  # None where the host does not know them
    tokens: int,  # of a device, padding included
    columns: int,  # of a row, L
    step: int,  # most tokens of a chunk
) -> tuple[list[int], list[tuple[int, int]]]:
    """Sizes that chunks may have, and the chunks (start, size) that hold the tokens of prompts, on any device."""
    if lengths is None or 2 * tokens <= step:  # the host calls no two programs as fast as a device reads so few
        return [tokens], [(0, tokens)]
    unit, place, chunks = max(1, step // 16), 0, list[tuple[int, int]]()
    sizes = [size for size in (16 * unit, 4 * unit, unit, tokens % unit) if 0 < size <= tokens]
    there = (np.arange(columns) < lengths[..., None]).any(axis=0).ravel()
    used: Any = np.pad(there, (0, -tokens % unit)).reshape(-1, unit).any(axis=1)
    while (start := place * unit) < tokens:
        fitting = (s for s in sizes if start + s <= tokens and used[place : place + cdiv(s, unit)].all())
        chunks += [(start, size)] if (size := next(fitting, 0)) else []
        place += cdiv(size, unit) or 1
    return sizes, chunks


def _after_attention(
    lm: LM, weights: Any, x: Float[Array, "B L D"], out: Float[Array, "B C Hq d"], start: Int[Array, ""], *, size: int
) -> Float[Array, "B L D"]:
    """The second half of a layer, of `size` tokens of the prompts, which are one row after the other."""
    flat = [each[:, : x.shape[1]].reshape(-1, *each.shape[2:]) for each in (x, out)]
    chunk = (jax.lax.dynamic_slice_in_dim(each, start, size)[None] for each in flat)
    layer = lm.layer(weights)
    if 4 * size == sum(layer.chunks):  # on a mesh, in two parts: XLA would sum four smaller ones together
        layer.chunks = tuple(each // 2 for each in layer.chunks[:2])
    new = layer.after_attention(*chunk)[0]
    return jax.lax.dynamic_update_slice_in_dim(flat[0], new, start, axis=0).reshape(x.shape)


def _project(
    lm: LM, weights: Any, x: Float[Array, "B L D"], cos: Array, sin: Array, number: Int[Array, ""], *, columns: int
) -> tuple[Array, Array, Array, Array | None]:
    """Queries, keys, values and scores of a layer, of `columns` tokens: zeros past L."""
    module, room = lm.layer(weights), columns - x.shape[1]
    scores = lm.scores(number, module.attention_norm(x), jnp.tile(jnp.arange(x.shape[1]), (len(x), 1)))
    q, (k, v) = module.attend(x, cos, sin, lambda q, k, v, _: (q, (k, v)), None, room)
    return q, k, v, None if scores is None else jnp.pad(scores, ((0, 0), (0, 0), (0, room)))


def _attend_layer(
    lm: LM,  # without weights
    weights: Any,
    x: Float[Array, "B L D"],
    cos: Array,
    sin: Array,
    shares: Float32[Array, " B"],
    rows: Rows | None,
    lengths: Int[Array, " B"],
    most: Int[Array, " B"],
    padded: Int[Array, ""],  # length of the prompts, L
    room: Int[Array, ""],  # tokens of a row that scores may keep
    number: Int[Array, ""],
    *,
    layout: CacheLayout | None,
    backend: Backend,
    layer: int | None,  # the number where the method's programs differ between layers
) -> tuple[Array, Array, Rows | None]:
    """The first half of a layer: attention's output, attended shares, and the tokens in pages of rows."""
    inputs: Any = _project(lm, weights, x, cos, sin, number, columns=x.shape[1])
    (q, k, v, scores), index, filled = inputs, number if layer is None else layer, rows
    if scores is not None:
        out, shares = _attend_scored(lm, inputs, None, shares, lengths, number, backend=backend)
        if rows is not None:
            given = lengths, most, padded, room, number
            filled = _fill_scored(lm, inputs, rows, *given, layout=layout, backend=backend)
    else:
        attended, kept = attend_selected(lm.method, index, lm.heads(index), q, k, v, lengths, layout, backend)
        out, shares = attended.out, shares + attended.pairs / causal_pairs(lengths)
        if rows is not None:
            filled = rows.with_prompts(index, 0, kept, k, v, lengths, most)
    # The pages are filled before the model goes on: left to itself the compiler keeps all layers' k and v.
    return (out, shares, None) if rows is None else jax.lax.optimization_barrier((out, shares, filled))


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
) -> tuple[Attended, Pool | None]:
    """Attention of prompts, and the tokens of a layer for their rows."""
    policy, kept, readable = method.cache, None, None
    if layout is not None and layout.has_ranked_blocks:
        selection = policy.select(layer, heads, last_queries(q, lengths, policy.num_queries), k, v, lengths)
        regions = layout.regions(layer if isinstance(layer, int) else None)
        with jax.named_scope("select"):
            kept = regions.fill(selection, k, v, block_size=layout.block_size, backend=backend)
        readable = kept if method.prefill_reads_cache else None
    attended = method.prefill.attend(layer, heads, q, k, v, lengths, readable, backend)
    return attended, None if kept is None else kept.pool


def _attend_scored(
    lm: LM,  # without weights
    inputs: tuple[Array, Array, Array, Array],  # of `_project`, [B, C, heads, d] and [B, Hkv, C]
    chosen: Any,  # of `_choose`; None where that is still to be called, or there is nothing to choose
    shares: Float32[Array, " B"],
    lengths: Int[Array, " B"],
    number: Int[Array, ""],
    *,
    backend: Backend,
) -> tuple[Array, Array]:
    """Attention of a layer whose tokens have scores: its output, and attended shares."""
    (q, k, v, _), prefill = inputs, typing.cast(Any, lm.method.prefill)
    if prefill.by_scores:
        chosen = _choose(lm, inputs, lengths, number, backend) if chosen is None else chosen
        attended = prefill.attend_chosen(q, k, v, chosen, lengths, backend)
    else:
        attended = prefill.attend(0, Heads.all(k.shape[2]), q, k, v, lengths, None, backend)
    return attended.out, shares + attended.pairs / causal_pairs(lengths)


def _choose(lm: LM, inputs: Any, lengths: Int[Array, " B"], number: Int[Array, ""], backend: Backend) -> Any:
    """Tokens, blocks and means that the queries of a layer attend to; None where they attend to all."""
    return typing.cast(Any, lm.method.prefill).choose(lm.scored_settings(number), *inputs, lengths, backend)


def _fill_and_choose(
    lm: LM, inputs: Any, rows: Rows, lengths: Array, *sizes: Array, layout: CacheLayout, backend: Backend
) -> tuple[Rows, Any]:
    """`_fill_scored`, and on one device `_choose`: with attention, its kernels would compile one after the other."""
    filled, number = _fill_scored(lm, inputs, rows, lengths, *sizes, layout=layout, backend=backend), sizes[-1]
    chosen = lm.mesh is None and typing.cast(Any, lm.method.prefill).by_scores
    return filled, _choose(lm, inputs, lengths, number, backend) if chosen else None


def _fill_scored(
    lm: LM,
    inputs: tuple[Array, Array, Array, Float32[Array, "B H L"]],
    rows: Rows,
    lengths: Int[Array, " B"],
    most: Int[Array, " B"],
    padded: Int[Array, ""],
    room: Int[Array, ""],
    number: Int[Array, ""],
    *,
    layout: CacheLayout | None,
    backend: Backend,
) -> Rows:
    """A layer's tokens in pages of rows: those that stay by scores, the window, and means of the others."""
    (q, k, v, scores), policy, settings = inputs, typing.cast(Any, lm.method.cache), lm.scored_settings(number)
    if layout is None or not layout.has_ranked_blocks:
        return rows.with_prompts(number, 0, None, k, v, lengths, most, scores)
    b, (batch, length, heads, _), kept_so_far = policy.block_size, k.shape, rows.kept
    edge = (lengths // b * b - policy.window)[:, None, None]
    stays, ranks = policy.stays(settings, scores) & (jnp.arange(length) < edge), scores
    if policy.reserve:
        with jax.named_scope("reserve"):
            reserved = policy.reserved(last_queries(q, lengths, policy.num_queries), k, lengths)
        stays, ranks = stays | reserved, jnp.where(reserved, jnp.inf, scores)
    # Room is that of all layers and heads together; begun pages come besides.
    ranked, reserves = jnp.maximum(edge[:, 0, 0], 0), policy.reserve * heads * len(kept_so_far)
    own = jnp.minimum(ranked, policy.reserve) * heads  # the reserve of a layer
    share = ranked / (policy.num_ranked_blocks(padded) * b)  # of the padded prompt's
    of_row = reserves + (room - reserves) * share
    left = of_row - kept_so_far.sum(axis=(0, 2)) - own * (len(kept_so_far) - number)
    stays, raised = _highest(stays, ranks, jnp.maximum(left * settings.left, 0).astype(jnp.int32) + own)
    with jax.named_scope("select"):
        regions = Regions.plan(batch, [length] * heads, b)
        pool = regions.fill(Selection.of_tokens(stays, b), k, v, block_size=b, backend=backend).pool
    means = policy.block_means(k, v, scores, ~stays) if policy.means else None  # of whole blocks
    return rows.with_prompts(number, 0, pool, k, v, lengths, most, scores, means, raised)


def _highest(
    stays: Bool[Array, "B H L"], scores: Float32[Array, "B H L"], room: Int[Array, " B"]
) -> tuple[Bool[Array, "B H L"], Bool[Array, " B"]]:
    """The tokens that stay, at most the `room` of highest scores in a row, and whether these are fewer."""
    full = stays.sum(axis=(1, 2)) > room
    # Sorted in any case: for a branch the host would wait in every layer.
    ranked = jnp.sort(jnp.where(stays, scores, -jnp.inf).reshape(len(room), -1), axis=-1, descending=True)
    least = jnp.take_along_axis(ranked, room[:, None], axis=-1, mode="clip")[..., None]
    highest = (scores > least) | jnp.isposinf(scores) | ~full[:, None, None]  # the first tokens stay in any case
    return stays & highest, full


begin_program = Program(OverMesh(_begin, (ROWS, ROWS), (ROWS, ROWS, ROWS, ROWS, CACHES)))
OUT = PartitionSpec(DATA, None, MODEL)  # of queries and attention's output on a mesh
_INPUTS: Any = OUT, OUT, OUT, PartitionSpec(DATA, MODEL)
_LAYER: Any = WEIGHTS, ROWS, ROWS, ROWS
_SIZES: Any = ROWS, ROWS, SAME, SAME, SAME
_program = functools.partial(Program, on_gpu=MANY_TOKENS)
attend_program = _program(OverMesh(_attend_layer, (*_LAYER, ROWS, CACHES, *_SIZES), (OUT, ROWS, CACHES)), donate=(5, 6))
_project_program = _program(OverMesh(_project, (*_LAYER, SAME), _INPUTS))
_attention_program = _program(OverMesh(_attend_scored, (_INPUTS, SAME, ROWS, ROWS, SAME), (OUT, ROWS)), donate=(3,))
_fill_program = _program(OverMesh(_fill_and_choose, (_INPUTS, CACHES, *_SIZES), (CACHES, SAME)), donate=(2,))
after_program = _program(OverMesh(_after_attention, (WEIGHTS, ROWS, OUT, SAME), ROWS), donate=(2,))
end_program = Program(OverMesh(_end, (WEIGHTS, ROWS, OUT, ROWS, ROWS), (ROWS, ROWS)))


def _fork(lm: LM, pool: Rows, table: Rows, source: Array, most: Array, *, more_pages: int, widths: Widths) -> Rows:
    rows = dataclasses.replace(table, k=pool.k, v=pool.v)
    return (rows.with_pages(more_pages) if more_pages else rows).with_widths(widths).forked(source, most)


_FORKED: tuple[Any, ...] = (CACHES, CACHES, ROWS, ROWS)
_fork_program = Program(OverMesh(_fork, _FORKED, CACHES))
_fork_in_place_program = Program(OverMesh(_fork, _FORKED, CACHES), donate=(1,))


def fork(
    lm: LM,
    rows: Rows,
    times: int,  # rows that continue each
    most: Int[Array | np.ndarray, " R"],  # tokens that they will have
    prompt_tokens: int,  # most tokens that they have now; static
    fed_tokens: int,  # most tokens that follow; static
    calls: Calls,
    *,
    more_pages: int = 0,  # of a copy of the pool; 0 where it has room, and `rows` is not used afterwards
) -> Rows:
    """Forks of rows, side by side; they share pages that they do not write to."""
    of_device = rows_of_device(lm, len(most), "rows")
    widths = lm.cache_layout(of_device, prompt_tokens, fed_tokens).widths
    source = np.tile(np.repeat(np.arange(of_device // times, dtype=np.int32), times), len(most) // of_device)
    program = _fork_program if more_pages else _fork_in_place_program
    pool, table = dataclasses.replace(rows, **NO_TABLE), dataclasses.replace(rows, **NO_POOL)
    return calls(program, lm.without_weights, pool, table, source, most, more_pages=more_pages, widths=widths)


def require_finite(lm: LM, finite: np.ndarray, argument: str, ids: Callable[[int], Sequence[int]]) -> None:
    """Raises ValueError, with the cause in one row, unless the logits of all rows, of these token ids, are finite."""
    if not finite.all():
        row = int(np.argmin(finite))
        raise UserError(f"{lm.name} computes NaN or infinity for {argument}[{row}]: {_cause(lm, ids(row))}")


def _cause(lm: LM, prompt: Sequence[int]) -> str:
    for parameter in parameters(lm.decoder):
        tensors = parameter.layout.split(parameter.variable[...])
        for name, tensor in zip(parameter.names, tensors, strict=True):
            if not bool(jnp.isfinite(tensor).all()):
                return f"the weight {name} is not finite"
    tokens = jnp.asarray([prompt] * axis_size(lm.mesh, DATA), jnp.int32)
    lengths = jnp.full(len(tokens), len(prompt), jnp.int32)
    layers = Layers(lm.with_method(BASELINE).for_programs, tokens, lengths, lengths, None, Calls(), "auto")
    layers.begin()
    for number in range(lm.config.num_layers):
        layers.read(number, None)
        if not np.isfinite(on_host(layers.out)).all():
            where = f"the values in layer {number} are not, in dtype {lm.dtype.name}; try another dtype"
            return f"its weights are finite, {where}"
    return f"the values behind layer {number} are not finite, in dtype {lm.dtype.name}"
