"""A document of an engine: its tokens, and where its pages are."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from concurrent.futures import Future
from typing import Literal

import numpy as np
from jaxtyping import Int32

from tca_jax.engine.cache import CacheLayout, PagedCache
from tca_jax.engine.contexts import identity_of
from tca_jax.engine.lm import LM
from tca_jax.serve.pages import LocalTable

State = Literal["waiting", "device", "moving", "host", "disk", "failed"]


@dataclasses.dataclass(eq=False)
class Document:
    """Tokens that the model has read, or will.

    Attributes:
        id: Its name in requests, from `document_id`.
        tokens: Their ids.
        parts: How many of them were read first, and how many were appended each time.
        named: Whether a user asked for it to be read. Others are copies of what can be sent again: they go first.
        state: Where its pages are.
        table: Its pages; None until they were there.
        layout: Of these, one row.
        attended_share: See `engine.read.Read`.
        numbers: Of each page, the number in the device's pool; None where it is not there.
        chunks: Its keys and values in host memory; None where they are not there.
        logits: Of the token behind it, float32 `[1, V]`; not of named ones.
        error: Why it could not be read.
        storing: Done when it is on disk, or failed with what kept it from that; None if it is not to be stored, or was
            when the engine started.
        arrival: Its place among all requests.
        users: Rows, and requests that were let in, that need its pages.
        created: Seconds since the epoch.
    """

    id: str
    tokens: list[int]
    parts: tuple[int, ...]
    named: bool
    state: State = "waiting"
    table: LocalTable | None = None
    layout: CacheLayout | None = None
    attended_share: float = 1.0
    numbers: Int32[np.ndarray, "D P"] | None = None
    chunks: list[PagedCache] | None = None
    logits: np.ndarray | None = None
    error: Exception | None = None
    storing: Future[None] | None = None
    arrival: int = 0
    users: int = 0
    created: float = dataclasses.field(default_factory=time.time)

    @property
    def num_pages(self) -> int:
        """Pages that it takes on the device that has most of them."""
        return 0 if self.table is None else self.table.most_pages


def document_id(lm: LM, tokens: list[int], parts: tuple[int, ...], *, named: bool) -> str:
    """The id of tokens that a model has read in such parts: a hash of all that its pages depend on."""
    identity = identity_of(lm)
    model = identity.fingerprint, identity.method_description, lm.cache_dtype.name, parts
    digest = hashlib.sha256(repr(model).encode() + np.asarray(tokens, np.int64).tobytes()).hexdigest()
    return f"{'doc' if named else 'text'}-{digest[:24]}"
