"""The `tca-jax` command line: its entry point, which loads nothing before Ctrl-C is safe."""

import os
import signal
import threading


def main() -> None:
    """Entry point of the console script."""
    leave_on_ctrl_c()
    from tca_jax.cli.app import run

    run()


def leave_on_ctrl_c() -> None:
    """Makes Ctrl-C end the process at once, with one line on standard error and exit code 130.

    Python runs a signal's handler between two instructions of the main thread, which may sit in the compiler for
    minutes. Its C part however tells a file descriptor at once, and a thread waits there. Files are renamed into place
    when they are whole, so leaving without a word to the rest of the program loses nothing.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return  # a shell's background job, which Ctrl-C is not meant for
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda number, frame: None)  # the main thread has nothing to do
    threading.Thread(target=_leave_when_told, args=(told,), name="ctrl-c", daemon=True).start()


def _leave_when_told(told: int) -> None:
    while signal.SIGINT not in os.read(told, 1):  # a program may handle other signals, which are told of here too
        pass
    shown_again = "\x1b[?25h\n" if os.isatty(2) else ""  # the cursor, which a progress bar hides
    os.write(2, f"{shown_again}interrupted\n".encode())
    os._exit(130)
