"""Tokenizers of GGUF files: ids are those of llama.cpp's rules, written down here again."""

import functools
import itertools
import json
import random

import numpy as np
import pytest
import regex
from gguf_files import LETTERS
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tca_jax.errors import UserError
from tca_jax.models.gguf_tokenizer import build_tokenizer, stop_token_ids

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RULES = {
    "smollm": [r"\p{N}", GPT2],
    "qwen2": [WORDS % 1],
    "llama-bpe": [WORDS % 3],
    "default": [r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9]{3}"],
}
GGML = "tokenizer.ggml."
SCRIPTS = ["etaoinshrdluEN", "éßøñÅ", "привет", "你好世界日本語カナ한국", "مرحبا", "नमस्तेक्षि", "e\u0301\u0308"]
SCRIPTS += ["👩\u200d🔬🏽👨\u200d👩\u200d👧🇩🇪"]
MARKS = ["+-*/=<>(){}[];:,.!?'\"#@$%^&|~`_\\", "0123456789٣Ⅷ½²", " ", "  \t", "\n\r", "\u00a0\u3000\u0085"]
MARKS += ["\x00\x07\x1c\u200b"]
CODE = ["'s", "'LL", "'Ve", "don't", "def f(x):\n    return", "12345", "<|", "</", " 3.14", "\n\n  ", "<0x0A>", "Ġ"]


def texts(count, special, seed=0):
    """Random strings: runs of one script or of marks, pieces of code, special tokens."""
    rng = random.Random(seed)

    def run():
        kind = rng.random()
        if kind < 0.15:
            return rng.choice(CODE)
        if kind < 0.25 and special:
            return rng.choice(special)
        return "".join(rng.choices(rng.choice(SCRIPTS if kind < 0.65 else MARKS), k=rng.randint(1, 8)))

    return ["".join(run() for _ in range(rng.randint(1, 14))) for _ in range(count)]


def merged(symbols, rank):
    """Merges the neighbours of the least rank, the leftmost of several, until none has a rank."""
    while ranked := [(r, i) for i, pair in enumerate(itertools.pairwise(symbols)) if (r := rank(*pair)) is not None]:
        _, i = min(ranked)
        symbols = [*symbols[:i], symbols[i] + symbols[i + 1], *symbols[i + 2 :]]
    return symbols


class Oracle:
    """llama.cpp's rules, step by step."""

    def __init__(self, metadata):
        self.of = {key.removeprefix(GGML): value for key, value in metadata.items()}
        self.ids = {token: i for i, token in enumerate(self.of["tokens"])}
        added = [token for token, kind in zip(self.ids, self.of["token_type"], strict=True) if kind in (2, 3, 4)]
        self.special = regex.compile("|".join(map(regex.escape, sorted(added, key=len, reverse=True))))
        merges = [tuple(merge.split(" ")) for merge in self.of.get("merges", ())]
        self.ranks = {merge: rank for rank, merge in reversed([*enumerate(merges)])}
        self.word = functools.cache(self._word)

    def __call__(self, text):
        found, start = [], 0
        for match in self.special.finditer(text):
            found += [*self._plain(text[start : match.start()]), self.ids[match[0]]]
            start = match.end()
        return found + self._plain(text[start:])

    def _plain(self, text):
        """Text without special tokens."""
        if self.of["model"] == "gpt2":
            return [token for piece in pieces(self.of["pre"], text) for token in self.word(piece)]
        found = []
        for symbol in merged([*f" {text}".replace(" ", "▁")] if text else [], self._score):
            names = [symbol] if symbol in self.ids else [f"<0x{byte:02X}>" for byte in symbol.encode()]
            found += [self.ids[name] for name in names]
        return found

    def _score(self, left, right):
        return -self.of["scores"][self.ids[left + right]] if left + right in self.ids else None

    def _word(self, text):
        symbols = [LETTERS[byte] for byte in text.encode()]
        if self.of["pre"] == "llama-bpe" and "".join(symbols) in self.ids:
            return [self.ids["".join(symbols)]]
        return [self.ids[symbol] for symbol in merged(symbols, lambda *pair: self.ranks.get(pair))]


