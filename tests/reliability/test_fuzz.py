"""Damaged checkpoints, tokenizers, profiles and contexts: a clear error, or a model that answers."""

import collections
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jaxtyping import config as jaxtyping_config
from profiles import make_profile
from tiny import TCA, random_prompt, tiny_lm, with_candidates, write_checkpoint
from tokenizers import Tokenizer

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.cli.errors import users_message
from tca_jax.engine.prompts import encode_prompt, encode_prompts, render_chat
from tca_jax.loading import open_checkpoint

#: Cases of each kind; TCA_FUZZ=1000 runs the full number, TCA_FUZZ=500:1000 a part of it.
DEFAULT_CASES = 15
_NAMES = ("the tokenizer of ", "chat template")  # of messages about files that were read before
_LONGEST = 15_000  # characters of a message


ABSURD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 0.5, -0.5, 2**31, 2**63, -(2**63), 10**30, 1e308, 1e-320, math.nan, -math.inf),
    *("", "x" * 3_000, "\x00", "\ud800", "../../../etc/hostname", ".", "1", "float99", "full+full"),
    *([], {}, [[]], [None], [1, "2"], {"a": {"b": {}}}, [1] * 3_000),
)


def damage(folder: Path, rng: random.Random) -> str:
    """Damages a file of the folder, or swaps two; returns what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    json_files = [path for path in files if _is_json(path)]
    if json_files and rng.random() < 0.5:
        file = rng.choice(json_files)
        done, root = _changed(json.loads(file.read_bytes()), rng)
        file.write_text(json.dumps(root))
        return f"{file.relative_to(folder)}: {done}"
    file, kind = rng.choice(files), rng.choice((*_BYTES, "deleted", "swapped"))
    content = file.read_bytes()
    file.unlink()
    if kind == "swapped":
        other = rng.choice([path for path in files if path != file] or [file])
        file.write_bytes(other.read_bytes() if other.exists() else b"")
        other.write_bytes(content)
    elif kind in _BYTES:
        file.write_bytes(_BYTES[kind](content, rng))
    return f"{file.relative_to(folder)}: {kind}"


def _flipped(content: bytes, rng: random.Random, end: int | None = None) -> bytes:
    flipped = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 4, 64)) if content else 0):
        flipped[rng.randrange(min(end or len(content), len(content)))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def _spliced(content: bytes, rng: random.Random) -> bytes:
    """Bytes of a place overwritten, or there twice."""
    place, length = rng.randrange(len(content) + 1), rng.choice((1, 8, 200))
    filler = rng.choice((bytes(length), rng.randbytes(length), content[place : place + length]))
    return content[:place] + filler + content[place + rng.choice((0, length)) :]


_BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flipped bits": _flipped,
    "flipped bits near the start": lambda content, rng: _flipped(content, rng, 64),  # headers
    "spliced": _spliced,
    "cut": lambda content, rng: content[: rng.choice((0, 1, 7, len(content) - 1, rng.randrange(len(content) + 1)))],
    "appended": lambda content, rng: content + rng.choice((b"\x00", b"}", b"\n{}", rng.randbytes(300))),
    "random": lambda content, rng: rng.randbytes(len(content)),
    "zeros": lambda content, rng: bytes(len(content)),
}


def _is_json(file: Path) -> bool:
    try:
        return isinstance(json.loads(file.read_bytes()), dict | list)
    except ValueError:
        return False


def _changed(root: Any, rng: random.Random) -> tuple[str, Any]:
    """A JSON value with something absurd, missing, renamed or added on some level."""
    value, parent, key, where = root, None, None, ""
    while isinstance(value, dict | list) and value and (parent is None or rng.random() < 0.8):
        parent, key = value, rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        value, where = parent[key], f"{where}[{key!r}]"
    absurd = rng.choice(ABSURD)
    if parent is None:
        return "an absurd value", absurd
    doing = rng.choice(("value", "value", "value", "value", "delete", "rename", "add"))
    if doing == "delete":
        del parent[key]
    elif doing == "rename" and isinstance(parent, dict):
        parent[f"{key}_"] = parent.pop(key)
    elif doing == "add" and isinstance(parent, dict):
        parent["surprise"] = absurd
    else:
        doing, parent[key] = f"= {str(absurd)[:40]}", absurd
    return f"{where[-80:]} {doing}", root


def fuzz(kind: str, intact: Path, folder: Path, use: Callable[[Path], str]) -> collections.Counter[str]:
    """Damages copies of a folder and uses them; returns how often each outcome came.

    `kind` and the number of a case seed the damage. `use` loads a copy and returns the outcome in a word, or raises
    AssertionError. AssertionError lists all cases that end neither soundly nor in a clear error.
    """
    first, _, last = os.environ.get("TCA_FUZZ", str(DEFAULT_CASES)).rpartition(":")
    outcomes, failures = collections.Counter[str](), list[str]()
    for case in (None, *range(int(first or 0), int(last))):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(intact, folder)
        if case is None:
            use(folder)  # the intact copy loads, and libraries are imported
            continue
        done = damage(folder, random.Random(f"{kind} {case}"))
        outcome, problem = _run(lambda: use(folder), folder)
        outcomes[outcome] += 1
        if problem:
            failures.append(f"{kind} {case}: {done}\n    {problem}")
    assert not failures, "\n".join(failures)
    return outcomes


def _run(use: Callable[[], str], folder: Path) -> tuple[str, str | None]:
    """The outcome of a case, and what is wrong with it."""
    try:
        return use(), None
    except AssertionError as error:
        return "wrong", f"wrong: {error}"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # panics of Rust are no Exception
        return "error", _unclear(error, folder)


def _unclear(error: BaseException, folder: Path) -> str | None:
    """What is wrong with an error for users; None for a line that names a file."""
    shown = f"{type(error).__name__}: {str(error)[:400]}"
    if not isinstance(error, ValueError | OSError) or users_message(error) is None:
        return f"raw {shown}"
    if not any(name in str(error) for name in (str(folder), *_NAMES)):
        return f"names no file: {shown}"
    return f"too long: {shown!r}" if "\n" in str(error) or len(str(error)) > _LONGEST else None


# What is damaged

TEXTS = ("hello", "The answer (42) is ~ not here!", "two\nlines", "übrigens 日本")
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "?"}]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True, scope="module")
def no_type_checks():
    """Damaged input meets the library as users run it: the type checks of other tests would come first."""
    before = jaxtyping_config.jaxtyping_disable
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", before)


def test_a_damaged_checkpoint_answers_or_is_refused(tmp_path):
    intact = write_checkpoint(tmp_path / "intact", tokenizer=False, eos_token_id=[95, 96])
    expected = tca_jax.load(intact)

    def use(folder: Path) -> str:
        lm = tca_jax.load(folder)
        same = jax.tree.all(jax.tree.map(np.array_equal, lm.params, expected.params))
        try:
            answers = answer(lm)
        except ValueError as error:
            if same or "NaN or infinity" not in str(error):
                raise
            return "not finite"
        assert not same or lm.config != expected.config or answers == answer(expected)
        return "the same" if same else "other weights"

    assert fuzz("whole", intact, tmp_path / "c", use)["error"]


def answer(lm: tca_jax.LM) -> list[list[int]]:
    return tca_jax.generate(lm, random_prompt(0, 20), max_new_tokens=4, stop_token_ids=()).tokens


def use_tokenizer(folder: Path, intact: Path) -> str:
    """Encodes, decodes and renders a chat. Merges and names have no checksum: what loads must work."""
    for name in ("config.json", WEIGHTS):
        (folder / name).write_bytes((intact / name).read_bytes())
    checkpoint = open_checkpoint(folder)
    if checkpoint.tokenizer is None:
        assert not any(path.name.startswith("tokenizer") for path in folder.iterdir()), "the tokenizer was overlooked"
        return "no tokenizer"
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        assert encode_prompt(checkpoint, text) == plain.encode(text).ids
        for ids in (encode_prompt(checkpoint, text), *encode_prompts(checkpoint, [text, text])):
            assert all(type(i) is int and 0 <= i < 97 for i in ids)
            assert isinstance(checkpoint.tokenizer.decode(ids, skip_special_tokens=True), str)
    assert isinstance(render_chat(checkpoint, CHAT, "prompts[0]"), str)
    return "usable"


def test_a_damaged_tokenizer_can_be_used(tmp_path):
    intact, files = write_checkpoint(tmp_path / "intact", chat_template=TEMPLATE), tmp_path / "files"
    files.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (files / name).write_bytes((intact / name).read_bytes())
    outcomes = fuzz("tokenizer", files, tmp_path / "c", lambda folder: use_tokenizer(folder, intact))
    assert outcomes["error"]


# TensorStore reports reads of damaged files to an event loop that Orbax has closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["profile", "context"])
def test_a_damaged_folder_loads_or_is_refused(kind, tmp_path):
    saved = make_profile()
    if kind == "context":
        lm = with_candidates(tiny_lm(), [[0, 6], [TCA.num_candidates, 3]])
        saved = tca_jax.prefill(lm, [random_prompt(0, 100), random_prompt(1, 61)])
    saved.save(tmp_path / "saved")

    def use(folder: Path) -> str:
        loaded = (Profile if kind == "profile" else tca_jax.Context).load(folder)
        assert kind == "profile" or isinstance(loaded.stats.kept_share, float)
        return "loads"

    assert fuzz(kind, tmp_path / "saved", tmp_path / "c", use)["error"]
