"""Random damage to a folder of files: what disks, broken downloads, half copies and careless editors leave behind."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEEP = 100_000  # levels of nesting, far past any recursion limit
HUGE_DIGITS = 5_000  # of an integer, more than Python reads


class _Raw(str):
    """JSON text that stands as it is in the place of a value."""


ABSURD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 0.5, -0.5, 10**9, 2**31, 2**63, -(2**63), 10**30, 1e308, 1e-320),
    *("", "x", "x" * 3_000, "\x00", "\ud800", "../../../etc/hostname", "/", ".", "NaN", "1", "float99", "full+full"),
    *([], {}, [[]], [None], [1, "2"], {"a": {"b": {}}}, [1] * 3_000),
    *(_Raw("NaN"), _Raw("-Infinity"), _Raw("1" * HUGE_DIGITS), _Raw("1e999")),
    *(_Raw("[" * depth + "]" * depth) for depth in (50, 400, 800, DEEP)),
    *(_Raw('{"a":' * depth + "1" + "}" * depth) for depth in (50, 400, 800, DEEP)),
)


def damage(folder: Path, rng: random.Random) -> str:
    """Does one kind of damage to a file of the folder, or to two; returns what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = rng.choice(files)
    if rng.random() < 0.5 and any(map(_is_json, files)):
        file = rng.choice([path for path in files if _is_json(path)])
        kind: Callable[[Path, random.Random], str] = rng.choice(_JSON_KINDS)
    elif rng.random() < 0.1:
        return _swap(file, rng.choice(files))
    else:
        kind = rng.choice(_KINDS)
    return f"{file.relative_to(folder)}: {kind(file, rng)}"


# --- bytes ----------------------------------------------------------------------------------------


def _flip(file: Path, rng: random.Random) -> str:
    content = bytearray(file.read_bytes())
    places = [rng.randrange(len(content)) for _ in range(rng.choice((1, 1, 1, 4, 64)))] if content else []
    for place in places:
        content[place] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    return f"bits flipped in bytes {places[:8]}"


def _flip_near_the_start(file: Path, rng: random.Random) -> str:
    """Where headers are: they are a small part of large files."""
    content = bytearray(file.read_bytes())
    place = rng.randrange(min(len(content), 64)) if content else 0
    content[place : place + 1] = bytes([rng.randrange(256)])
    file.write_bytes(content)
    return f"byte {place} is {content[place]}"


def _overwrite(file: Path, rng: random.Random) -> str:
    content, length = bytearray(file.read_bytes()), rng.choice((1, 8, 512))
    place = rng.randrange(len(content)) if content else 0
    filler = bytes(length) if rng.random() < 0.5 else rng.randbytes(length)
    content[place : place + length] = filler[: len(content) - place]
    file.write_bytes(content)
    return f"{length} bytes from {place} overwritten"


def _truncate(file: Path, rng: random.Random) -> str:
    content = file.read_bytes()
    length = rng.choice((0, 1, 7, len(content) - 1, rng.randrange(len(content) + 1)))
    file.write_bytes(content[: max(0, length)])
    return f"cut to {length} of {len(content)} bytes"


def _append(file: Path, rng: random.Random) -> str:
    file.write_bytes(file.read_bytes() + rng.choice((b"\x00", b"}", b"\n{}", rng.randbytes(300))))
    return "bytes behind the end"


def _repeat_part(file: Path, rng: random.Random) -> str:
    content = file.read_bytes()
    place, length = rng.randrange(len(content) + 1), rng.choice((1, 16, 200))
    file.write_bytes(content[: place + length] + content[place:])
    return f"{length} bytes from {place} are there twice"


def _fill(file: Path, rng: random.Random) -> str:
    file.write_bytes(rng.randbytes(len(file.read_bytes())))
    return "random bytes"


def _zero(file: Path, rng: random.Random) -> str:
    file.write_bytes(bytes(len(file.read_bytes())))
    return "zeros, as after a power cut"


def _delete(file: Path, rng: random.Random) -> str:
    file.unlink()
    return "deleted"


def _make_folder(file: Path, rng: random.Random) -> str:
    file.unlink()
    file.mkdir()
    return "a folder"


def _dangle(file: Path, rng: random.Random) -> str:
    file.unlink()
    file.symlink_to(rng.choice(("nowhere", file.name)))
    return "a link to nowhere or to itself"


def _swap(file: Path, other: Path) -> str:
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return f"{file.name} and {other.name} swapped"


_KINDS = (
    *(_flip, _flip, _flip_near_the_start, _overwrite, _truncate, _truncate, _append, _repeat_part),
    *(_fill, _zero, _delete, _make_folder, _dangle),
)


# --- values of JSON -------------------------------------------------------------------------------


def _is_json(file: Path) -> bool:
    try:
        return isinstance(json.loads(file.read_bytes()), dict | list)
    except ValueError:
        return False


def change_value(root: Any, rng: random.Random) -> tuple[str, Any]:
    """Puts something absurd in the place of one value of `root`, on whatever level; what was done, and the new root."""
    value, parent, key, where = root, None, None, ""
    while isinstance(value, dict | list) and value and (parent is None or rng.random() < 0.8):
        parent = value
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        value, where = parent[key], f"{where}[{key!r}]"
    if parent is None:
        return "an absurd value", rng.choice(ABSURD)
    doing = rng.choice(("value", "value", "value", "value", "delete", "rename", "add"))
    if doing == "delete":
        del parent[key]
    elif doing == "rename" and isinstance(parent, dict):
        parent[_misspelt(str(key), rng)] = parent.pop(key)
    elif doing == "add" and isinstance(parent, dict):
        parent["surprise"] = rng.choice(ABSURD)
    else:
        doing, parent[key] = f"= {str(rng_value := rng.choice(ABSURD))[:40]}", rng_value
    return f"{where[-80:]} {doing}", root


def _misspelt(key: str, rng: random.Random) -> str:
    place = rng.randrange(len(key) + 1)
    return key[:place] + rng.choice("aeiou_0") + key[place + 1 :]


def dump(value: Any) -> str:
    """JSON text, in which raw pieces stand as they are."""
    raw: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, _Raw):
            raw.append(value)
            return f"@raw{len(raw) - 1}@"
        if isinstance(value, dict):
            return {key: marked(item) for key, item in value.items()}
        return [marked(item) for item in value] if isinstance(value, list) else value

    text = json.dumps(marked(value))
    for number, piece in enumerate(raw):
        text = text.replace(f'"@raw{number}@"', piece)
    return text


def _change_json(file: Path, rng: random.Random) -> str:
    done, root = change_value(json.loads(file.read_bytes()), rng)
    file.write_text(dump(root), encoding="utf-8", errors="surrogatepass")
    return done


def _repeat_key(file: Path, rng: random.Random) -> str:
    root = json.loads(file.read_bytes())
    if not isinstance(root, dict) or not root:
        return _change_json(file, rng)
    key = rng.choice(list(root))
    file.write_text(f"{dump(root)[:-1]}, {json.dumps(key)}: {dump(rng.choice(ABSURD))}}}")
    return f"{key!r} is there twice"


_JSON_KINDS = (*(_change_json,) * 9, _repeat_key)


def restore(intact: Path, folder: Path) -> None:
    """Makes the folder a copy of the intact one."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(intact, folder)
