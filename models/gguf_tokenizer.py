"""Tokenizers of GGUF checkpoints, built from their metadata with `tokenizers`; ids are those of llama.cpp.

Two kinds: byte-level BPE (`tokenizer.ggml.model` = "gpt2"), whose merges are in the file and whose regular expressions
`tokenizer.ggml.pre` names, and SentencePiece's BPE ("llama"), whose merges follow from the scores of its tokens.

Two rare cases differ from llama.cpp: of special tokens that overlap it takes the longest, this the leftmost; of
overlapping pairs with equal scores it merges the leftmost, this the one whose token comes first in the vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tca_jax.errors import UserError
from tca_jax.models.json_object import Entries

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # of token_type
_SPACE = "\u2581"  # SentencePiece's
_SHOWN = 100  # characters of a value in a message
_CHECKPOINT = "load the model from a Hugging Face checkpoint"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class _Split:
    """How llama.cpp cuts text into words before it merges bytes."""

    patterns: tuple[str, ...]  # each cuts the pieces of the one before, into matches and text between them
    ignore_merges: bool = False  # whether a word that is a token needs no merges
    add_bos: bool = False  # where the file does not say


_SPLITS = {
    "default": _Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "smollm": _Split((r"\p{N}", _GPT2)),
    "llama-bpe": _Split((_LLAMA3,), ignore_merges=True, add_bos=True),
    "qwen2": _Split((_LLAMA3.replace("{1,3}", ""),)),
}
_SYNONYMS = {
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez",
}
_SPLITS |= {other: _SPLITS[name] for name, others in _SYNONYMS.items() for other in others.split()}

_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # where the file has none
_STOP_IDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Texts of control tokens that end an answer in llama.cpp; the last row fills and divides code.
_STOP_TEXTS = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT>
_<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[
<\uff5cend\u2581of\u2581sentence\uff5c>
<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""


def build_tokenizer(metadata: Mapping[str, Any], source: str) -> PreTrainedTokenizerFast:
    """The tokenizer that the metadata of a GGUF file describes.

    Its ids are those of llama.cpp. Control tokens are special; user-defined tokens are added tokens. ValueError where a
    value is missing, unknown or invalid; the message has the file (`source`), the key and a remedy.
    """
    file = _File.of(metadata, source)
    split = _split(file) if file.kind == "gpt2" else None
    flags = {"bos": file.flag("ggml.add_bos_token", split is None or split.add_bos)}
    flags["eos"] = file.flag("ggml.add_eos_token", False)
    template = file.values.get("chat_template")
    if not isinstance(template, str | None):
        file.refuse("chat_template", "a string")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # PyTorch, which nothing here needs
    from transformers import PreTrainedTokenizerFast

    try:
        backend = _sentencepiece(file) if split is None else _bytes_bpe(file, split)
        backend.post_processor = _post_processor(file, flags)
        backend.add_special_tokens(file.added(_UNKNOWN, _CONTROL, special=True))
        backend.add_tokens(file.added(_USER_DEFINED, special=False))
        options = file.named_tokens() | {"chat_template": template, "clean_up_tokenization_spaces": False}
        return PreTrainedTokenizerFast(tokenizer_object=backend, **options)
    except UserError:
        raise
    except Exception as error:  # whatever the libraries raise, the user needs to know which file
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(f"{source}: the tokenizer cannot be built ({reason}); {_CHECKPOINT}") from error


def stop_token_ids(metadata: Mapping[str, Any], source: str) -> tuple[int, ...]:
    """Tokens that end an answer: those that the metadata names, and control tokens with a text on llama.cpp's list.

    That of `tokenizer.ggml.eos_token_id` is first, the others are in ascending order.
    """
    file, texts = _File.of(metadata, source), set(_STOP_TEXTS.split())
    first, *named = (file.id(name) for name in _STOP_IDS)
    of_text = {i for i in np.flatnonzero(file.types == _CONTROL).tolist() if file.tokens[i] in texts}
    others = sorted((of_text | {token for token in named if token is not None}) - {first})
    return tuple(others) if first is None else (first, *others)


@dataclasses.dataclass(frozen=True, eq=False)
class _File(Entries):
    """Checked metadata of a file, by keys without their prefix "tokenizer."."""

    @classmethod
    def of(cls, metadata: Mapping[str, Any], source: str) -> _File:
        values = {key.removeprefix("tokenizer."): value for key, value in metadata.items()}
        return cls(values, f"{source}: tokenizer.{{}}")

    @functools.cached_property
    def kind(self) -> str:
        kind = self.values.get("ggml.model")
        if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
            self.refuse("ggml.model", "'gpt2' (byte-level BPE) or 'llama' (SentencePiece)", remedy=_CHECKPOINT)
        return kind

    @functools.cached_property
    def tokens(self) -> list[str]:
        tokens = self.strings("ggml.tokens")
        if not tokens:
            self.refuse("ggml.tokens", "a list of tokens")
        return [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]  # as llama.cpp calls them

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        ids = {token: i for i, token in enumerate(self.tokens)}
        if len(ids) < len(self.tokens):
            twice = next(token for i, token in enumerate(self.tokens) if ids[token] != i)
            self.refuse("ggml.tokens", "there once", twice)
        return ids

    @functools.cached_property
    def types(self) -> np.ndarray:
        if "ggml.token_type" not in self.values:
            return np.ones(len(self.tokens), int)
        return self.numbers("ggml.token_type", "iu")

    def id(self, name: str) -> int | None:
        """A token that the metadata names; None where it names none."""
        key, size = f"ggml.{name}_token_id", len(self.tokens)
        value = self.values.get(key)
        if value is None:
            default = _SENTENCEPIECE_IDS.get(name, size) if self.kind == "llama" else size
            return default if default < size else None
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < size:
            self.refuse(key, f"a token id in [0, {size})")
        return int(value)

    def strings(self, key: str) -> list[str]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.refuse(key, "a list of strings")
        return value

    def numbers(self, key: str, kinds: str) -> np.ndarray:
        """One number for each token; `kinds` are of dtypes."""
        try:
            numbers = np.asarray(self.values.get(key))
        except ValueError:  # lists of different lengths
            numbers = np.empty((0, 0))
        if numbers.shape != (len(self.tokens),) or numbers.dtype.kind not in kinds or np.isnan(numbers).any():
            self.refuse(key, f"a list of {len(self.tokens):,} numbers, one for each token")
        return numbers

    def named_tokens(self) -> dict[str, str]:
        """Special tokens by transformers' names; a padding token that is a word of text is left out."""
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        found = {name: i for name, key in names.items() if (i := self.id(key)) is not None}
        ends = [found[name] for name in ("bos_token", "eos_token") if name in found]
        special = {name for name, i in found.items() if i in ends or self.types[i] in (_UNKNOWN, _CONTROL)}
        return {name: self.tokens[found[name]] for name in names if name in special}

    def added(self, *types: int, special: bool) -> list[AddedToken]:
        """Tokens that are matched in a text before it is split."""
        found = np.flatnonzero(np.isin(self.types, types)).tolist()
        return [AddedToken(self.tokens[i], normalized=False, special=special) for i in found]

    def refuse(self, key: str, must: str, value: Any = None, remedy: str = "convert the model again") -> NoReturn:
        """Raises ValueError with the key, its value, or a part of that, and the remedy."""
        size, value = "", self.values.get(key) if value is None else value
        if isinstance(value, list | np.ndarray):
            value, size = value[:3], f" ({len(value):,} entries)"
        shown = repr(value) if len(repr(value)) <= _SHOWN else f"{repr(value)[:_SHOWN]}..."
        given = "is missing" if value is None else f"= {shown}{size}"
        raise UserError(f"{self.name.format(key)} {given}: must be {must}; {remedy}")


