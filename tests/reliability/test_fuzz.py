"""Damaged checkpoints, tokenizers, profiles and contexts: a clear error, or a model that answers."""

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
from profiles import make_profile
from tiny import random_prompt, tiny_lm, with_candidates, write_checkpoint
from tokenizers import Tokenizer

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.cli.errors import users_message
from tca_jax.engine.prompts import encode_prompt, encode_prompts, render_chat
from tca_jax.loading import open_checkpoint

pytestmark = pytest.mark.usefixtures("no_type_checks")
CASES = int(os.environ.get("TCA_FUZZ", "15"))  # of each kind
_NAMES = ("the tokenizer of ", "chat template")  # of messages about files that were read before
_LONGEST = 15_000  # characters of a message

ABSURD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 0.5, -0.5, 2**31, 2**63, -(2**63), 10**30, 1e308, 1e-320, math.nan, -math.inf),
    *("", "x" * 3_000, "\x00", "\ud800", "../../../etc/hostname", ".", "1", "float99", "full+full"),
    *([], {}, [[]], [None], [1, "2"], {"a": {"b": {}}}, [1] * 3_000),
)


def flipped(content: bytes, rng: random.Random, end: int | None = None) -> bytes:
    """With some other bits, those before `end`."""
    damaged = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 4, 64)) if content else 0):
        damaged[rng.randrange(min(end or len(content), len(content)))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


DAMAGE: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flipped bits": flipped,
    "flipped bits near the start": lambda content, rng: flipped(content, rng, 64),  # headers
    "cut": lambda content, rng: content[: rng.choice((0, 1, 7, len(content) - 1, rng.randrange(len(content) + 1)))],
    "appended": lambda content, rng: content + rng.choice((b"\x00", b"}", b"\n{}", rng.randbytes(300))),
    "random": lambda content, rng: rng.randbytes(len(content)),
    "zeros": lambda content, rng: bytes(len(content)),
}


def damage(folder: Path, rng: random.Random) -> str:
    """Damages or deletes a file of the folder; returns what was done."""
    file = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    content, done = file.read_bytes(), rng.choice((*["a value"] * 6, *DAMAGE, "deleted"))
    if done == "a value" and (root := json_of(content)):
        done = changed(root, rng)
        file.write_text(json.dumps(root))
    elif done == "deleted":
        file.unlink()
    else:
        done = rng.choice(list(DAMAGE)) if done == "a value" else done
        file.write_bytes(DAMAGE[done](content, rng))
    return f"{file.relative_to(folder)}: {done}"


def json_of(content: bytes) -> Any:
    """A JSON object or list; None for other content."""
    try:
        root = json.loads(content)
    except ValueError:
        return None
    return root if isinstance(root, dict | list) else None


def changed(root: Any, rng: random.Random) -> str:
    """Makes something absurd, deletes or renames it on some level of a JSON value."""
    value, where = root, ""
    while isinstance(value, dict | list) and value and (not where or rng.random() < 0.8):
        parent, key = value, rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        value, where = parent[key], f"{where}[{key!r}]"
    absurd, doing = rng.choice(ABSURD), rng.choice((*["="] * 4, "deleted", "renamed"))
    if doing == "=":
        parent[key] = absurd
        return f"{where[-80:]} = {str(absurd)[:40]}"
    del parent[key]
    if doing == "renamed" and isinstance(parent, dict):
        parent[f"{key}_"] = value
    return f"{where[-80:]} {doing}"


