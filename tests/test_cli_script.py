"""The real console script: Ctrl-C at any moment, readers that go away, full disks, warnings."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tca_jax.cli import writes_compilation_cache

pytestmark = pytest.mark.usefixtures("in_work")
SCRIPT = Path(sys.executable).with_name("tca-jax")


def started(*command, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(command, **pipes, **options)


def interrupt(process) -> bytes:
    """Sends Ctrl-C's signal; the process must end with its code and one line. Returns the rest of its output."""
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"interrupted\n")
    return rest


def test_ctrl_c_ends_a_running_answer():
    with started(SCRIPT, "generate", "model", "--prompt=hi", "--max-new-tokens=4000") as process:
        assert process.stdout.read(10)  # it streams: the answer is far from complete
        assert len(interrupt(process)) < 3900


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads of a process are counted in /proc")
@pytest.mark.parametrize("seconds", [0, 0.1, 0.3, 0.7, 1.5, 2.5, 4])
def test_ctrl_c_ends_the_script_at_any_moment(seconds, tmp_path):
    """Imports, loading, tracing, compiling: without a compilation cache the answer is never there in this time."""
    args = ("generate", "recall-tiny", "--profile=shipped", "--prompt=hi", "--max-new-tokens=9000")
    with started(SCRIPT, *args, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)}) as process:
        tasks = Path(f"/proc/{process.pid}/task")
        while len(list(tasks.iterdir())) < 2:  # the interpreter has started, and the thread that waits for the signal
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(seconds)
        interrupt(process)


def test_ctrl_c_lets_a_compiled_program_be_written(tmp_path):
    """JAX's compilation cache is the one file that is not renamed into place; half an entry would never be mended."""
    from jax._src.lru_cache import LRUCache

    put = LRUCache.put.__code__
    assert writes_compilation_cache(put)
    slow_put = f"""
def {put.co_name}(file):
    file.write("first half, ")
    print("writing", flush=True)
    time.sleep(1)
    file.write("second half")
    file.flush()
"""
    program = f"""
import time
from tca_jax.cli import leave_on_ctrl_c
leave_on_ctrl_c()
functions = {{"time": time}}
exec(compile({slow_put!r}, {put.co_filename!r}, "exec"), functions)
with open("entry", "w") as file:
    functions[{put.co_name!r}](file)
    time.sleep(60)
"""
    with started(sys.executable, "-c", program, cwd=tmp_path) as process:
        assert process.stdout.readline() == b"writing\n"
        interrupt(process)
    assert (tmp_path / "entry").read_text() == "first half, second half"


def test_one_ctrl_c_can_be_spared():
    program = """
import time
from tca_jax.cli import leave_on_ctrl_c, spare_one_ctrl_c
leave_on_ctrl_c()
with spare_one_ctrl_c() as interrupted:
    print("ready", flush=True)
    while not interrupted():
        time.sleep(0.001)
    print("noted", flush=True)
    time.sleep(60)
"""
    with started(sys.executable, "-c", program) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"noted\n"
        interrupt(process)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_standard_output_is_one_line():
    with open("/dev/full", "w") as full:
        process = subprocess.run([SCRIPT, "profile", "show", "profile", "--json"], stdout=full, stderr=subprocess.PIPE)
    assert (process.returncode, process.stderr) == (2, b"error: standard output: No space left on device\n")


def test_a_closed_pipe_ends_the_script_quietly():
    with started(SCRIPT, "profile", "show", "profile", "--json") as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == b""
    assert process.returncode == 1
