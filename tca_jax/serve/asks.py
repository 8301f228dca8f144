"""A request to an engine, from when it is asked until it has ended."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int32, UInt8

from tca_jax.serve.constraints import Mask
from tca_jax.serve.documents import Document
from tca_jax.serve.pages import LocalTable, RowTable
from tca_jax.serve.streams import Stream


@dataclasses.dataclass(eq=False)
class Ask:
    """A request: tokens behind a document, and then an answer, or a longer document.

    Attributes:
        stream: Of the answer; None where `target` is all that is wanted.
        document: What it continues from.
        new: Tokens that are fed behind it.
        sample: Which of several answers it is.
        mask: On its tokens; None for none.
        target: The document that document and new tokens become; None for an answer.
        fed: Tokens of `new` that were fed.
        table: Of its own pages; None until it was let in.
        numbers: Of these pages in the pool of answers.
        own: The same on the device; None until something is in them.
        logits: Of the token behind what was fed.
        slot: Its row of the batch.
        taken: Tokens of the answer that were handed out.
        granted: Tokens that the steps which were launched may bring it to.
        allowed: What its mask allows next, packed; None for everything.
        pins: Whether it keeps its document where it is.
        arrival: Its place among all requests.
        room: Pages that `target` was found to need on the device beside the document's.
    """

    stream: Stream | None
    document: Document
    new: list[int]
    sample: int = 0
    mask: Mask | None = None
    target: Document | None = None
    fed: int = 0
    table: LocalTable | None = None
    numbers: Int32[np.ndarray, "D P"] | None = None
    own: RowTable | None = None
    logits: Any = None
    slot: int | None = None
    taken: int = 0
    granted: int = 0
    allowed: UInt8[np.ndarray, " W"] | None = None
    pins: bool = False
    arrival: int = 0
    room: int = 0

    @property
    def max_new_tokens(self) -> int:
        """Most tokens of the answer."""
        return 0 if self.stream is None else self.stream.options.max_new_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of its tokens are asked for."""
        return self.stream is not None and self.stream.options.logprobs is not None

    @property
    def tokens(self) -> list[int]:
        """What the row holds before the answer."""
        return self.document.tokens + self.new
