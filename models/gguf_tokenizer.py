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
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tca_jax.errors import explaining, require
from tca_jax.models.json_object import Entries

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # of token_type
_SPACE = "\u2581"  # SentencePiece's

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Pre-tokenizer -> how llama.cpp cuts text into words before it merges bytes: each pattern cuts the pieces of the one
# before, into matches and text between them.
_SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_LLAMA3.replace("{1,3}", ""),),
    "llama-bpe": (_LLAMA3,),  # with it, a word that is a token needs no merges, and the first token is added
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


def build_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer that the metadata of a GGUF file describes.

    Its ids are those of llama.cpp. Control tokens are special; user-defined tokens are added tokens. ValueError with
    the key where a value is missing, unknown or invalid; where values do not fit each other, an error of `tokenizers`.
    """
    file = _File.of(metadata)
    template = file.values.get("chat_template")
    require(isinstance(template, str | None), "tokenizer.chat_template must be a string")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # PyTorch, which nothing here needs
    from transformers import PreTrainedTokenizerFast

    backend = _sentencepiece(file) if file.split is None else _bytes_bpe(file, file.split)
    backend.post_processor = _post_processor(file)
    backend.add_special_tokens(file.added(_UNKNOWN, _CONTROL, special=True))
    backend.add_tokens(file.added(_USER_DEFINED, special=False))
    options = file.named_tokens() | {"chat_template": template, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def stop_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end an answer: those that the metadata names, and control tokens with a text on llama.cpp's list.

    That of `tokenizer.ggml.eos_token_id` is first, the others are in ascending order.
    """
    file, texts = _File.of(metadata), set(_STOP_TEXTS.split())
    first, *named = (file.id(name) for name in _STOP_IDS)
    of_text = {i for i in np.flatnonzero(file.types == _CONTROL).tolist() if file.tokens[i] in texts}
    others = sorted((of_text | {token for token in named if token is not None}) - {first})
    return tuple(others) if first is None else (first, *others)


@dataclasses.dataclass(frozen=True, eq=False)
class _File(Entries):
    """Metadata of a file, by keys without their prefix "tokenizer."."""

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> _File:
        return cls({key.removeprefix("tokenizer."): value for key, value in metadata.items()}, "tokenizer.{}")

    @functools.cached_property
    def split(self) -> tuple[str, ...] | None:
        """Patterns that cut text; None for SentencePiece."""
        kind, name = self.values.get("ggml.model"), self.values.get("ggml.pre")
        if kind not in ("gpt2", "llama"):
            self.refuse("ggml.model", "'gpt2' (byte-level BPE) or 'llama' (SentencePiece)")
        if kind == "llama":
            return None
        if not name:
            use = "text is split as by 'default', and answers may be worse; convert the model again"
            warnings.warn(f"tokenizer.ggml.pre is missing: {use}", stacklevel=3)
        return _SPLITS.get(name or "default") or self.refuse("ggml.pre", f"one of {', '.join(_SPLITS)}")

    @functools.cached_property
    def tokens(self) -> list[str]:
        return [token or f"[EMPTY_{i}]" for i, token in enumerate(self.get("ggml.tokens"))]  # as llama.cpp calls them

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        ids = {token: i for i, token in enumerate(self.tokens)}
        twice = [token for i, token in enumerate(self.tokens) if ids[token] != i]
        require(not twice, f"tokenizer.ggml.tokens has {twice[:1]} twice: must be there once")
        return ids

    @functools.cached_property
    def types(self) -> np.ndarray:
        return self.numbers("ggml.token_type", "iu") if "ggml.token_type" in self.values else np.ones(len(self.tokens))

    def id(self, name: str) -> int | None:
        """A token that the metadata names; None where it names none."""
        key, size = f"ggml.{name}_token_id", len(self.tokens)
        if self.values.get(key) is None:
            default = size if self.split else _SENTENCEPIECE_IDS.get(name, size)
            return default if default < size else None
        value = self.integer(key, least=0)
        return value if value < size else self.refuse(key, f"a token id in [0, {size})")

    def numbers(self, key: str, kinds: str) -> np.ndarray:
        """One number for each token; `kinds` are of dtypes."""
        numbers = np.asarray(self.values.get(key))
        if numbers.shape != (len(self.tokens),) or numbers.dtype.kind not in kinds or np.isnan(numbers).any():
            self.refuse(key, f"a list of {len(self.tokens):,} numbers, one for each token")
        return numbers

    def named_tokens(self) -> dict[str, str]:
        """Special tokens by transformers' names; a padding token that is a word of text is left out."""
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        found = {name: i for name, key in names.items() if (i := self.id(key)) is not None}
        ends = [found[name] for name in ("bos_token", "eos_token") if name in found]
        kinds = (_UNKNOWN, _CONTROL)
        return {name: self.tokens[i] for name, i in found.items() if i in ends or self.types[i] in kinds}

    def added(self, *types: int, special: bool) -> list[AddedToken]:
        """Tokens that are matched in a text before it is split."""
        found = np.flatnonzero(np.isin(self.types, types)).tolist()
        return [AddedToken(self.tokens[i], normalized=False, special=special) for i in found]


def _bytes_bpe(file: _File, split: tuple[str, ...]) -> Tokenizer:
    merges = dict.fromkeys(tuple(merge.split(" ", 1)) for merge in file.get("ggml.merges"))  # the first of equal ones
    with explaining("tokenizer.ggml.merges must be pairs of tokens that make a third"):
        backend = Tokenizer(models.BPE(file.ids, list(merges), ignore_merges=split == (_LLAMA3,)))
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split]
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


def _post_processor(file: _File) -> processors.TemplateProcessing:
    """Adds the first and the last token to a text, if flagged."""
    flags = {"bos": file.split in (None, (_LLAMA3,)), "eos": False}
    special = {}
    for name in (name for name, default in flags.items() if file.flag(f"ggml.add_{name}_token", default)):
        if (token := file.id(name)) is None:
            return file.refuse(f"ggml.add_{name}_token", f"false where there is no tokenizer.ggml.{name}_token_id")
        special[name] = {"id": name, "ids": [token], "tokens": [file.tokens[token]]}
    before, after = ([name] if name in special else [] for name in ("bos", "eos"))
    single, second = ([*before, part, *after] for part in ("$A", "$B"))
    return processors.TemplateProcessing(single=single, pair=single + second, special_tokens=list(special.values()))