def _split(file: _File) -> _Split:
    """The split that `tokenizer.ggml.pre` names."""
    name = file.values.get("ggml.pre")
    if name is None or (isinstance(name, str) and not name):
        use = "text is split as by 'default', and answers may be worse; convert the model again"
        warnings.warn(f"{file.name.format('ggml.pre')} is missing: {use}", stacklevel=3)
        name = "default"
    if not isinstance(name, str) or name not in _SPLITS:
        file.refuse("ggml.pre", f"one of {', '.join(_SPLITS)}", remedy=_CHECKPOINT)
    return _SPLITS[name]


def _bytes_bpe(file: _File, split: _Split) -> Tokenizer:
    merges: dict[tuple[str, str], None] = {}  # the first of equal ones counts
    ids = file.ids
    for merge in file.strings("ggml.merges"):
        space = merge.find(" ", 1)
        left, right = merge[:space], merge[space + 1 :]
        if space < 0 or not (left in ids and right in ids and left + right in ids):
            file.refuse("ggml.merges", "two tokens that make a third, with a space between", merge)
        merges[left, right] = None
    backend = Tokenizer(models.BPE(ids, list(merges), ignore_merges=split.ignore_merges))
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*parts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: _File) -> Tokenizer:
    unknown = file.id("unknown")
    options = {} if unknown is None else {"unk_token": file.tokens[unknown]}
    backend = Tokenizer(models.BPE(file.ids, _merges_of_scores(file), fuse_unk=True, byte_fallback=True, **options))
    prefix = file.flag("ggml.add_space_prefix", True)
    first = [normalizers.Prepend(_SPACE)] if prefix else []  # also after each special token
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
    last = [decoders.Strip(" ", 1, 0)] if prefix else []
    to_text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*to_text, *last])
    return backend


def _merges_of_scores(file: _File) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, the one with the highest score first; bytes are no parts of others."""
    parts = {token for token, kind in zip(file.tokens, file.types.tolist(), strict=True) if kind != _BYTE}
    merges = []
    for i in np.argsort(-file.numbers("ggml.scores", "iuf").astype(np.float64), kind="stable").tolist():
        token = file.tokens[i]
        pairs = ((token[:cut], token[cut:]) for cut in range(len(token) - 1, 0, -1))
        merges += [pair for pair in pairs if pair[0] in parts and pair[1] in parts]
    return merges


def _post_processor(file: _File, flags: Mapping[str, bool]) -> processors.TemplateProcessing:
    """Adds the first and the last token to a text, if flagged."""
    special = {}
    for name in (name for name, flag in flags.items() if flag):
        if (token := file.id(name)) is None:
            file.refuse(f"ggml.add_{name}_token", f"false where there is no tokenizer.ggml.{name}_token_id", True)
        special[name] = {"id": name, "ids": [token], "tokens": [file.tokens[token]]}
    before, after = ([name] if name in special else [] for name in ("bos", "eos"))
    single, second = ([*before, part, *after] for part in ("$A", "$B"))
    return processors.TemplateProcessing(single=single, pair=single + second, special_tokens=list(special.values()))
