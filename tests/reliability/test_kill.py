"""SIGKILL while evaluating and saving, and disks that refuse: finished work stays, nothing is half there."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from tiny import TCA, random_prompt, tiny_lm, with_candidates, write_checkpoint

import tca_jax
from tca_jax.calibration.profile import Profile
from tca_jax.lab.evaluation import Results

KILLS = int(os.environ.get("TCA_KILLS", "3"))
ENVIRONMENT = {"PATH": "", "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def measured(record):
    """A result without times."""
    return {name: value for name, value in record.items() if name != "finished" and not name.endswith("seconds")}


@pytest.mark.slow
def test_a_killed_evaluation_goes_on(tmp_path):
    model, out = write_checkpoint(tmp_path / "model"), tmp_path / "out"
    (tmp_path / "text.txt").write_text("It was a dark night, and 42 dogs ran. " * 8)
    args = ["eval", model, "--methods=full", "--tasks=loss", "--lengths=64,128", "--samples=1"]
    command = [sys.executable, "-c", "from tca_jax.cli import main; main()", *args, f"--text={tmp_path / 'text.txt'}"]
    environment = {**ENVIRONMENT, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    child = subprocess.Popen([*map(str, command), f"--out={out}"], env=environment, stderr=subprocess.DEVNULL)
    while not list(out.glob("results/*/[!.]*.json")) and child.poll() is None:
        time.sleep(0.002)
    child.kill()
    child.wait()
    finished = Results(out).read_all()
    assert finished
    for folder in (out, tmp_path / "whole"):
        subprocess.run([*map(str, command), f"--out={folder}"], env=environment, check=True, capture_output=True)
    results, whole = (Results(folder).read_all() for folder in (out, tmp_path / "whole"))
    assert all(record in results for record in finished)  # with its times: it was not run again
    assert sorted(map(json.dumps, map(measured, results))) == sorted(map(json.dumps, map(measured, whole)))


@pytest.fixture(scope="module")
def contexts():
    """Two contexts of the same programs, with other tokens."""
    lm = with_candidates(tiny_lm(), [[0, 6], [TCA.num_candidates, 3]])
    return tuple(tca_jax.prefill(lm, random_prompt(seed, 100)) for seed in range(2))


def same(one, other) -> bool:
    return one.token_ids() == other.token_ids() and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one.cache), jax.tree.leaves(other.cache), strict=True)
    )


SAVER = """
import sys
import tca_jax
contexts = [tca_jax.Context.load(folder) for folder in sys.argv[2:]]
print("ready", flush=True)
while True:
    for context in contexts:
        context.save(sys.argv[1])
"""


@pytest.mark.slow
def test_a_killed_save_leaves_a_context(contexts, tmp_path):
    folders = [tmp_path / f"own{i}" for i in range(2)]
    for context, folder in zip(contexts, folders, strict=True):
        context.save(folder)
    rng = np.random.default_rng(0)
    for _ in range(KILLS):
        contexts[0].save(tmp_path / "c")
        arguments = [sys.executable, "-c", SAVER, str(tmp_path / "c"), *map(str, folders)]
        with subprocess.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            assert child.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0, 0.5))
            child.send_signal(signal.SIGKILL)
        loaded = tca_jax.Context.load(tmp_path / "c")
        assert any(same(loaded, context) for context in contexts)
    contexts[1].save(tmp_path / "c")  # over what a killed save has left
    assert same(tca_jax.Context.load(tmp_path / "c"), contexts[1])
    assert len(list((tmp_path / "c").iterdir())) == 1


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
