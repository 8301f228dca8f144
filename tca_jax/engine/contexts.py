"""`prefill` and `Context`: a document that is read once, and continued from any number of times."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int

from tca_jax.engine.cache import CacheLayout, PagedCache, joined, kept_behind, require_memory, shared_and_own
from tca_jax.engine.extend import align, extend, num_columns
from tca_jax.engine.lm import LM, require_lm
from tca_jax.engine.mesh import (
    CACHES,
    ROWS,
    HeadShards,
    OverMesh,
    by_row,
    mesh_name,
    on_host,
    place,
    rows_of_device,
)
from tca_jax.engine.prompts import Prompt, encode_appended, encode_prompts, pad_tokens, require_positions
from tca_jax.engine.read import read_prompts, require_finite
from tca_jax.engine.saved_contexts import OF_ROWS, ContextIdentity, load_context, save_context
from tca_jax.errors import UserError, require, require_type
from tca_jax.methods.full import BASELINE
from tca_jax.methods.registry import describe_method, unknown_types
from tca_jax.models.sharding import DATA, axis_size
from tca_jax.pallas_kernels.backends import Backend, resolve_backend
from tca_jax.pallas_kernels.kv import CODES
from tca_jax.programs import Program

_Lengths = TypeVar("_Lengths", np.ndarray, jax.Array)


def identity_of(lm: LM) -> ContextIdentity:
    """The identity of contexts that a model makes under its method."""
    return ContextIdentity(lm.name, lm.config, lm.fingerprint, lm.method.name, describe_method(lm.method))


@dataclasses.dataclass(frozen=True)
class ContextStats:
    """What a context cost, and costs.

    Attributes:
        tokens: Tokens of each row.
        kv_cache_bytes: Bytes of its caches, as allocated, on all devices.
        full_kv_cache_bytes: Bytes of a context of as many tokens under full attention.
        kept_share: Share of the tokens that the caches hold, mean over rows, layers and KV heads.
        attended_share: Share of the prompt's causal pairs (query, key) that its queries attended to, mean over rows,
            layers and query heads: of the tokens that the first `prefill` read, whatever was appended since.
        compile_seconds: Tracing and compiling, in the `prefill` that made it; 0 when the programs were there.
        prefill_seconds: Reading, in that `prefill`.
        devices: Devices that hold it. Each of them allocates as much.
    """

    tokens: list[int]
    kv_cache_bytes: int
    full_kv_cache_bytes: int
    kept_share: float
    attended_share: float
    compile_seconds: float
    prefill_seconds: float
    devices: int = 1

    @property
    def kv_cache_bytes_per_device(self) -> int:
        """Bytes of its caches on each device."""
        return self.kv_cache_bytes // self.devices


@typing.no_type_check  # as a pytree it may hold whatever a transformation puts in its leaves
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "cache",
        "tokens",
        "lengths",
        "prompt_lengths",
        "attended_share",
        "compile_seconds",
        "prefill_seconds",
    ],
    meta_fields=["layout", "shards", "identity"],
)
@dataclasses.dataclass(frozen=True, repr=False)
class Context:
    """What a model has read, one row or several: a pytree that `generate`, `stream` and `prefill` continue from.

    It is never consumed: any number of calls may continue from it, and they share what it holds. `prefill` makes it.

    Attributes:
        cache: What the model holds of it.
        tokens: Ids of the tokens so far, right-padded, int32 `[B, L]`.
        lengths: How many these are, `[B]`.
        prompt_lengths: Those of them that the first `prefill` read, `[B]`.
        attended_share: Of each row, float32 `[B]`; see `ContextStats`.
        compile_seconds: See `ContextStats`.
        prefill_seconds: See `ContextStats`.
        layout: Static shape of `cache`, on each device.
        shards: How KV heads lie on a mesh; None on one device.
        identity: Whose it is.
    """

    cache: PagedCache
    tokens: Int[Array, "B L"]
    lengths: Int[Array, " B"]
    prompt_lengths: Int[Array, " B"]
    attended_share: Float32[Array, " B"]
    compile_seconds: float
    prefill_seconds: float
    layout: CacheLayout
    shards: HeadShards | None
    identity: ContextIdentity

    def __repr__(self) -> str:
        tokens = " + ".join(f"{n:,}" for n in np.asarray(self.lengths).tolist())
        return f"Context({tokens} tokens, {self.identity.model!r} under {self.identity.method!r})"

    @property
    def batch(self) -> int:
        """Rows, B."""
        return self.lengths.shape[0]

    def token_ids(self, row: int = 0) -> list[int]:
        """Ids of the tokens of a row."""
        return np.asarray(self.tokens)[row, : int(self.lengths[row])].tolist()

    @property
    def num_devices(self) -> int:
        """Devices that hold it."""
        return self.batch // self.layout.batch * (1 if self.shards is None else self.shards.devices)

    @property
    def num_bytes(self) -> int:
        """Bytes of its keys and values on all devices together."""
        return self.cache.num_bytes

    @property
    def stats(self) -> ContextStats:
        """What it cost, and costs."""
        head_dim, dtype = self.cache.head_dim, self.cache.dtype
        devices = self.num_devices
        return ContextStats(
            tokens=np.asarray(self.lengths).tolist(),
            kv_cache_bytes=self.num_bytes,
            full_kv_cache_bytes=full_layout(self).num_bytes(head_dim, dtype) * devices,
            kept_share=kept_share(self.layout.window, [self.cache], self.lengths, self.prompt_lengths),
            attended_share=float(np.mean(np.asarray(self.attended_share))),
            compile_seconds=self.compile_seconds,
            prefill_seconds=self.prefill_seconds,
            devices=devices,
        )

    def require_made_by(self, lm: LM) -> None:
        """Raises ValueError, which names both sides, unless a model can continue the context as it is."""
        own, made = identity_of(lm), self.identity
        wanted, held = lm.cache_dtype, self.cache.dtype
        require(
            (made.config, made.fingerprint) == (own.config, own.fingerprint),
            f"context was made by model {made.model!r}, whose weights or shape are not those of {own.model!r}: "
            "read the document with this model",
        )
        if made.method_description != own.method_description:
            unknown = unknown_types(made.method_description)
            options = " with other options or budgets" if made.method == own.method else ""
            remedy = f"{options}, and {own.model!r} runs under {own.method!r}: read the document under this method"
            if unknown:
                remedy = (
                    f", whose {unknown[0]} is not known here: the context may be of another version of tca_jax, or of "
                    "code that is not imported; read the document again"
                )
            raise UserError(f"context was made under method {made.method!r}{remedy}")
        how = "with kv='fp8'" if held == CODES else f"in dtype {held}" + (", without kv" if wanted == CODES else "")
        dtypes = f"context holds {held} and the cache of {own.model!r} {wanted}"
        require(held == wanted, f"{dtypes}: load the model {how}")
        require(
            self.shards == lm.head_shards and self.batch == self.layout.batch * axis_size(lm.mesh, DATA),
            f"context was made on {self._mesh_name}, and {lm.name!r} is on {mesh_name(lm.mesh)} devices on "
            f"{DATA!r} x 'model', or has its KV heads in another order there: read the document with this model",
        )

    def on(self, lm: LM) -> Context:
        """The context on the devices of a model; itself where it is there already.

        Calls that continue a context do this where it is needed: once, here, is enough for several of them.

        Args:
            lm: A model that can continue it, on as many devices as made it, with KV heads in the same order.

        Raises:
            ValueError: it belongs to another model or method, or devices share its rows and KV heads in another way.
        """
        self.require_made_by(lm)
        if not isinstance(self.cache.start, np.ndarray):
            return self
        put = jnp.asarray if lm.mesh is None else functools.partial(place, CACHES, mesh=lm.mesh)
        rows: dict[str, Any] = {name: jnp.asarray(getattr(self, name)) for name in OF_ROWS}
        return dataclasses.replace(self, cache=jax.tree.map(put, self.cache), **rows)

    @property
    def _mesh_name(self) -> str:
        """Devices on "data" x devices on "model"."""
        return f"{self.batch // self.layout.batch}x{1 if self.shards is None else self.shards.devices}"

    def to_host(self) -> Context:
        """The context with its arrays in the host's memory. `on` brings them back, as every call does for itself."""
        return jax.tree.map(on_host, self)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the context to a directory, in place of the one that it holds, whole or not at all.

        Args:
            directory: Created if missing. Other files in it are left alone.

        Raises:
            OSError: it cannot be written; what was there before is intact.
        """
        save_context(directory, vars(self))

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Context:
        """Reads a saved context into the host's memory; `on` puts it on the devices, as calls with it do.

        Whether it belongs to a model, method and mesh is checked where it is used.

        Raises:
            FileNotFoundError: `directory` does not exist.
            ValueError: there is none in it, or it is damaged or of another version; the message names the folder.
        """
        return cls(**load_context(directory), compile_seconds=0.0, prefill_seconds=0.0)


def prefill(
    lm: LM, prompts: Prompt | Sequence[Prompt], context: Context | None = None, *, backend: str = "auto"
) -> Context:
    """Reads a document, or a batch of documents, for any number of questions.

    Args:
        lm: From `tca_jax.load`; the context belongs to it under its attention method.
        prompts: Strings, chats or token ids; one or a sequence of any lengths.
        context: What came before; the prompts are appended to it as they are (no token is put before text, and a chat
            must begin with all that the context holds). As many prompts as it has rows, or any number where it has
            one. It stays what it is.
        backend: Kernel backend: "auto", "xla", "triton" or "mosaic".

    Returns:
        A context of one row a prompt, with room for whatever follows: only memory and the model's positions limit it.

    Raises:
        ValueError: a prompt is not allowed or too long, or `context` belongs to another model or method; raised before
            anything is compiled. Or the model computes NaN or infinity, with the layer.
        TypeError: an argument is of a wrong type.
    """
    require_lm(lm)
    kernels = resolve_backend(backend)
    if context is not None:
        return _append(lm, prompts, context, kernels)
    args, layout = _reading(lm, prompts)
    program, compiling = _read.prepare(*args, layout=layout, backend=kernels)
    start = time.perf_counter()
    cache, finite, shares = jax.block_until_ready(program(*args))
    seconds = time.perf_counter() - start
    tokens, lengths = args[1:]
    finite, shares = on_host((finite, shares))
    require_finite(lm, np.asarray(tokens), np.asarray(lengths), finite, "prompts")
    made = compiling, seconds, layout, lm.head_shards, identity_of(lm)
    return Context(cache, tokens, lengths, lengths, jnp.asarray(shares), *made)


def _reading(lm: LM, prompts: Prompt | Sequence[Prompt]) -> tuple[tuple[LM, Array, Array], CacheLayout]:
    """Arguments of the program that reads prompts, checked, and the cache that it fills."""
    ids = encode_prompts(lm, prompts)
    for i, row in enumerate(ids):
        require_positions(f"prompts[{i}]", len(row), 0, lm)
    tokens, lengths = pad_tokens(ids, lm.pad_token_id)
    layout = lm.cache_layout(rows_of_device(lm, len(ids), "prompts"), tokens.shape[1])
    require_memory(layout.num_bytes(lm.config.head_dim, lm.cache_dtype), f"contexts of {len(ids)} prompts")
    return (lm.for_programs(), jnp.asarray(tokens), jnp.asarray(lengths)), layout


def _read_program(
    lm: LM, tokens: Int[Array, "B L"], lengths: Int[Array, " B"], *, layout: CacheLayout, backend: Backend
) -> tuple[PagedCache, Bool[Array, " B"], Float32[Array, " B"]]:
    logits, cache, shares, _ = read_prompts(lm, tokens, lengths, layout, backend=backend)
    assert cache is not None
    return cache, jnp.isfinite(logits).all(axis=-1), shares


_read = Program(OverMesh(_read_program, (ROWS, ROWS), (CACHES, ROWS, ROWS)))


def _append(lm: LM, prompts: Any, context: Any, backend: Backend) -> Context:
    """The context with more tokens, all in one cache again."""
    appended = AppendedPrompts.create(lm, prompts, context)
    appended.require_positions(lm, 0)
    context = appended.context
    rows, columns = appended.tokens.shape
    held = rows_of_device(lm, rows, "prompts")
    whole_rows = [context.token_ids(i % context.batch) + more for i, more in enumerate(appended.ids)]
    tokens, lengths = pad_tokens(whole_rows, lm.pad_token_id)
    following = lm.following_layout(held, context.tokens.shape[1], columns)
    layout = _layout_after(lm, context, held, tokens.shape[1], columns)
    require_memory(layout.num_bytes(lm.config.head_dim, lm.cache_dtype), f"contexts of {rows} prompts")
    before = context.lengths, context.prompt_lengths, context.attended_share
    starts, prompt_lengths, shares = (jnp.broadcast_to(jnp.asarray(x), rows) for x in before)
    args = (lm.for_programs(), context.cache, appended.tokens, starts, appended.lengths, prompt_lengths)
    program, compiling = _append_to.prepare(*args, layouts=(following, layout), backend=backend)
    begin = time.perf_counter()
    cache, finite = jax.block_until_ready(program(*args))
    seconds = time.perf_counter() - begin
    require_finite(lm, tokens, lengths, on_host(finite), "prompts")
    made = compiling, seconds, layout, context.shards, context.identity
    return Context(cache, jnp.asarray(tokens), jnp.asarray(lengths), prompt_lengths, shares, *made)


# Where pages for kept tokens run out, there is room made for more than is fed: for so many blocks, or this part of the
# context.
_HEADROOM_BLOCKS = 8
_HEADROOM_SHARE = 8


def _layout_after(lm: LM, context: Context, rows: int, prompt_tokens: int, fed_tokens: int) -> CacheLayout:
    """The cache of a context once `fed_tokens` were appended, in `rows` rows of a device.

    There are as many pages as now where everything is sure to fit, so that a conversation's turns mostly run one
    program; otherwise there are as many more as some more turns may fill. How many more does not depend on what is
    held, so documents of one bucket run few programs.
    """
    policy, now = lm.method.cache, context.layout
    fresh = lm.cache_layout(rows, prompt_tokens)
    headroom = fed_tokens + max(_HEADROOM_BLOCKS * now.block_size, now.prompt_tokens // _HEADROOM_SHARE)

    def more(layer: int, fed: int) -> np.ndarray:
        tokens = kept_behind(policy, layer, now.prompt_tokens, fed, lm.config.num_kv_heads)
        return tokens[None] if context.shards is None else context.shards.by_device(layer, tokens)

    needed, fits = list[np.ndarray](), list[bool]()
    for layer, (kept, of_layer) in enumerate(zip(on_host(context.cache.kept), now.kept_pages, strict=True)):
        held = by_row(kept).reshape(-1, *np.shape(of_layer))  # [rows, devices, H_kv]
        needed.append(-(-(held + more(layer, fed_tokens)) // now.block_size))
        fits.append(bool(np.all(needed[-1] <= np.asarray(of_layer))))
    n = now.pool_layers
    if now.shared_pages:  # which layers have room depends on how their heads divide it: one answer for all of them
        pools = range(len(now.shared_pages))
        pages = [np.sum(needed[i * n : (i + 1) * n], axis=(0, -1)) for i in pools]
        fits = [all(fits) and all(bool(np.all(pages[i] <= now.shared_by_row(i))) for i in pools)] * len(fits)
    added = [0 if fit else -(-more(layer, headroom) // now.block_size) for layer, fit in enumerate(fits)]
    return dataclasses.replace(
        fresh,
        kept_pages=tuple(
            tuple(map(tuple, (np.asarray(of_layer) + extra).tolist()))
            for of_layer, extra in zip(now.kept_pages, added, strict=True)
        ),
        shared_pages=tuple(
            (together, of_head + int(np.max(np.stack(added[i * n : (i + 1) * n]))))
            for i, (together, of_head) in enumerate(now.shared_pages)
        ),
    )


def _append_program(
    lm: LM,
    cache: PagedCache,
    tokens: Int[Array, "B S"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    prompt_lengths: Int[Array, " B"],
    *,
    layouts: tuple[CacheLayout, CacheLayout],
    backend: Backend,
) -> tuple[PagedCache, Bool[Array, " B"]]:
    following, layout = layouts
    shared, own = shared_and_own(cache, following, starts)
    own, logits, _ = extend(lm, shared, own, tokens, starts, lengths, prompt_lengths, backend=backend)
    first = first_local(starts + lengths, prompt_lengths, layout.block_size, layout.window)
    return joined(shared, own, layout, first), jnp.isfinite(logits).all(axis=-1)


_append_to = Program(OverMesh(_append_program, (CACHES, ROWS, ROWS, ROWS, ROWS), (CACHES, ROWS)))


def first_local(fed: _Lengths, prompt_lengths: _Lengths, block_size: int, window: int) -> _Lengths:
    """First position of each row's window after `fed` tokens; after a bare prompt that of the next token."""
    last = fed - 1 * (fed > prompt_lengths)
    edge = last // block_size * block_size - window
    return edge * (edge > 0)


