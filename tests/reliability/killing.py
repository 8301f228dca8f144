"""Programs that are killed (SIGKILL) at chosen moments: after so many seconds, or at their n-th change to the disk."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

#: Kills at random times of each kind of program; TCA_KILLS=50 runs more.
RANDOM_KILLS = int(os.environ.get("TCA_KILLS", "1"))

# Imports once and forks a child for every kill. A child works on a copy of the folder `base`. Python's audit events
# tell of changes to the file system; what native code writes lies between two of them, and times hit that.
_SERVER = """
import json, os, random, shutil, signal, sys, time
import jax, orbax.checkpoint, transformers
import tca_jax.calibration.run, tca_jax.cli.app, tca_jax.lab.evaluation, tca_jax.loading

base, code, seed, times, changes_to_kill_at, goes_on = json.loads(sys.argv[1])

def changes(event, args):
    if event == "open":
        return isinstance(args[1], str) and args[1][0] in "wax" or args[2] & (os.O_WRONLY | os.O_RDWR) > 0
    return event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate")

def start(target, change=None, folder=base):
    shutil.copytree(folder, target)
    child = os.fork()
    if child:
        return child
    os.dup2(os.open(target + ".log", os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    seen = 0
    def hook(event, args):
        nonlocal seen
        if changes(event, args) and any(target in str(a) for a in args):
            seen += 1
            if seen == change:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    try:
        exec(code, {"__name__": "__main__", "target": target})
        os._exit(0)
    except SystemExit as left:
        os._exit(left.code or 0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)

def ended(child):
    status = os.waitpid(child, 0)[1]
    return -1 if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

def tell(target, when, child):
    print(json.dumps([target, when, ended(child)]), flush=True)
    if goes_on and when != "to its end":
        print(json.dumps([target + "_on", "gone on", ended(start(target + "_on", folder=target))]), flush=True)

begin = time.perf_counter()
tell(f"{base}_whole", "to its end", start(f"{base}_whole"))
whole = time.perf_counter() - begin
rng = random.Random(seed)
for i in range(times):
    after = whole * rng.random()
    child = start(f"{base}_time{i}")
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    tell(f"{base}_time{i}", f"{after:.2f} s of {whole:.2f}", child)
for change in changes_to_kill_at:
    tell(f"{base}_at{change}", f"change {change}", start(f"{base}_at{change}", change))
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """A program that worked on a copy of a folder.

    Attributes:
        folder: The copy.
        when: When it was killed.
        status: What it exited with; -1 where it was killed.
        log: What it printed.
    """

    folder: Path
    when: str
    status: int
    log: str


def run_killed(
    base: Path, code: str, *, times: int, changes: list[int], cache: Path, seed: int = 0, goes_on: bool = False
) -> list[Run]:
    """Runs a program to its end, and then again and again on other copies, with a kill in each.

    Args:
        base: What is copied.
        code: Python, which finds the copy's path in `target`.
        times: Kills at random moments.
        changes: Numbers of the changes to the copy, from 1, at which it is killed.
        cache: Folder of JAX's compilation cache, which all runs share, those that are killed while they write it too.
        seed: Of the moments.
        goes_on: Whether after each kill it runs once more, to its end, on a copy of what the kill has left; the runs
            that are returned then alternate, behind the first.
    """
    environment = {
        "PATH": "",
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiling is most of what takes time
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    task = json.dumps([str(base), code, seed, times, changes, goes_on])
    done = subprocess.run([sys.executable, "-c", _SERVER, task], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [Run(Path(f), when, status, Path(f"{f}.log").read_text()) for f, when, status in lines]


def command_line(*arguments: str) -> str:
    """Code of `tca-jax` with these arguments, in which {target} is the copy."""
    return f"""
import sys
sys.argv = ["tca-jax", *(each.replace("{{target}}", target) for each in {list(arguments)!r})]
from tca_jax.cli.app import run
run()
"""


def some_changes(most: int) -> list[int]:
    """Numbers of changes to kill at, from 1 to `most`: as many as there are kills at random times."""
    return sorted(random.Random(0).sample(range(1, most + 1), min(most, RANDOM_KILLS)))
