"""When a long run ends before it is through: its time is up, or the process is told to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

_TOLD_BY = (signal.SIGINT, signal.SIGTERM)


class Ending:
    """Says whether a run is to end, and why.

    Args:
        seconds: That it may take, from now on; None for any time.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._begin, self._seconds = time.monotonic(), seconds
        self.signal: signal.Signals | None = None

    @property
    def elapsed(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._begin

    def time_is_up(self, share: float = 1.0) -> bool:
        """Whether this share of the time has gone."""
        return self._seconds is not None and self.elapsed >= share * self._seconds

    @property
    def reason(self) -> str:
        """Why the run is to end; "" as long as it is not."""
        if self.signal is not None:
            return f"it was interrupted by {self.signal.name}"
        return "its time was up" if self.time_is_up() else ""

    @contextlib.contextmanager
    def told_by_signals(self) -> Iterator[None]:
        """Within, Ctrl-C and SIGTERM end the run and not the process; the second one does what it did before.

        In threads other than the main one nothing changes, for these hear no signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.getsignal(number) for number in _TOLD_BY}
        heard = [number for number in _TOLD_BY if handlers[number] is not signal.SIG_IGN]
        wakeup = signal.set_wakeup_fd(-1)  # the command line leaves at once when it is told of Ctrl-C there

        def restore() -> None:
            for number in heard:
                signal.signal(number, handlers[number])
            signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

        def note(number: int, frame: FrameType | None) -> None:
            self.signal = signal.Signals(number)
            restore()

        for number in heard:
            signal.signal(number, note)
        try:
            yield
        finally:
            restore()
