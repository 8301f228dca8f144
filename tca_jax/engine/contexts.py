"""`prefill` and `Context`: a document that is read once, and continued from any number of times."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from tca_jax.engine.cache import require_memory, spare_pages
from tca_jax.engine.extend import feed, num_columns
from tca_jax.engine.lm import LM, require_lm
from tca_jax.engine.mesh import CACHES, STATIC, HeadShards, OverMesh, mesh_name, on_host, place
from tca_jax.engine.pages import FreePages, Rows, Scored
from tca_jax.engine.prompt_rows import Prompts
from tca_jax.engine.prompts import (
    Encoder,
    Prompt,
    encode_continuation,
    encode_prompt,
    encode_verbatim,
    is_chat,
    is_single,
    pad_tokens,
    render_chat,
    split_at,
)
from tca_jax.engine.read import Calls, ReadRows, Then, fork
from tca_jax.errors import explaining, require
from tca_jax.methods.full import BASELINE
from tca_jax.methods.registry import describe_method
from tca_jax.models.config import ModelConfig
from tca_jax.models.rope import RopeConfig
from tca_jax.models.sharding import DATA, axis_size
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.kv import CODES, EightBits, num_bytes
from tca_jax.pallas_kernels.numerics import round_up
from tca_jax.persistence import load, save
from tca_jax.programs import Program

FORMAT_VERSION = 4
_KIND = "context"
_PARTS = "k", "v", "pages", "kept", "start", "own", "length", "scored"  # arrays of rows
_OF_ROWS = "tokens", "lengths", "attended_share"  # arrays of a context beside these


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
            kept_share=rows.kept_share(lengths),
            attended_share=float(np.mean(np.asarray(self.attended_share))),
            compile_seconds=self.compile_seconds,
            prefill_seconds=self.prefill_seconds,
            devices=self.num_devices,
        )

    def require_made_by(self, lm: LM) -> None:
        """Raises ValueError, which names both sides, unless a model can continue the context as it is."""
        own, made = identity_of(lm), self.identity
        wanted, held = lm.cache_dtype, self.rows.k.dtype
        same = (made.config, made.fingerprint) == (own.config, own.fingerprint)
        other = f"whose weights or shape are not those of {own.model!r}: read the document with this model"
        require(same, f"context was made by model {made.model!r}, {other}")
        options = " with other options or budgets" if made.method == own.method else ""
        methods = f"context was made under method {made.method!r}{options}, and {own.model!r} runs under {own.method!r}"
        remedy = "load the model under that method, or read the document again"
        require(made.method_description == own.method_description, f"{methods}: {remedy}")
        how = "with kv='fp8'" if held == CODES else f"in dtype {held}" + (", without kv" if wanted == CODES else "")
        dtypes = f"context holds {held} and the cache of {own.model!r} {wanted}"
        require(held == wanted, f"{dtypes}: load the model {how}")
        mesh = "x".join(map(str, self._devices))
        same = self.shards == lm.head_shards and self._devices[0] == axis_size(lm.mesh, DATA)
        meshes = f"context was made on {mesh}, and {lm.name!r} is on {mesh_name(lm.mesh)} devices on {DATA!r} x 'model'"
        require(same, f"{meshes}, or has its KV heads in another order there: read the document with this model")

    def on(self, lm: LM) -> Context:
        """The context on the devices of a model; itself where it is there already.

        Calls that continue a context do this where it is needed: once, here, is enough for several of them.

        Args:
            lm: A model that can continue it, on as many devices as made it, with KV heads in the same order.

        Raises:
            ValueError: it belongs to another model or method, or devices share its rows and KV heads in another way.
        """
        require_lm(lm)
        self.require_made_by(lm)
        if not isinstance(self.rows.start, np.ndarray):
            return self
        put = jnp.asarray if lm.mesh is None else functools.partial(place, CACHES, mesh=lm.mesh)
        rows: dict[str, Any] = {name: jnp.asarray(getattr(self, name)) for name in _OF_ROWS}
        return dataclasses.replace(self, rows=jax.tree.map(put, self.rows), **rows)

    def continued_by(self, lm: LM, prompts: Any) -> Continuation:
        """Prompts for a model that are appended to it, as `generate` takes them."""
        own, b = self.on(lm), self.rows.page_size
        batch, rows = [prompts] if is_single(prompts) else list(prompts), own.batch
        fits = batch and rows in (1, len(batch))
        require(fits, f"prompts has {len(batch)} entries: must have {rows}, one for each row of the context")
        ids = [
            encode_appended(lm, prompt, functools.partial(own.token_ids, i % rows), f"prompts[{i}]")
            for i, prompt in enumerate(batch)
        ]
        starts = np.broadcast_to(np.asarray(own.lengths), len(ids)).tolist()
        columns = num_columns(max(start % b + len(new) for start, new in zip(starts, ids, strict=True)), b)
        return Continuation(lm, ids, starts, columns, own.tokens.shape[1], context=own)

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
        rows, shards = on_host(self.rows), self.shards
        parts = {name: np.asarray(getattr(self, name)) for name in _OF_ROWS}
        parts |= {name: getattr(rows, name) for name in _PARTS}
        leaves = jax.tree_util.tree_leaves_with_path(parts)
        arrays = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}
        metadata = {
            "format_version": FORMAT_VERSION,
            "identity": dataclasses.asdict(self.identity),
            "window": self.window,
            "window_pages": rows.window_pages,
            "shards": None if shards is None else dataclasses.asdict(shards),
            "dtype": rows.k.dtype.name,
            "library_version": importlib.metadata.version("tca-jax"),
        }
        # As bytes: NumPy has no bfloat16 of its own, and what is read back must be what was written, bit for bit.
        arrays = {name: x.view(np.uint8) if x.dtype.name == metadata["dtype"] else x for name, x in arrays.items()}
        save(_KIND, directory, arrays, metadata)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Context:
        """Reads a saved context into the host's memory; `on` puts it on the devices, as calls with it do.

        Whether it belongs to a model, method and mesh is checked where it is used.

        Raises:
            FileNotFoundError: `directory` does not exist.
            ValueError: there is none in it, or it is damaged or of another version; the message names the folder.
        """
        folder, metadata, arrays = load(_KIND, directory)
        version = metadata.get("format_version") if isinstance(metadata, dict) else None
        reads = f"tca_jax {importlib.metadata.version('tca-jax')} reads {FORMAT_VERSION}"
        again = f"{folder}: format_version = {version!r}: {reads}; read the document again and save that context"
        require(version == FORMAT_VERSION, again)
        broken = (ValueError, TypeError, KeyError, AttributeError)
        with explaining(f"{folder}: damaged, or of another version of tca_jax", *broken):
            return cls(**_fields(metadata, arrays), compile_seconds=0.0, prefill_seconds=0.0)


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
    kernels, calls, checked = lm.kernels(backend), Calls(), Prompts.of(lm, prompts, context)
    checked.require_positions(0)
    require_memory(checked.kv_cache_bytes, f"contexts of {len(checked.ids)} prompts")
    begun = time.perf_counter()
    logits, rows, shares = checked.read(calls, kernels)
    rows = jax.block_until_ready(_compacted(lm, rows, calls))
    seconds = time.perf_counter() - begun - calls.compile_seconds
    finite, shares = on_host((jnp.isfinite(logits).all(axis=-1), shares))
    checked.require_finite(finite)
    tokens, lengths = map(jnp.asarray, pad_tokens(checked.all_tokens, lm.pad_token_id))
    made = calls.compile_seconds, seconds, lm.method.cache.window, lm.head_shards, identity_of(lm)
    return Context(rows, tokens, lengths, jnp.asarray(shares), *made)


_named_program = Program(OverMesh(lambda lm, rows: rows.named_pages()[:-1].sum().reshape(1, 1), (CACHES,), CACHES))
_compact_program = Program(OverMesh(lambda lm, rows, *, pages: rows.compacted(pages), (CACHES,), CACHES))


def _compacted(lm: LM, rows: Rows, calls: Calls) -> Rows:
    """The rows in a pool of about the pages that they name."""
    lm = lm.without_weights
    named = int(np.max(on_host(calls(_named_program, lm, rows))))
    pages = round_up(named, 1 << max(0, named.bit_length() - 4))  # more would stay unused
    return rows if pages >= rows.num_pages else calls(_compact_program, lm, rows, pages=pages)


def encode_appended(lm: Encoder, prompt: Any, held: Callable[[], list[int]], argument: str = "prompt") -> list[int]:
    """Token ids that a prompt appends to a context; `held` gives the context's. Errors name `argument`."""
    if isinstance(prompt, str | bytes) and len(prompt):
        return encode_continuation(lm, prompt, held(), argument)
    if not is_chat(prompt):
        return encode_prompt(lm, prompt, argument)
    before, rendered = held(), render_chat(lm, prompt, argument)
    ids = encode_verbatim(lm, rendered, argument)
    if ids[: len(before)] == before and len(ids) > len(before):
        return ids[len(before) :]
    # A token of the chat may span the end of the context, whose text the chat then begins with all the same.
    text = lm.tokenizer.decode(before)
    continues = rendered.startswith(text) and len(rendered) > len(text)
    must = f"it must begin with the context's {len(before)} tokens"
    remedy = "Pass the whole conversation, or text, which is appended as it is"
    require(continues, f"{argument} is a chat that does not continue the context: {must}. {remedy}")
    return encode_continuation(lm, rendered[len(text) :], before, argument)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuation(Prompts):
    """Prompts that are appended to a context."""

    context: Context  # on the model's devices

    def tokens(self, prompt: int) -> list[int]:
        return self.context.token_ids(prompt % self.context.batch) + self.ids[prompt]

    @property
    def kv_cache_bytes(self) -> int:
        return self.context.num_bytes // self.context.num_devices + super().kv_cache_bytes

    @property
    def full_bytes(self) -> int:
        return self._full_bytes(np.asarray(self.context.lengths).tolist(), self.starts)

    def read_once(self, calls: Calls, backend: Backend, then: Then | None) -> ReadRows:
        lm, context, own = self.lm, self.context, self.own_tokens
        tokens, lengths = pad_tokens(self.ids, lm.pad_token_id, self.columns)
        starts, times = np.asarray(self.starts, np.int32), len(self.ids) // context.batch
        # Contexts of an octave, their prompts and answers share programs.
        longest, columns = self.longest, 1 << (self.context_columns - 1).bit_length()
        of_longest = lm.cache_layout(context.batch // axis_size(lm.mesh, DATA), columns).num_pages
        held, needed = context.rows.num_pages, self.num_pages
        more = needed + spare_pages(held + needed, max(held, of_longest) + longest.num_pages, lm.page_bytes)
        sizes = columns, longest.columns + longest.own_tokens
        rows = fork(lm, context.rows, times, starts + lengths + own, *sizes, calls, more_pages=more)
        rows, logits, _ = feed(lm, rows, tokens, starts, lengths, calls, backend=backend)
        return ReadRows(logits, rows, jnp.broadcast_to(context.attended_share, len(starts)))


def _fields(metadata: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a saved context, its arrays in host memory."""
    dtype, metadata = jnp.dtype(metadata["dtype"]), _tuples(metadata)

    def part(name: str) -> Any:
        """An array, of floating point where it is one of the model's; None where there is none."""
        if f"{name}.words" in arrays:
            return EightBits(arrays[f"{name}.words"], arrays[f"{name}.exponents"])
        if f"{name}.bias" in arrays:
            return Scored(*(part(f"{name}.{own}") for own in Scored._fields))
        kind = {"k": dtype, "v": dtype} | dict.fromkeys(("attended_share", "scored.scores", "scored.bias"), np.float32)
        return arrays[name].view(kind.get(name, np.int32)) if name in arrays else None

    parts = {name: part(name) for name in _PARTS}
    lead = parts["start"].shape[:-1]  # of a mesh
    free = FreePages(np.zeros((*lead, 0), np.int32), np.zeros(lead, np.int32))  # type: ignore[arg-type]
    rows = Rows(**parts, free=free, window_pages=metadata["window_pages"])
    own, shards = metadata["identity"], metadata.get("shards")
    config = ModelConfig(**{**own["config"], "rope": RopeConfig(**own["config"]["rope"])})
    identity, shards = ContextIdentity(**{**own, "config": config}), shards and HeadShards(**shards)
    fields = {"identity": identity, "rows": rows, "window": metadata["window"], "shards": shards}
    return fields | {name: part(name) for name in _OF_ROWS}


def _tuples(value: Any) -> Any:
    """A value of JSON with tuples in place of lists."""
    if isinstance(value, dict):
        return {name: _tuples(own) for name, own in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


_DOCUMENT, _QUESTION, _ANSWER, _NEXT = (f"\u2063{name}\u2063" for name in ("document", "question", "answer", "next"))
_SPACE = " \n"  # that templates may strip from messages


@dataclasses.dataclass(frozen=True)
class DocumentTemplate:
    """Text around the parts of a conversation about a document; with a chat template, a user's message holds both
    document and question, so that the document with all before it is read once."""

    before_document: str
    before_question: str  # between the document and a question
    after_question: str  # between a question and its answer
    before_next: str  # between an answer and the next question
    verbatim: bool  # whether this is all; otherwise the tokenizer puts its own tokens before the document
    trims: bool = False  # whether the template strips white space from both ends of messages

    @classmethod
    def of(cls, lm: Encoder, system: str | None = None) -> DocumentTemplate:
        """That of a model's chat template, with a system message; without both, a line break before each question."""
        if not getattr(lm.tokenizer, "chat_template", None) and system is None:
            return cls("", "\n", "", "\n", verbatim=False)
        first = [] if system is None else [{"role": "system", "content": system}]
        first.append({"role": "user", "content": f"{_DOCUMENT}\n\n{_QUESTION}"})
        chat = [*first, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}]
        before, between, after = split_at(lm, render_chat(lm, first, "chat"), _DOCUMENT, _QUESTION)
        *_, following, _ = split_at(lm, render_chat(lm, chat, "chat"), _DOCUMENT, _QUESTION, _ANSWER, _NEXT)
        first[-1] = {"role": "user", "content": f"{_SPACE}{_DOCUMENT}{_SPACE}"}
        trims = f"{_SPACE}{_DOCUMENT}{_SPACE}" not in render_chat(lm, first, "chat")
        return cls(before, between, after, following, verbatim=True, trims=trims)

    def document(self, lm: Encoder, text: str, argument: str) -> list[int]:
        """Token ids of a document; `argument` is its name in messages."""
        if not self.verbatim or not text:
            return encode_prompt(lm, text, argument)
        return encode_verbatim(lm, self.before_document + (text.lstrip() if self.trims else text), argument)

    def question(self, text: str, *, follows_answer: bool) -> str:
        """Appended text of a question."""
        if self.trims:
            text = text.strip() if follows_answer else text.rstrip()
        return (self.before_next if follows_answer else self.before_question) + text + self.after_question