def pieces(pre, text):
    """Each pattern cuts the pieces of the one before, into matches and text between them."""
    found = [text]
    for pattern in RULES[pre]:
        found = [piece for each in found for piece in regex.splititer(f"({pattern})", each) if piece]
    return found


TRAINING = """The quick brown fox: don't, we'LL and 1234567 aaaa bbb привет 你好 мир नमस्ते  2,024.50    x
def f(x):
    return x += 12345 --- >>= (fox (fo fox"""
CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|file_sep|>"]


def trained(vocab_size, space, **options):
    """`vocab` and `merges`, in their order; merges cross the borders of words."""
    backend = Tokenizer(models.BPE())
    if options:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **options)
    backend.train_from_iterator([space.join(pair) for pair in itertools.pairwise(TRAINING.split(" "))], trainer)
    return json.loads(backend.to_str())["model"]


@functools.cache
def of_bytes(pre):
    """Metadata of a small byte-level vocabulary, with a token that no merges make."""
    model = trained(400, " ", initial_alphabet=LETTERS)
    tokens = [*model["vocab"], "Ġunmade", *CONTROL, "<tool>", "[PAD0]"]
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": np.array([1] * (len(tokens) - 6) + [3] * len(CONTROL) + [4, 5], np.int32),
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": tokens.index("<|im_start|>"),
        "eos_token_id": tokens.index("<|im_end|>"),
    }
    return {GGML + key: value for key, value in metadata.items()} | {"tokenizer.chat_template": CHAT}


@functools.cache
def of_scores():
    """Metadata of a small vocabulary of SentencePiece's kind, which does not name the first and the last token."""
    vocab = trained(180, "▁")["vocab"]
    metadata = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *vocab, "<tool>"],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(vocab) + [4],
        "scores": np.array([0] * 259 + [-rank for rank in range(len(vocab))] + [0], np.float32),
    }
    return {GGML + key: value for key, value in metadata.items()}


CHAT = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
SYNTHETIC = {pre: functools.partial(of_bytes, pre) for pre in RULES} | {"sentencepiece": of_scores}


def special(metadata):
    pairs = zip(metadata[f"{GGML}tokens"], metadata[f"{GGML}token_type"], strict=True)
    return [token for token, kind in pairs if kind in (3, 4)]


@pytest.mark.parametrize("kind", SYNTHETIC)
def test_ids_follow_llama_cpps_rule(kind):
    metadata = SYNTHETIC[kind]()
    tokenizer, oracle = build_tokenizer(metadata), Oracle(metadata)
    strings = [*texts(500, special(metadata)), " unmade unmades", "", " ", "aaaaaaa"]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in strings]
    assert ids == [oracle(text) for text in strings]
    for text, each in zip(strings, ids, strict=True):
        if kind != "sentencepiece" or not oracle.special.search(text):  # it adds a space after special tokens
            assert tokenizer.decode(each) == text


def test_pre_tokenizers_differ_and_have_synonyms():
    metadata, text = of_bytes("default"), "12345(fox unmade"
    names = [*RULES, "llama3", "deepseek-r1-qwen"]
    found = {pre: tuple(build_tokenizer(metadata | {f"{GGML}pre": pre})(text)["input_ids"]) for pre in names}
    assert len(set(found.values())) == len(RULES)
    assert (found["llama3"], found["deepseek-r1-qwen"]) == (found["llama-bpe"], found["qwen2"])
    nameless = {key: value for key, value in metadata.items() if key != f"{GGML}pre"}
    with pytest.warns(UserWarning, match=r"tokenizer\.ggml\.pre is missing"):
        assert tuple(build_tokenizer(nameless)(text)["input_ids"]) == found["default"]