def fuzz(kind: str, intact: Path, folder: Path, use: Callable[[Path], None]) -> None:
    """Damages copies of a folder and uses them; some must be refused, all others must be sound.

    `kind` and the number of a case seed the damage. `use` loads a copy; AssertionError lists the cases for which it
    raises AssertionError, or an error that is not clear.
    """
    shutil.copytree(intact, folder)
    use(folder)  # the intact copy loads, and libraries are imported
    failures, refused = list[str](), 0
    for case in range(CASES):
        shutil.rmtree(folder)
        shutil.copytree(intact, folder)
        done, problem = damage(folder, random.Random(f"{kind} {case}")), None
        try:
            use(folder)
        except (KeyboardInterrupt, SystemExit):
            raise
        except AssertionError as error:
            problem = f"wrong: {error}"
        except BaseException as error:  # panics of Rust are no Exception
            refused, problem = refused + 1, unclear(error, folder)
        if problem:
            failures.append(f"{kind} {case}: {done}\n    {problem}")
    assert not failures, "\n".join(failures)
    assert refused


def unclear(error: BaseException, folder: Path) -> str | None:
    """What is wrong with an error for users; None for a line that names a file."""
    shown = f"{type(error).__name__}: {str(error)[:400]}"
    if not isinstance(error, ValueError | OSError) or users_message(error) is None:
        return f"raw {shown}"
    if not any(name in str(error) for name in (str(folder), *_NAMES)):
        return f"names no file: {shown}"
    return f"too long: {shown!r}" if "\n" in str(error) or len(str(error)) > _LONGEST else None


TEXTS = ("hello", "The answer (42) is ~ not here!", "two\nlines", "übrigens 日本")
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "?"}]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def test_a_damaged_checkpoint_answers_or_is_refused(tmp_path):
    intact = write_checkpoint(tmp_path / "intact", tokenizer=False, eos_token_id=[95, 96])
    expected = tca_jax.load(intact)

    def use(folder: Path) -> None:
        lm = tca_jax.load(folder)
        same = jax.tree.all(jax.tree.map(np.array_equal, lm.params, expected.params))
        try:
            answers = answer(lm)
        except ValueError as error:
            if same or "NaN or infinity" not in str(error):
                raise
        else:
            assert not same or lm.config != expected.config or answers == answer(expected)

    fuzz("checkpoint", intact, tmp_path / "c", use)


def answer(lm: tca_jax.LM) -> list[list[int]]:
    return tca_jax.generate(lm, random_prompt(0, 20), max_new_tokens=4, stop_token_ids=()).tokens


def use_tokenizer(folder: Path, intact: Path) -> None:
    """Encodes, decodes and renders a chat. Merges and names have no checksum: what loads must work."""
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((intact / name).read_bytes())
    checkpoint = open_checkpoint(folder)
    if checkpoint.tokenizer is None:
        assert not any(path.name.startswith("tokenizer") for path in folder.iterdir()), "the tokenizer was overlooked"
        return
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        assert encode_prompt(checkpoint, text) == plain.encode(text).ids
        for ids in (encode_prompt(checkpoint, text), *encode_prompts(checkpoint, [text, text])):
            assert all(type(i) is int and 0 <= i < 97 for i in ids)
            assert isinstance(checkpoint.tokenizer.decode(ids, skip_special_tokens=True), str)
    assert isinstance(render_chat(checkpoint, CHAT, "prompts[0]"), str)


def test_a_damaged_tokenizer_can_be_used(tmp_path):
    intact, files = write_checkpoint(tmp_path / "intact", chat_template=TEMPLATE), tmp_path / "files"
    files.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (files / name).write_bytes((intact / name).read_bytes())
    fuzz("tokenizer", files, tmp_path / "c", lambda folder: use_tokenizer(folder, intact))


# TensorStore reports reads of damaged files to an event loop that Orbax has closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["profile", "context"])
def test_a_damaged_folder_loads_or_is_refused(kind, tmp_path):
    saved = make_profile()
    if kind == "context":
        lm = with_candidates(tiny_lm())
        saved = tca_jax.prefill(lm, [random_prompt(0, 100), random_prompt(1, 61)])
    saved.save(tmp_path / "saved")

    def use(folder: Path) -> None:
        loaded = (Profile if kind == "profile" else tca_jax.Context).load(folder)
        assert kind == "profile" or isinstance(loaded.stats.kept_share, float)

    fuzz(kind, tmp_path / "saved", tmp_path / "c", use)