def kept_share(window: int, caches: Sequence[PagedCache], fed: Any, prompt_lengths: Any) -> float:
    """Tokens in caches over tokens fed, mean over rows, layers and KV heads."""
    kept, fed, prompt_lengths = on_host(([cache.kept for cache in caches], fed, prompt_lengths))
    local = fed - first_local(fed, prompt_lengths, caches[0].block_size, window)
    of_caches = [np.stack([by_row(of_layer) for of_layer in lengths]).mean(axis=(0, 2)) for lengths in kept]
    total = sum(np.repeat(of_rows, len(fed) // len(of_rows)) for of_rows in of_caches)
    return float(np.mean((total + local) / fed))


@dataclasses.dataclass(frozen=True)
class AppendedPrompts:
    """Prompts that follow a context, checked and aligned to its blocks."""

    ids: list[list[int]]  # token ids of each prompt
    tokens: Int[Array, "N S"]  # the same as `extend` takes them, `[N, S]`
    lengths: Int[Array, " N"]  # how many, `[N]`
    starts: list[int]  # tokens of the context before each of them
    context: Context  # the context, where the model lies

    def require_positions(self, lm: LM, max_new_tokens: int) -> None:
        """Raises ValueError if a prompt leaves no positions for its answer."""
        for i, (start, ids) in enumerate(zip(self.starts, self.ids, strict=True)):
            require_positions(f"prompts[{i}]", len(ids), max_new_tokens, lm, context_tokens=start)

    @classmethod
    def create(cls, lm: LM, prompts: Any, context: Any) -> AppendedPrompts:
        """Checks that the context is the model's, encodes the prompts and aligns them.

        Raises:
            ValueError: the context belongs to another model or method, or has another number of rows; or a prompt is
                not allowed.
            TypeError: `context` is none, or a prompt is of a wrong type.
        """
        require_type("context", context, Context, "a Context, from tca_jax.prefill")
        context = context.on(lm)
        ids = encode_appended(lm, prompts, context.batch, context.token_ids)
        held, b = np.asarray(context.lengths), context.layout.block_size
        starts = np.broadcast_to(held, len(ids))
        lengths = np.array([len(of_prompt) for of_prompt in ids], np.int32)
        columns = num_columns(int(np.max(starts % b + lengths)), b)
        tokens = align(pad_tokens(ids)[0], starts, block_size=b, columns=columns)
        return cls(ids, jnp.asarray(tokens), jnp.asarray(lengths), starts.tolist(), context)


def full_layout(context: Context) -> CacheLayout:
    """Cache layout of the same tokens under full attention."""
    layout = context.layout
    heads = layout.num_kv_heads * (1 if context.shards is None else context.shards.devices)
    sizes = layout.num_layers, heads, layout.batch, context.tokens.shape[1], 0, context.shards
    return CacheLayout.plan(BASELINE.cache, *sizes)