@pytest.mark.parametrize(
    ("kind", "flags", "first", "last"),
    [
        ("qwen2", {"bos": None}, False, False),
        ("qwen2", {"bos": True, "eos": True}, True, True),
        ("llama-bpe", {"bos": None}, True, False),
        ("llama-bpe", {"bos": False}, False, False),
        ("sentencepiece", {}, True, False),
        ("sentencepiece", {"bos": False, "eos": True}, False, True),
    ],
)
def test_first_and_last_tokens_follow_flags(kind, flags, first, last):
    metadata = SYNTHETIC[kind]() | {f"{GGML}add_{end}_token": value for end, value in flags.items()}
    tokenizer = build_tokenizer({key: value for key, value in metadata.items() if value is not None})
    ids, alone = tokenizer("fox")["input_ids"], tokenizer("fox", add_special_tokens=False)["input_ids"]
    assert ids == [tokenizer.bos_token_id] * first + alone + [tokenizer.eos_token_id] * last
    assert tokenizer.decode(ids, skip_special_tokens=True) == "fox"


def test_special_tokens_and_chat_template():
    metadata = of_bytes("qwen2")
    tokenizer = build_tokenizer(metadata | {f"{GGML}padding_token_id": 0})
    ids = tokenizer("<|file_sep|>fox<tool> [PAD0]")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[0] == "<|file_sep|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "fox<tool> [PAD0]"  # only control tokens are special
    assert {"<tool>"} == set(tokenizer.get_added_vocab()) - set(CONTROL)
    assert tokenizer.vocab_size == len(tokenizer) == len(metadata[f"{GGML}tokens"])
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "fox"}], tokenize=False)
    assert chat == "<|im_start|>fox<|im_end|>"
    assert tokenizer.pad_token_id is None  # a word of text, which must not become special
    padded = build_tokenizer(metadata | {f"{GGML}padding_token_id": metadata[f"{GGML}eos_token_id"]})
    assert padded.pad_token_id == padded.eos_token_id == metadata[f"{GGML}eos_token_id"]


def test_stop_tokens_are_named_or_known():
    metadata = of_bytes("qwen2")
    tokens = metadata[f"{GGML}tokens"]
    known = [tokens.index(token) for token in ("<|im_end|>", "<|endoftext|>", "<|file_sep|>")]
    assert stop_token_ids(metadata) == tuple(known)
    assert stop_token_ids(metadata | {f"{GGML}eot_token_id": 5}) == (known[0], 5, *known[1:])
    assert stop_token_ids(of_scores()) == (2,)


@pytest.mark.parametrize(
    ("kind", "key", "value", "message"),
    [
        ("qwen2", "model", "bert", "'bert': must be 'gpt2'"),
        ("qwen2", "pre", "tekken", "'tekken': must be one of default, smollm"),
        ("qwen2", "tokens", None, "is missing"),
        ("qwen2", "tokens", ["a", "b", "a"], "'a'.* must be there once"),
        ("qwen2", "token_type", [1, 3], r"must be a list of \d+ numbers"),
        ("qwen2", "merges", ["ab"], "must be pairs of tokens"),
        ("qwen2", "merges", ["a Ġunmade"], "must be pairs .*unmade"),
        ("qwen2", "eos_token_id", 9999, r"9999: must be a token id in \[0, \d+\)"),
        ("qwen2", "eos_token_id", 2.5, r"2\.5: must be an integer"),
        ("qwen2", "add_bos_token", 1, "1: must be true or false"),
        ("sentencepiece", "scores", [float("nan")] * 500, "must be a list of"),
        ("without a first token", "add_bos_token", True, r"True: must be false where there is no tokenizer\.ggml\.bos"),
    ],
)
def test_invalid_metadata_is_refused(kind, key, value, message):
    nameless = {"without a first token": lambda: of_bytes("llama-bpe") | {f"{GGML}bos_token_id": None}}
    metadata = (SYNTHETIC | nameless)[kind]() | {GGML + key: value}
    with pytest.raises(UserError, match=rf"tokenizer\.ggml\.{key}.*{message}"):
        build_tokenizer(metadata)
