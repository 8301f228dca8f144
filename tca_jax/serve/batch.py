"""Requests, and the batch of their answers on the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt8

from tca_jax.engine.cache import mean_pages
from tca_jax.engine.decode import DecodingState, seen_tokens
from tca_jax.engine.extend import Feeder, pass_tokens
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.pages import FreePages, Rows, Widths, bare
from tca_jax.engine.prompts import bucket_length, pad_tokens
from tca_jax.engine.sampling import Sampling, pairs
from tca_jax.methods.base import UNBOUNDED
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.numerics import cdiv
from tca_jax.serve import pages
from tca_jax.serve.constraints import Mask
from tca_jax.serve.documents import Document
from tca_jax.serve.pages import PagePool
from tca_jax.serve.streams import Stream

_MAX_STOPS = 8  # stop tokens of a row, at first
_MIN_WIDTH = 4  # least step between the widths of tables


@dataclasses.dataclass(eq=False)
class Request:
    """Tokens after a document, and their answer."""

    stream: Stream
    parent: Document  # that it continues
    new: list[int]  # tokens that are fed after it
    sample: int = 0  # of several answers
    mask: Mask | None = None  # of the answer's tokens
    fed: int = 0  # of `new`
    slot: int | None = None  # row of the batch; None until it begins
    reserved: int = 0  # pages of its own, at most
    logits: Any = None  # of the token after what was fed, [1, V]
    streamed: int = 0  # tokens of the answer that were handed out
    scheduled: int = 0  # tokens of the answer after all dispatched steps
    allowed: UInt8[np.ndarray, " W"] | None = None  # packed mask of the next token; None for all tokens
    arrival: int = 0  # order among all requests, and documents to be read

    @property
    def max_new_tokens(self) -> int:
        return self.stream.config.max_new_tokens

    @property
    def tokens(self) -> list[int]:
        """Tokens of the row before the answer."""
        return self.parent.tokens + self.new

    @property
    def own_tokens(self) -> int:
        return len(self.new) + self.max_new_tokens


class Batch:
    """Rows of answers, each after a document. Only the engine's thread calls it.

    `rows` are the requests, None for free rows; `state` is that of decoding, without its cache, which is `table` with
    the pool. All rows take pages from the free ones of the table, each at most those that it reserved.
    """

    def __init__(self, lm: LM, pool: PagePool, max_rows: int, backend: Backend) -> None:
        self._lm, self._pool, self._backend, self._max_rows = lm, pool, backend, max_rows
        self._program_lm, self._bare_lm = lm.for_programs, lm.without_weights
        self.rows: list[Request | None] = [None] * max(2, max_rows)  # a single row is written without looking
        self._widths, self._bounded = self._widths_of(0, 1), lm.method.cache.window < UNBOUNDED
        self._step_programs: dict[Any, Sequence[Callable[..., Any]]] = {}
        #: Dispatched steps in their order: the packed output, and the rows.
        self.pending: list[tuple[jax.Array, tuple[Request | None, ...]]] = []
        self._feed = Feeder(backend)
        self._placed: dict[Document, tuple[Any, Any]] = {}  # pages, and their table on the device
        self.restart()

    def own_pages(self, document_tokens: int, own_tokens: int) -> tuple[int, int]:
        """Pages that a row after a document needs beside its pages, and how many of them for kept tokens of a head."""
        most = self._lm.config.max_context
        sizes = min(most, bucket_length(document_tokens)), min(most, bucket_length(own_tokens))
        layout = self._lm.cache_layout(1, *sizes, following=True)
        return layout.num_pages, max(layout.kept_columns)

    @property
    def requests(self) -> list[Request]:
        """Requests whose answers are written."""
        return [request for request in self.rows if request is not None and request.scheduled]

    @property
    def waits(self) -> bool:
        """Whether a step is dispatched only after the tokens of the last one: for a mask, or for log-probabilities."""
        return any(each.mask is not None or each.stream.config.logprobs is not False for each in self.requests)

    def restart(self) -> None:
        """Empties the batch; its tables stay as wide."""
        self.pending.clear()
        self.state = pages.empty_state.run(self._bare_lm, rows=len(self.rows), stops=_MAX_STOPS)
        self.table = self._pool.empty_table(len(self.rows), self._widths, [np.zeros(0, np.int32)] * self._pool.devices)

    def begin(self, request: Request) -> bool:
        """Gives a request a row that continues its document; false without a free one, or enough pages."""
        count, _ = self.own_pages(len(request.parent.tokens), request.own_tokens)
        live = np.asarray([each is not None for each in self.rows])
        if live[: self._max_rows].all() or count > self._pool.free_answers:
            return False
        self._pool.free_answers -= count
        request.reserved, request.slot = count, int(np.argmin(live))
        self.rows[request.slot], request.logits = request, None if request.new else request.parent.logits
        document = *self._continued(request.parent, request.own_tokens), np.int32(request.slot)
        given = self._pool.lend(self.table), self._pool.of_answers, live, *document
        self.table = self._pool.take_back(pages.add.run(self._bare_lm, *given))
        if request.max_new_tokens > 1:  # the programs compile while the request is fed
            self._steps(self._fitted(request), np.zeros(len(self.rows), np.int32))
        return True

    def fork(self, document: Document, own_tokens: int, free: FreePages) -> Rows:
        """The table of a row that continues a document on free pages."""
        given = self._pool.lend(None, free), *self._continued(document, own_tokens)
        return self._pool.take_back(pages.fork.run(self._bare_lm, *given))

    def _continued(self, document: Document, own_tokens: int) -> tuple[Rows, np.ndarray]:
        """The table of a document on the device, and the tokens of a row that continues it."""
        pool, most = self._pool, len(document.tokens) + own_tokens
        _, kept = self.own_pages(len(document.tokens), own_tokens)
        self._widen(self._widths_of(document.table.columns + kept, most), document.table.widths)
        numbers, table = self._placed.pop(document, (None, None))
        if numbers is not document.pages or table.widths != self._widths:
            table = pool.in_pool(document.table, document.pages, self._widths)
        self._placed[document] = document.pages, table
        if len(self._placed) > 4 * self._max_rows:  # no page counts their memory
            del self._placed[next(iter(self._placed))]
        return table, np.asarray([most], np.int32)

    def end(self, request: Request) -> None:
        """Gives back the row and the pages of a request; nothing where it has none."""
        if request.slot is not None:
            self._pool.free_answers += request.reserved
            self.rows[request.slot], request.reserved, request.slot, request.scheduled = None, 0, None, 0

    def row_of(self, request: Request) -> Rows:
        return pages.row.run(self._bare_lm, bare(self.table), np.int32(request.slot or 0))

    def feed_next(self, request: Request) -> None:
        row, held = dataclasses.replace(self.row_of(request), free=self.table.free), len(request.parent.tokens)
        row, request.logits, count = self.feed(row, request.new[request.fed :], held + request.fed)
        self.table = pages.put.run(self._bare_lm, bare(self.table), row, np.int32(request.slot or 0))
        request.fed += count

    def feed(self, table: Rows, tokens: list[int], held: int) -> tuple[Rows, jax.Array, int]:
        """Feeds the tokens of one pass to a row of `held`. Returns its table, the logits after them, their number."""
        begun, starts = held % self._pool.block_size, np.asarray([held], np.int32)
        size = pass_tokens(self._lm.method.cache, begun + len(tokens))
        padded, lengths = pad_tokens([tokens[: size - begun]], columns=size)
        rows, logits = self._feed(self._program_lm, self._pool.lend(table), padded, starts, lengths)
        return self._pool.take_back(rows), logits, int(lengths[0])

    def admit(self, request: Request) -> None:
        """Draws the first token of a request's answer."""
        config, vocabulary = request.stream.config, self._lm.config.vocab_size
        request.scheduled = 1
        state, seen, allowed = self._fitted(), None, None
        if state.seen is not None:
            seen, allowed = seen_tokens([request.tokens], vocabulary), self._allowed([request])
        stops, _ = pad_tokens([config.stop_token_ids or ()], vocabulary, state.stop_tokens.shape[1])
        key = jax.random.fold_in(jax.random.key(config.seed), request.sample)
        length, least = (np.asarray([number], np.int32) for number in (len(request.tokens), config.min_new_tokens))
        fields = length, seen, key[None], None, self._sampling(state, [request]), stops, least, allowed
        self.state, output = pages.admit.run(self._bare_lm, state, np.int32(request.slot or 0), request.logits, fields)
        request.logits = None
        self.pending = [(output, tuple(self.rows))]  # it has the tokens of the step before, too

    def dispatch(self) -> None:
        """Dispatches a step. Between rounds of the engine at most one is pending."""
        moving = [request for request in self.requests if request.scheduled < request.max_new_tokens]
        if not moving:
            return
        b, full, evicts = self._pool.block_size, self._widths.window * self._pool.block_size, False
        for request in moving:
            position = len(request.parent.tokens) + len(request.new) + request.scheduled - 1  # of the token that is fed
            evicts |= self._bounded and position % b == 0 and position >= full  # a block may leave its window
            request.scheduled += 1
        limit = np.asarray([0 if request is None else request.scheduled for request in self.rows], np.int32)
        programs, given = self._steps(self.state, limit)
        state, output = programs[evicts](*given)
        self.table = self._pool.take_back(state.cache)
        self.state = dataclasses.replace(state, cache=None)
        self.pending.append((output, tuple(self.rows)))

    def _steps(self, state: DecodingState, limit: np.ndarray) -> tuple[Sequence[Callable[..., Any]], tuple[Any, ...]]:
        """The programs of a step, without evicting and with, which may still compile, and their arguments."""
        sampling, allowed = self._sampling(state, self.rows), None if state.seen is None else self._allowed(self.rows)
        state = dataclasses.replace(state, cache=self._pool.lend(self.table))
        given = self._program_lm, state, limit, sampling, allowed
        # To compare the shapes of all arguments is as slow as a step: these alone change.
        key = state.seen is None, None if state.top is None else state.top[0].shape, state.stop_tokens.shape
        if key not in self._step_programs:
            kinds = (False, True) if self._bounded else (False,)
            self._step_programs[key] = [pages.step.start(*given, evicts=kind, backend=self._backend) for kind in kinds]
        return self._step_programs[key], given

    def wait(self) -> list[tuple[Request, int, bool, bool]]:
        """Hands out the first pending step: requests, number of new tokens, whether finite, whether at a stop token."""
        (packed, rows), state = self.pending.pop(0), self.state
        steps, done, finite, last = np.asarray(packed).tolist()
        # Of the last dispatched step: where a row wants them, this is the only one.
        logprobs, top = on_host((state.logprobs, state.top)) if self.waits else ([], [])
        outputs = []
        for slot, request in enumerate(rows):
            if request is None or request.slot != slot or not request.scheduled:
                continue
            new, wanted = steps[slot] - request.streamed, request.stream.config.num_logprobs
            assert new < 2, "an output has the last token alone"
            if new and finite[slot]:
                likeliest = pairs(top[0][slot], top[1][slot], 1) if wanted else []
                request.stream.add([last[slot]], [] if wanted is None else logprobs[slot].tolist(), likeliest)
                request.streamed += 1
            outputs.append((request, new, bool(finite[slot]), bool(done[slot])))
        return outputs

    def _fitted(self, *more: Request) -> DecodingState:
        """The state with the optional arrays that answers and `more` requests need: an unused one costs time."""
        requests, state = [*self.requests, *more], self.state
        streams, vocabulary, changes = [x.stream for x in requests], self._lm.config.vocab_size, dict[str, Any]()
        stops = max(len(stream.config.stop_token_ids or ()) for stream in streams)
        if stops > state.stop_tokens.shape[1]:
            wide = ((0, 0), (0, bucket_length(stops, 1) - state.stop_tokens.shape[1]))
            changes["stop_tokens"] = jnp.pad(state.stop_tokens, wide, constant_values=vocabulary)
        if all(each.stream.sampling == Sampling() and each.mask is None for each in requests):
            changes["seen"] = None
        elif state.seen is None:
            changes["seen"] = jnp.zeros((len(self.rows), vocabulary), bool)
        most = max(stream.config.num_logprobs or 0 for stream in streams)
        if not most:
            changes["top"] = None
        elif state.top is None or state.top[0].shape[-1] < most:
            none, places = jnp.zeros((len(self.rows), 1, 0)), min(vocabulary, bucket_length(most, 4))
            top: Any = state.top or (none.astype(jnp.int32), none)  # a pending step's are still to be handed out
            rest = (0, places - top[0].shape[-1])
            changes["top"] = tuple(jnp.pad(x, ((0, 0), (0, 0), rest)) for x in top)
        return dataclasses.replace(state, **changes)

    def _allowed(self, requests: Sequence[Request | None]) -> UInt8[np.ndarray, "R W"]:
        """Tokens that rows may draw next, packed."""
        everything = np.full(-(-self._lm.config.vocab_size // 8), 255, np.uint8)
        return np.stack([everything if each is None or each.allowed is None else each.allowed for each in requests])

    def _widths_of(self, kept: int, tokens: int) -> Widths:
        """Entries of the table of a row of `tokens` tokens with `kept` pages of kept ones."""
        policy, b = self._lm.method.cache, self._pool.block_size
        window = policy.window // b + 1 if policy.window < UNBOUNDED else bucket_length(cdiv(tokens, b), _MIN_WIDTH)
        means = mean_pages(policy, tokens)
        kept, means = (count and bucket_length(count, _MIN_WIDTH) for count in (kept, means))
        return Widths(kept, window, means)

    def _widen(self, *wanted: Widths) -> None:
        """Widens tables; they never become narrower, so that one program serves all requests."""
        self._widths = Widths(*map(max, self._widths, *wanted))
        if self._widths != self.table.widths:
            self._step_programs.clear()
            self.table = pages.widen.run(self._bare_lm, self.table, widths=self._widths, pages=self._pool.total)

    def _sampling(self, state: DecodingState, requests: Sequence[Request | None]) -> Sampling:
        """Nothing where all rows are greedy and have no mask, else all numbers: so two programs do."""
        rows = [Sampling() if request is None else request.stream.sampling for request in requests]
        return Sampling() if state.seen is None else Sampling.of_rows(rows)


def is_intact(arrays: Any) -> bool:
    """Whether no array was consumed, or is the output of a failed program."""
    leaves = [leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array)]
    try:
        jax.block_until_ready(leaves)
    except Exception:
        return False
    return not any(leaf.is_deleted() for leaf in leaves)
