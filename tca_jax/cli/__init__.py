"""The `tca-jax` command line: its entry point, which loads nothing before Ctrl-C is safe."""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import CodeType

_LONGEST_WRITE = 10.0  # seconds; a disk that takes longer has gone
_spares_one = threading.Event()  # the next Ctrl-C is noted, and ends nothing


def main() -> None:
    leave_on_ctrl_c()
    from tca_jax.cli.app import run

    run()


def leave_on_ctrl_c() -> None:
    """Makes Ctrl-C end the process at once, with one line on standard error and exit code 130."""
    # Python handles signals between two instructions of the main thread, which may sit in the compiler for minutes, but
    # writes to a file descriptor at once, where a thread waits. Complete files are renamed into place: nothing is lost.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return  # a shell's background job, which Ctrl-C is not meant for
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda number, frame: None)  # the main thread has nothing to do
    threading.Thread(target=_leave_when_told, args=(told,), name="ctrl-c", daemon=True).start()


@contextlib.contextmanager
def spare_one_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Only notes the first Ctrl-C, which the yielded function reports. The next one ends the process."""
    _spares_one.set()
    try:
        yield lambda: not _spares_one.is_set()
    finally:
        _spares_one.clear()


def _leave_when_told(told: int) -> None:
    while True:
        if signal.SIGINT in os.read(told, 1):  # a program may handle other signals, which are told of here too
            if not _spares_one.is_set():
                break
            _spares_one.clear()
    shown_again = "\x1b[?25h\n" if os.isatty(2) else ""  # the cursor, which a progress bar hides
    os.write(2, f"{shown_again}interrupted\n".encode())
    give_up = time.monotonic() + _LONGEST_WRITE
    while _compilation_cache_is_written() and time.monotonic() < give_up:
        time.sleep(0.001)
    os._exit(130)


def _compilation_cache_is_written() -> bool:
    """Whether a thread is writing a compiled program: JAX does so in place, and half of one would stay for ever."""
    stacks = (traceback.walk_stack(frame) for frame in sys._current_frames().values())
    return any(writes_compilation_cache(frame.f_code) for stack in stacks for frame, _ in stack)


def writes_compilation_cache(code: CodeType) -> bool:
    """Whether this is the function of JAX that writes the file of a compiled program."""
    return code.co_name == "put" and os.path.basename(code.co_filename) == "lru_cache.py"
