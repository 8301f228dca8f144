"""Prompts of a call, and the rows that continue them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from tca_jax.engine.cache import CacheLayout, small_pool, spare_pages
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import rows_of_device
from tca_jax.engine.prompts import bucket_length, encode_prompts, pad_tokens, require_positions
from tca_jax.engine.read import Calls, ReadRows, Then, fork, read, require_finite
from tca_jax.errors import require_type
from tca_jax.methods.full import BASELINE
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.kv import num_bytes
from tca_jax.pallas_kernels.numerics import cdiv, shared_size

_LEAST_ROOM = 256  # for new tokens, so that shorter answers share programs


@runtime_checkable
class ContextLike(Protocol):
    """A context that prompts continue; `tca_jax.Context` implements it."""

    def continued_by(self, lm: LM, prompts: Any) -> Prompts: ...


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts of a call as they are read. `times` rows continue each, side by side."""

    lm: LM
    ids: list[list[int]]  # token ids of each; those of a context are not among them
    starts: list[int]  # tokens of the context before each
    columns: int  # padded tokens of a prompt
    context_columns: int = 0  # of the context
    times: int = 1
    fed_tokens: int = 0  # that each row has room for after its prompt

    @classmethod
    def of(cls, lm: LM, prompts: Any, context: ContextLike | None) -> Prompts:
        """Encodes prompts, alone or after a context, which is checked to be the model's."""
        if context is not None:
            require_type("context", context, ContextLike, "a Context, from tca_jax.prefill")
            return context.continued_by(lm, prompts)
        ids = encode_prompts(lm, prompts)
        return cls(lm, ids, [0] * len(ids), bucket_length(max(map(len, ids))))

    def tokens(self, prompt: int) -> list[int]:
        """Token ids of a prompt, those of the context before it included."""
        return self.ids[prompt]

    @property
    def all_tokens(self) -> list[list[int]]:
        """The same of each prompt."""
        return [self.tokens(i) for i in range(len(self.ids))]

    @functools.cached_property
    def ends(self) -> list[int]:
        """Tokens of each prompt, those of the context included."""
        return [start + len(ids) for start, ids in zip(self.starts, self.ids, strict=True)]

    @property
    def row_lengths(self) -> Int[np.ndarray, " R"]:
        """The same of each row that continues one."""
        return np.repeat(np.asarray(self.ends, np.int32), self.times)

    def require_positions(self, *new_tokens: int) -> None:
        """Raises ValueError if a prompt leaves no positions for its answer, of one length or of its own."""
        for i, (start, ids) in enumerate(zip(self.starts, self.ids, strict=True)):
            require_positions(f"prompts[{i}]", len(ids), new_tokens[i % len(new_tokens)], self.lm, context_tokens=start)

    def require_finite(self, finite: np.ndarray) -> None:
        """Raises ValueError, which names the cause, unless the logits of all prompts are finite."""
        require_finite(self.lm, finite, "prompts", self.tokens)

    @property
    def own_tokens(self) -> int:
        """Tokens that are fed to the row that a prompt is read into."""
        return self.fed_tokens if self.times == 1 else 0

    @functools.cached_property
    def layouts(self) -> list[CacheLayout]:
        """Sizes of the prompts' rows, and of the rows that continue each where these are several."""
        rows, layout = rows_of_device(self.lm, len(self.ids), "prompts"), self.lm.cache_layout
        columns, held = self.columns, self.context_columns
        sizes = (held, columns + self.own_tokens) if held else (columns, self.own_tokens)
        first = layout(rows, *sizes, following=held > 0)
        if self.times == 1:
            return [first]
        return [first, layout(rows * self.times, held + columns, self.fed_tokens, following=True)]

    @property
    def num_pages(self) -> int:
        """Pages of all these rows, on each device."""
        return sum(layout.num_pages for layout in self.layouts)

    @property
    def room(self) -> int:
        """Room for the tokens of an answer, which shorter answers share."""
        return shared_size(max(_LEAST_ROOM, self.fed_tokens + 1))

    @functools.cached_property
    def longest(self) -> Prompts:
        """Prompts and answers whose tables and pool these share: the longest of a small pool, or those of an octave."""
        found = dataclasses.replace(self, columns=1 << (self.columns - 1).bit_length(), fed_tokens=self.room - 1)
        shared = self.fed_tokens and not self.context_columns  # a context that is made or continued has its own size
        small, most = small_pool(self.lm.page_bytes), self.lm.config.max_context if shared else 0
        while found.columns < most:
            longer = dataclasses.replace(found, columns=2 * found.columns)
            if shared_size(longer.num_pages) > small:
                break
            found = longer
        return found

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of all pages that rows may use, on each device."""
        return self.lm.page_bytes * self.num_pages

    @property
    def full_bytes(self) -> int:
        """Bytes of the pages that all rows would use under full attention, on all devices."""
        return self._full_bytes(self.ends, self.ends)

    def _full_bytes(self, shared: list[int], starts: list[int]) -> int:
        """The same for rows that share these numbers of tokens, after which each has pages of its own."""
        b, c = BASELINE.cache.block_size, self.lm.config
        own = [cdiv(end + self.fed_tokens, b) - start // b for start, end in zip(starts, self.ends, strict=True)]
        pages = sum(start // b for start in shared) + self.times * sum(own)
        return pages * c.num_layers * c.num_kv_heads * 2 * num_bytes(b, c.head_dim, self.lm.cache_dtype)

    def read(self, calls: Calls, backend: Backend, then: Then | None = None) -> ReadRows:
        """Reads the prompts into rows, `row_lengths` long; `then` as for `engine.read.read`."""
        found, longest = self.read_once(calls, backend, then), self.longest
        if self.times == 1:
            return found
        sizes = self.row_lengths + self.fed_tokens, self.context_columns + longest.columns, longest.fed_tokens
        return found._replace(rows=fork(self.lm, found.rows, self.times, *sizes, calls))

    def read_once(self, calls: Calls, backend: Backend, then: Then | None) -> ReadRows:
        """Reads each prompt into a row, in a pool with room for those that will continue it."""
        tokens, lengths = pad_tokens(self.ids, self.lm.pad_token_id, self.columns)  # of NumPy: dispatches nothing
        layout, longest = self.layouts[0], self.longest
        more = self.num_pages - layout.num_pages + spare_pages(self.num_pages, longest.num_pages, self.lm.page_bytes)
        options: dict[str, Any] = {"more_pages": more, "widths": longest.layouts[0].widths, "backend": backend}
        return read(self.lm, tokens, lengths, lengths + self.own_tokens, layout, calls, then=then, **options)
