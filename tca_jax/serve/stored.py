"""A document's pages in host memory as the context that is stored, and the inverse."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tca_jax.engine.cache import PagedCache
from tca_jax.engine.contexts import Context, identity_of
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.serve.document import Document
from tca_jax.serve.pages import LocalTable, pool_only


def context_of(lm: LM, document: Document, chunks: Sequence[PagedCache]) -> Callable[[], Context]:
    """Makes the context of a document whose pages are in host memory, when it is called."""
    table, layout, on_mesh = document.table, document.layout, lm.mesh is not None
    assert table is not None
    assert layout is not None
    tokens, prompt, share = document.tokens, document.parts[0], document.attended_share

    def whole(*pieces: Any) -> np.ndarray:
        packed = np.concatenate([np.asarray(on_host(x)) for x in pieces], axis=2 if on_mesh else 0)
        packed = packed[0] if on_mesh else packed[None]
        out = np.zeros((len(packed), table.num_pages, *packed.shape[2:]), packed.dtype)
        for mine, theirs, used in zip(out, packed, table.used, strict=True):
            mine[used] = theirs[: used.sum()]
        return out[None] if on_mesh else out[0]

    def make() -> Context:
        k, v = jax.tree.map(whole, *[(chunk.k, chunk.v) for chunk in chunks])
        return Context(
            cache=table.cache(k, v, layout.kept_columns, on_mesh),
            tokens=jnp.asarray([tokens], jnp.int32),
            lengths=jnp.asarray([len(tokens)], jnp.int32),
            prompt_lengths=jnp.asarray([prompt], jnp.int32),
            attended_share=jnp.asarray([share], jnp.float32),
            compile_seconds=0.0,
            prefill_seconds=0.0,
            layout=layout,
            shards=lm.head_shards,
            identity=identity_of(lm),
        )

    return make


def chunks_of(cache: PagedCache, table: LocalTable, size: int) -> list[PagedCache]:
    """The pages of a cache of one row in chunks of so many; `table` is the row's."""
    on_mesh = len(cache.k.shape) > 3
    k, v = on_host((cache.k, cache.v))
    numbers = np.tile(np.arange(table.num_pages, dtype=np.int32), (len(table.table), 1))

    def chunk(numbers: np.ndarray, x: Any) -> np.ndarray:
        by_device = x[0] if on_mesh else x[None]
        picked = np.stack([own[np.minimum(n, len(own) - 1)] for own, n in zip(by_device, numbers, strict=True)])
        return picked[None] if on_mesh else picked[0]

    parts = table.chunked(numbers, size, table.num_pages)
    chunks = [jax.tree.map(functools.partial(chunk, part), (k, v)) for part in parts]
    return [pool_only(dataclasses.replace(cache, k=k, v=v)) for k, v in chunks]
