"""The real console script: Ctrl-C at any moment, readers that go away, full disks, warnings."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import TCA, write_checkpoint

from tca_jax.calibration.profile import Profile
from tca_jax.cli import writes_compilation_cache

SCRIPT = Path(sys.executable).with_name("tca-jax")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a model, a text that is not UTF-8, and a profile."""
    folder = tmp_path_factory.mktemp("work")
    write_checkpoint(folder / "model")
    (folder / "latin1.txt").write_bytes("déjà vu".encode("latin-1"))
    Profile.uniform(TCA, 2, 2, 3).save(folder / "profile")
    return folder


@pytest.fixture(autouse=True)
def in_work(work, monkeypatch):
    monkeypatch.chdir(work)


def test_warnings_of_the_package_are_one_line_and_those_of_libraries_none():
    program = """
import warnings
from tca_jax.cli.app import show_own_warnings
show_own_warnings()
for module in ("tca_jax.calibration.run", "transformers.tokenization", "tca_jax_of_others"):
    warnings.warn_explicit(f"from {module}", UserWarning, "file.py", 1, module=module)
"""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=clean)
    assert (done.returncode, done.stderr) == (0, "warning: from tca_jax.calibration.run\n")


def script(*args, **environment):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen([SCRIPT, *args], **pipes, env=os.environ | environment)


def interrupt(process) -> bytes:
    """Sends Ctrl-C's signal; the process must end with its code and one line. Returns the rest of its output."""
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"interrupted\n")
    return rest


def test_ctrl_c_ends_a_running_answer_with_130_and_one_line():
    with script("generate", "model", "--prompt=hi", "--max-new-tokens=4000") as process:
        assert process.stdout.read(10)  # it streams: the answer is far from complete
        assert len(interrupt(process)) < 3900


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads of a process are counted in /proc")
@pytest.mark.parametrize("seconds", [0, 0.1, 0.3, 0.7, 1.5, 2.5, 4])
def test_ctrl_c_ends_the_script_with_130_and_one_line_whatever_it_does(seconds, tmp_path):
    """Imports, loading, tracing, compiling: without a compilation cache the answer is never there in this time."""
    args = ("generate", "recall-tiny", "--profile=shipped", "--prompt=hi", "--max-new-tokens=9000")
    with script(*args, XDG_CACHE_HOME=str(tmp_path)) as process:
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
    arguments = [sys.executable, "-c", program]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout.readline() == b"writing\n"
        interrupt(process)
    assert (tmp_path / "entry").read_text() == "first half, second half"


def test_one_ctrl_c_can_be_spared_and_the_next_one_ends_the_process():
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
    arguments = [sys.executable, "-c", program]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"noted\n"
        interrupt(process)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_behind_standard_output_is_one_line():
    with open("/dev/full", "w") as full:
        process = subprocess.run([SCRIPT, "profile", "show", "profile", "--json"], stdout=full, stderr=subprocess.PIPE)
    assert (process.returncode, process.stderr) == (2, b"error: standard output: No space left on device\n")


def test_a_reader_that_goes_away_ends_the_script_quietly():
    with script("profile", "show", "profile", "--json") as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == b""
    assert process.returncode == 1


def test_an_error_of_the_script_is_one_line_and_exit_code_2():
    with script("generate", "model", "--prompt-file=latin1.txt") as process:
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors.count(b"\n")) == (2, b"", 1)
    assert errors.startswith(b"error: --prompt-file latin1.txt is not UTF-8 text")
