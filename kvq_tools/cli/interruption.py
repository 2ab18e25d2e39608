"""Leave on Ctrl-C within a second, whatever the process is doing, and without tearing it down.

Python raises KeyboardInterrupt when the main thread next runs Python code. While XLA compiles that
takes many seconds, and an exception raised in a callback from native code can be lost there.
Tearing an interpreter down beside XLA's compile threads crashes. So a second thread reads signals
as they arrive: where the main thread has not left soon after one, that thread prints the line and
ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

STATUS = 130  # 128 + SIGINT, as shells count
PATIENCE = 0.6  # seconds that the main thread has to close its files and leave
SAME_PRESS = (
    0.3  # seconds between the main thread's answer to a press and the other thread's reading of it
)
RESTORED = "\r\x1b[K\x1b[?25h"  # clears a spinner's line and shows the cursor that it hid


class _Presses:
    """What is known about Ctrl-C. `advice` follows "interrupted" in the last line."""

    def __init__(self) -> None:
        self.pressed = False
        self.begun = False
        self.advice = ""
        self.spared = 0
        self.caught = -1.0
        self._changed = threading.Condition()

    def answer(self) -> None:
        with self._changed:
            self.caught = time.monotonic()
            self._changed.notify_all()

    def answered(self, pressed: float) -> bool:
        """Wait for the main thread to say that it dealt with the press read at this time; False
        where it does not."""
        with self._changed:
            return self._changed.wait_for(lambda: self.caught > pressed - SAME_PRESS, PATIENCE)


_presses = _Presses()


def watch() -> None:
    """Begin to watch for Ctrl-C; for a process that is one command. Where SIGINT is ignored, as
    under nohup, it stays so."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGINT, _press)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    sys.unraisablehook = _told_of_others(sys.unraisablehook)
    threading.Thread(
        target=_leave_when_stuck, args=(reading,), name="kvq-interruption", daemon=True
    ).start()


def begin() -> None:
    """Say that the command begins. Before, modules are imported, nothing is at stake, and a press
    ends the process at once."""
    _presses.begun = True


def done() -> None:
    """Say that the command has done its work: a press while the interpreter is torn down changes
    nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def caught() -> None:
    """Say that a KeyboardInterrupt was dealt with and the command goes on."""
    _presses.pressed = False
    _presses.answer()


@contextlib.contextmanager
def advised(advice: str) -> Iterator[None]:
    """Add what the user can do now to the line that an interrupted command ends with."""
    _presses.advice = advice
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(advice) from None
    finally:
        _presses.advice = ""


@contextlib.contextmanager
def spared() -> Iterator[None]:
    """Leave the first press to the caller's own handler, however long that takes; only the next one
    ends the process."""
    _presses.spared = 1
    try:
        yield
    finally:
        _presses.spared = 0


def was_pressed() -> bool:
    """Return whether an exception may be what became of a KeyboardInterrupt on its way through
    native code."""
    return _presses.pressed


def line(advice: str = "") -> str:
    return f"kvq: {': '.join(part for part in ('interrupted', advice) if part)}"


def leave(status: int = STATUS) -> NoReturn:
    """End the process with what was printed and without teardown."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _press(*_: object) -> None:
    if not _presses.begun:
        _say_and_end()
    _presses.pressed = True
    raise KeyboardInterrupt


def _told_of_others(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a hook that says nothing of a KeyboardInterrupt lost in a callback: the other thread
    ends the process."""

    def told(unraisable: Any) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            hook(unraisable)

    return told


def _leave_when_stuck(reading: int) -> None:
    while signals := os.read(reading, 1):
        if signals[0] != signal.SIGINT:
            continue
        if _presses.spared:
            _presses.spared -= 1
        elif not _presses.answered(time.monotonic()):
            _say_and_end()


def _say_and_end() -> NoReturn:
    """End the process now. stdout is not flushed: the main thread may hold its lock, in a write
    that waits for a pipe's reader."""
    shown = RESTORED if os.isatty(2) else ""
    os.write(2, f"{shown}{line(_presses.advice)}\n".encode())
    os._exit(STATUS)
