"""`prefill` and `Context`: a document that is read once, and continued from any number of times."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import time
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from tca_jax.engine.cache import CacheLayout, require_memory, spare_pages
from tca_jax.engine.lm import LM, require_lm
from tca_jax.engine.mesh import CACHES, STATIC, HeadShards, mesh_name, on_host, place, rows_of_device
from tca_jax.engine.pages import Rows
from tca_jax.engine.prompts import (
    Prompt,
    bucket_length,
    encode_appended,
    encode_prompts,
    pad_tokens,
    require_positions,
)
from tca_jax.engine.read import (
    Calls,
    ReadRows,
    Then,
    compacted,
    fork,
    read,
    require_finite,
)
from tca_jax.errors import require, require_type
from tca_jax.methods.full import BASELINE
from tca_jax.models.config import ModelConfig
from tca_jax.models.sharding import DATA, axis_size
from tca_jax.pallas_kernels.backends import Backend, resolve_backend
from tca_jax.pallas_kernels.kv import CODES, num_bytes
from tca_jax.pallas_kernels.numerics import cdiv

#: Arrays of a context beside those of its rows.
OF_ROWS = ("tokens", "lengths", "attended_share")


@dataclasses.dataclass(frozen=True)
class ContextIdentity:
    """Whose a context is."""

    model: str  # the model's name
    config: ModelConfig  # its architecture
    fingerprint: str  # of its weights (`models.fingerprint`)
    method: str  # name of the attention method
    method_description: str  # all of its parts and options, from `describe_method`


def identity_of(lm: LM) -> ContextIdentity:
    """The identity of contexts that a model makes under its method."""
    from tca_jax.methods.registry import describe_method

    described = describe_method(lm.method)
    if lm.settings is not None:
        digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(lm.settings))).hexdigest()
        described = json.dumps({**json.loads(described), "settings": digest}, sort_keys=True, separators=(",", ":"))
    return ContextIdentity(lm.name, lm.config, lm.fingerprint, lm.method.name, described)


@dataclasses.dataclass(frozen=True)
class ContextStats:
    """Costs of a context.

    Attributes:
        tokens: Tokens of each row.
        kv_cache_bytes: Bytes of the pages that it uses, on all devices.
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
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Context:
    """Prefilled tokens, one row or several: a pytree that `generate`, `stream` and `prefill` continue from.

    It is never consumed: any number of calls may continue from it, and they share what it holds. `prefill` makes it.

    Attributes:
        rows: What the model holds of it.
        tokens: Ids of the tokens so far, right-padded, int32 `[B, L]`.
        lengths: How many these are, `[B]`.
        attended_share: Of each row, float32 `[B]`; see `ContextStats`.
        compile_seconds: See `ContextStats`.
        prefill_seconds: See `ContextStats`.
        window: Tokens of the method's window, w.
        shards: How KV heads lie on a mesh; None on one device.
        identity: Whose it is.
    """

    rows: Rows
    tokens: Int[Array, "B L"]
    lengths: Int[Array, " B"]
    attended_share: Float32[Array, " B"]
    compile_seconds: float
    prefill_seconds: float
    window: int = dataclasses.field(metadata=STATIC)
    shards: HeadShards | None = dataclasses.field(metadata=STATIC)
    identity: ContextIdentity = dataclasses.field(metadata=STATIC)

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
        return math.prod(self._devices)

    @property
    def _devices(self) -> tuple[int, ...]:
        """Devices on "data" and on "model"."""
        return (1, 1) if self.shards is None else self.rows.start.shape[:2]

    @property
    def num_bytes(self) -> int:
        """Bytes of its keys and values on all devices together."""
        return self.rows.num_bytes

    @property
    def stats(self) -> ContextStats:
        """Costs of the context."""
        rows, c, lengths = self.rows, self.identity.config, np.asarray(self.lengths)
        full = num_bytes(BASELINE.cache.block_size, rows.k.shape[-1], rows.k.dtype)
        pages = int((-(-lengths // BASELINE.cache.block_size)).sum()) * c.num_layers * c.num_kv_heads
        return ContextStats(
            tokens=lengths.tolist(),
            kv_cache_bytes=rows.used_bytes,
            full_kv_cache_bytes=2 * full * pages,
            kept_share=kept_share(rows, lengths),
            attended_share=float(np.mean(np.asarray(self.attended_share))),
            compile_seconds=self.compile_seconds,
            prefill_seconds=self.prefill_seconds,
            devices=self.num_devices,
        )

    def require_made_by(self, lm: LM) -> None:
        """Raises ValueError, which names both sides, unless a model can continue the context as it is."""
        own, made = identity_of(lm), self.identity
        wanted, held = lm.cache_dtype, self.rows.k.dtype
        require(
            (made.config, made.fingerprint) == (own.config, own.fingerprint),
            f"context was made by model {made.model!r}, whose weights or shape are not those of {own.model!r}: "
            "read the document with this model",
        )
        options = " with other options or budgets" if made.method == own.method else ""
        require(
            made.method_description == own.method_description,
            f"context was made under method {made.method!r}{options}, and {own.model!r} runs under {own.method!r}: "
            "load the model under that method, or read the document again",
        )
        how = "with kv='fp8'" if held == CODES else f"in dtype {held}" + (", without kv" if wanted == CODES else "")
        dtypes = f"context holds {held} and the cache of {own.model!r} {wanted}"
        require(held == wanted, f"{dtypes}: load the model {how}")
        mesh = "x".join(map(str, self._devices))
        require(
            self.shards == lm.head_shards and self._devices[0] == axis_size(lm.mesh, DATA),
            f"context was made on {mesh}, and {lm.name!r} is on {mesh_name(lm.mesh)} devices on "
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
        if not isinstance(self.rows.start, np.ndarray):
            return self
        put = jnp.asarray if lm.mesh is None else functools.partial(place, CACHES, mesh=lm.mesh)
        rows: dict[str, Any] = {name: jnp.asarray(getattr(self, name)) for name in OF_ROWS}
        return dataclasses.replace(self, rows=jax.tree.map(put, self.rows), **rows)

    def to_host(self) -> Context:
        """The context with its arrays in the host's memory. `on` brings them back, as every call does for itself."""
        return jax.tree.map(on_host, self)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the context to a directory, in place of the one there, completely or not at all.

        Args:
            directory: Created if missing. Other files in it are left alone.

        Raises:
            OSError: it cannot be written; what was there before is intact.
        """
        from tca_jax.engine.saved_contexts import save_context

        save_context(directory, vars(self))

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Context:
        """Reads a saved context into the host's memory; `on` puts it on the devices, as calls with it do.

        Whether it belongs to a model, method and mesh is checked where it is used.

        Raises:
            FileNotFoundError: `directory` does not exist.
            ValueError: there is none in it, or it is damaged or of another version; the message names the folder.
        """
        from tca_jax.engine.saved_contexts import load_context

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
    kernels, calls, checked = resolve_backend(backend), Calls(), Prompts.create(lm, prompts, context)
    checked.require_positions(0)
    require_memory(checked.kv_cache_bytes, f"contexts of {len(checked.ids)} prompts")
    begun = time.perf_counter()
    logits, rows, shares = checked.read(calls, kernels)
    rows = jax.block_until_ready(compacted(lm, rows, calls))
    seconds = time.perf_counter() - begun - calls.compile_seconds
    finite, shares = on_host((jnp.isfinite(logits).all(axis=-1), shares))
    checked.require_finite(finite)
    tokens, lengths = map(jnp.asarray, pad_tokens(checked.with_contexts, lm.pad_token_id))
    made = calls.compile_seconds, seconds, lm.method.cache.window, lm.head_shards, identity_of(lm)
    return Context(rows, tokens, lengths, jnp.asarray(shares), *made)


def kept_share(rows: Rows, fed: np.ndarray) -> float:
    """Tokens in pages over tokens fed, mean over rows, layers and KV heads."""
    kept, start = on_host((rows.kept, rows.start))
    if kept.ndim > 3:  # of the devices of a mesh: on "data", on "model", which agree on the start
        of_rows, start = kept.mean(axis=(1, 2, 4)).reshape(-1), start[:, 0].reshape(-1)
    else:
        of_rows = kept.mean(axis=(0, 2))
    return float(np.mean((of_rows + fed - start) / fed))


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts of a call, alone or after a context, as they are read. `times` rows continue each, side by side."""

    lm: LM
    ids: list[list[int]]  # token ids of each
    context: Context | None  # on the model's devices
    times: int = 1
    fed_tokens: int = 0  # that each row has room for after its prompt

    @classmethod
    def create(cls, lm: LM, prompts: Any, context: Any) -> Prompts:
        """Checks that the context is the model's, and encodes the prompts."""
        if context is None:
            return cls(lm, encode_prompts(lm, prompts), None)
        require_type("context", context, Context, "a Context, from tca_jax.prefill")
        context = context.on(lm)
        return cls(lm, encode_appended(lm, prompts, context.batch, context.token_ids), context)

    def before(self, prompt: int) -> list[int]:
        """Tokens of the context before a prompt."""
        return [] if self.context is None else self.context.token_ids(prompt % self.context.batch)

    @functools.cached_property
    def starts(self) -> list[int]:
        """Tokens of the context before each prompt."""
        held = [0] if self.context is None else np.asarray(self.context.lengths)
        return np.broadcast_to(held, len(self.ids)).tolist()

    @functools.cached_property
    def ends(self) -> list[int]:
        """Tokens of each prompt, those of the context included."""
        return [start + len(ids) for start, ids in zip(self.starts, self.ids, strict=True)]

    @property
    def row_lengths(self) -> Int[np.ndarray, " R"]:
        """The same of each row that continues one."""
        return np.repeat(np.asarray(self.ends, np.int32), self.times)

    @property
    def with_contexts(self) -> list[list[int]]:
        """Token ids of each prompt, those of the context included."""
        return [self.before(i) + ids for i, ids in enumerate(self.ids)]

    def require_positions(self, *new_tokens: int) -> None:
        """Raises ValueError if a prompt leaves no positions for its answer, of one length or of its own."""
        for i, (start, ids) in enumerate(zip(self.starts, self.ids, strict=True)):
            require_positions(f"prompts[{i}]", len(ids), new_tokens[i % len(new_tokens)], self.lm, context_tokens=start)

    def require_finite(self, finite: np.ndarray) -> None:
        """Raises ValueError, which names the cause, unless the logits of all prompts are finite."""
        require_finite(self.lm, finite, "prompts", lambda i: self.before(i) + self.ids[i])

    @functools.cached_property
    def _sizes(self) -> tuple[int, int, int]:
        """Columns of the prompts, padded tokens of the context, and tokens that are fed to a prompt's own row."""
        own = self.fed_tokens if self.times == 1 else 0
        if self.context is None:
            return bucket_length(max(map(len, self.ids))), 0, own
        from tca_jax.engine.extend import num_columns

        b, both = self.context.rows.page_size, zip(self.starts, self.ends, strict=True)
        columns = num_columns(max(end - start // b * b for start, end in both), b)  # from the context's last block on
        return columns, self.context.tokens.shape[1], own

    @functools.cached_property
    def _layouts(self) -> list[CacheLayout]:
        """Sizes of the prompts' rows, and of the rows that continue each where these are several."""
        rows, layout = rows_of_device(self.lm, len(self.ids), "prompts"), self.lm.cache_layout
        columns, held, own = self._sizes
        first = layout(rows, held, columns + own, following=True) if held else layout(rows, columns, own)
        if self.times == 1:
            return [first]
        return [first, layout(rows * self.times, held + columns, self.fed_tokens, following=True)]

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of all pages that rows may use, on each device."""
        shared = 0 if self.context is None else self.context.num_bytes // self.context.num_devices
        return shared + self.lm.page_bytes * sum(layout.num_pages for layout in self._layouts)

    @property
    def full_bytes(self) -> int:
        """Bytes of the pages that all rows would use under full attention, on all devices."""
        b, c, starts = BASELINE.cache.block_size, self.lm.config, self.ends if self.context is None else self.starts
        shared = starts if self.context is None else np.asarray(self.context.lengths).tolist()
        own = [cdiv(end + self.fed_tokens, b) - start // b for start, end in zip(starts, self.ends, strict=True)]
        pages = sum(start // b for start in shared) + self.times * sum(own)
        return pages * c.num_layers * c.num_kv_heads * 2 * num_bytes(b, c.head_dim, self.lm.cache_dtype)

    def read(self, calls: Calls, backend: Backend, then: Then | None = None) -> ReadRows:
        """Reads the prompts into rows, `row_lengths` long; `then` as for `engine.read.read`."""
        lm, context, (columns, before, own) = self.lm, self.context, self._sizes
        if context is None:
            tokens, lengths = pad_tokens(self.ids, lm.pad_token_id, columns)  # of NumPy, which dispatches nothing
            (layout, *forks), pages = self._layouts, sum(layout.num_pages for layout in self._layouts)
            more = sum(each.num_pages for each in forks) + spare_pages(pages, lm.page_bytes)
            options: dict[str, Any] = {"more_pages": more, "backend": backend, "then": then}
            logits, held, shares = read(lm, tokens, lengths, lengths + own, layout, calls, **options)
        else:
            from tca_jax.engine.extend import feed

            tokens, lengths = pad_tokens(self.ids, lm.pad_token_id, columns)
            starts, each = np.asarray(self.starts, np.int32), len(self.ids) // context.batch
            held = fork(lm, context.rows, each, starts + lengths + own, before, columns + own, calls, private=False)
            held, logits, _ = feed(lm, held, tokens, starts, lengths, calls, backend=backend)
            shares = jnp.broadcast_to(context.attended_share, len(starts))
        if self.times > 1:
            most, sizes = self.row_lengths + self.fed_tokens, (before + columns, self.fed_tokens)
            held = fork(lm, held, self.times, most, *sizes, calls, private=context is None)
        return ReadRows(logits, held, shares)
