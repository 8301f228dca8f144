"""Disks that refuse a save: what was there stays, and nothing is half there."""

import errno
import os

import jax
import numpy as np
import pytest
from tiny import TCA, random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax.calibration.profile import Profile


@pytest.fixture(scope="module")
def contexts():
    """Two contexts of the same programs, with other tokens."""
    lm = with_candidates(tiny_lm())
    return tuple(tca_jax.prefill(lm, random_prompt(seed, 100)) for seed in range(2))


def same(one, other) -> bool:
    return one.token_ids() == other.token_ids() and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one.rows), jax.tree.leaves(other.rows), strict=True)
    )


@pytest.mark.parametrize(("where", "number"), [("os.rename", errno.ENOSPC), ("pathlib.Path.mkdir", errno.EROFS)])
@pytest.mark.parametrize("kind", ["profile", "context"])
def test_a_failed_save_changes_nothing(where, number, kind, contexts, tmp_path, monkeypatch):
    old, new = contexts if kind == "context" else (Profile.uniform(TCA, 2, 2, rows) for rows in (5, 1))
    old.save(tmp_path / "f")

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        with pytest.raises(OSError, match=rf"cannot save a {kind}: {os.strerror(number)}: '{tmp_path}/f'") as raised:
            new.save(tmp_path / "f")
    assert raised.value.errno == number
    loaded = type(old).load(tmp_path / "f")
    assert same(loaded, old) if kind == "context" else loaded == old
    new.save(tmp_path / "f")
    assert [path.name for path in (tmp_path / "f").iterdir()] == [f"{kind}_1"]
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(OSError, match=rf"cannot save a {kind}: .*'{tmp_path}/mine'"):
        new.save(tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "mine"
