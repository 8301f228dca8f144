"""Documents are read a group of layers at a time, so that running answers take steps in between."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from tca_jax.engine.cache import CacheLayout
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.prompts import bucket_length, pad_tokens
from tca_jax.engine.read import own_reader, require_finite
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.programs import Program, results_of
from tca_jax.serve import programs
from tca_jax.serve.documents import Document, Documents

_TOGETHER_TOKENS = 2048  # prompts of at most so many are read together
# Tokens times layers of a part; a layer is the least. Running answers wait as long as a part takes: for a layer of
# LLaMA-3.1-8B at 131,072 tokens 57 TFLOP of matrix products, a tenth of a second of an H200, and its attention.
_PART_TOKENS = 131_072
_COMPILERS = 2  # threads that compile parts
_AT_HAND_SECONDS = 0.01  # for which a document waits for its program instead of letting answers take steps first


@dataclasses.dataclass(eq=False)
class _Begun:
    """Documents that are being read.

    Attributes:
        documents: They.
        layout: Of their cache.
        tokens: Right-padded, with true `lengths`.
        pages: Held back for them.
        programs: Of the parts that are left, each with the seconds that it took to compile.
        state: What the next part takes, on the devices; behind the last one, what reading gives.
    """

    documents: list[Document]
    layout: CacheLayout
    tokens: Int32[np.ndarray, "B L"]
    lengths: Int32[np.ndarray, " B"]
    pages: Int32[np.ndarray, "D P"]
    programs: collections.deque[Future[tuple[Callable[..., Any], float]]]
    state: Any


class Reader:
    """Reads documents in order of arrival, short ones together. Only the engine's thread calls it.

    Programs of parts compile in threads of their own, so that nobody waits for that but the document.

    Args:
        lm: The model.
        documents: All documents of the engine.
        backend: Kernel backend.
        recover: Called behind each error, which may have taken the pool of documents.

    Attributes:
        waits: Arrival of the document that waits for pages which can become free when others end; infinity for none.
    """

    def __init__(self, lm: LM, documents: Documents, backend: Backend, recover: Callable[[Exception], None]) -> None:
        self._lm, self._program_lm, self._documents, self._backend = lm, lm.for_programs(), documents, backend
        self._recover, self.waits = recover, math.inf
        self._waiting: collections.deque[Document] = collections.deque()
        self._begun: _Begun | None = None
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="tca-jax-compile")

    def add(self, document: Document, *, first: bool = False) -> None:
        """A document is to be read, before all others where it is to be the first."""
        if first:
            self._waiting.appendleft(document)
        else:
            self._waiting.append(document)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be read."""
        return not self._waiting and self._begun is None

    def close(self) -> None:
        """Ends its threads, once what they are compiling is done; waits for nothing."""
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def read_on(self, before: float) -> bool:
        """Reads a part of the documents whose turn it is; whether there were any that fit, and their program.

        Args:
            before: Arrival of a request that waits for pages; documents that came later do not take them.
        """
        begun = self._begun or self._begin(before)
        if begun is None:
            return False
        if not any(map(_is_wanted, begun.documents)):
            self._end()
            for document in begun.documents:
                self._documents.drop(document)
            return True
        if not begun.programs[0].done():
            return False
        try:
            self._read_part(begun)
        except Exception as error:
            self._end()
            self._fail(begun.documents, error)
        return True

    def _begin(self, before: float) -> _Begun | None:
        """Begins to read the document that waits longest, and short ones with it, if there are pages for them."""
        for document in [each for each in self._waiting if not _is_wanted(each)]:
            self._waiting.remove(document)
            self._documents.drop(document)
        self.waits = math.inf
        if not self._waiting or self._waiting[0].arrival > before:
            return None
        group = self._group()
        layout = self._lm.cache_layout(len(group), bucket_length(max(len(each.tokens) for each in group)))
        pages = self._documents.reserve(layout.num_pages)
        if pages is None:
            if self._documents.would_have_room(layout.num_pages):
                self.waits = group[0].arrival
            return None
        for document in group:
            self._waiting.remove(document)
        tokens, lengths = pad_tokens([each.tokens for each in group], self._lm.pad_token_id)
        parts = collections.deque(self._programs(tokens, lengths, layout))
        self._begun = _Begun(group, layout, tokens, lengths, pages, parts, (tokens, lengths))
        wait([parts[0]], _AT_HAND_SECONDS)
        return self._begun

    def _group(self) -> list[Document]:
        """Documents that are read together, in order of arrival: a power of two of them, of one bucket."""
        first = bucket_length(len(self._waiting[0].tokens))
        if first > _TOGETHER_TOKENS:
            return [self._waiting[0]]
        alike = [each for each in self._waiting if bucket_length(len(each.tokens)) == first]
        fit = self._documents.free.total // self._lm.cache_layout(1, first).num_pages
        most = min(len(alike), fit, max(1, _TOGETHER_TOKENS // first))
        return alike[: 1 << (most.bit_length() - 1)]

    def _programs(
        self, tokens: Int32[np.ndarray, "B L"], lengths: Int32[np.ndarray, " B"], layout: CacheLayout
    ) -> list[Future[tuple[Callable[..., Any], float]]]:
        """The programs of all parts, under way where they are not there."""
        lm, static = self._program_lm, {"layout": layout, "backend": self._backend}
        layers, of_part = lm.config.num_layers, max(1, _PART_TOKENS // tokens.size)
        if of_part >= layers or own_reader(lm, layout):
            return [self._compilers.submit(programs.read.prepare, lm, tokens, lengths, **static)]
        ends = [*range(of_part, layers, of_part), layers]
        parts = list(zip([0, *ends], ends, strict=False))
        first = self._compilers.submit(programs.read_first.prepare, lm, tokens, lengths, layers=parts[0], **static)

        def after_first(program: Program, part: tuple[int, int]) -> tuple[Callable[..., Any], float]:
            return program.prepare(lm, *results_of(first.result()[0]), layers=part, **static)

        more = [self._compilers.submit(after_first, programs.read_more, part) for part in parts[1:-1]]
        return [first, *more, self._compilers.submit(after_first, programs.read_last, parts[-1])]

    def _read_part(self, begun: _Begun) -> None:
        program, _ = begun.programs.popleft().result()
        # Waited for, so that an error is that of these documents, and nothing asked meanwhile has to wait for two.
        begun.state = jax.block_until_ready(program(self._program_lm, *begun.state))
        if begun.programs:
            return
        found: programs.Read = begun.state
        finite, shares, logits = on_host((found.finite, found.attended_share, found.logits))
        self._end()  # the pages that were held back are those that the documents take
        for row, document in enumerate(begun.documents):
            own = slice(row, row + 1)
            try:
                require_finite(self._lm, begun.tokens[own], begun.lengths[own], finite[own], "document")
                self._documents.enter(document, found.cache, row, float(shares[row]))
            except Exception as error:
                self._fail([document], error)
            document.logits = None if document.named else logits[own]

    def _end(self) -> None:
        """Whatever was begun is read no further, and its pages are for whoever takes them next."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        for program in begun.programs:
            program.cancel()
        self._documents.free.give_back(begun.pages)

    def _fail(self, documents: Sequence[Document], error: Exception) -> None:
        for document in documents:
            self._documents.fail(document, error)
        self._recover(error)


def _is_wanted(document: Document) -> bool:
    """Whether a user has named a document, or a request waits for it."""
    return document.named or document.users > 0
