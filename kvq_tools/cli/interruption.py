"""Leave on Ctrl-C within a second, whatever the process is doing, and without tearing it down. A
command that keeps what is complete treats SIGTERM as a press of it.

Python raises KeyboardInterrupt only when the main thread next runs Python code. That takes many
seconds while XLA compiles, and an exception in a callback from native code can be lost. Tearing an
interpreter down while XLA's compile threads run crashes. So a second thread reads signals as they
arrive. If the main thread has not left soon after a signal, that thread prints the line and ends
the process.
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
PATIENCE = 0.6  # seconds for the main thread to close its files and leave
# most seconds between the main thread's answer to a press and the other thread seeing it
SAME_PRESS = 0.3
RESTORED = "\r\x1b[K\x1b[?25h"  # clears a spinner's line and shows the cursor again


class _Presses:
    """The state of Ctrl-C. `advice` follows "interrupted" in the last line. `as_json` makes that
    line the object for stdout, as long as stdout waits for one."""

    def __init__(self) -> None:
        self.pressed = False
        self.begun = False
        self.signals: tuple[int, ...] = ()  # those that the other thread reads
        self.advice = ""
        self.as_json: Callable[[str], str] | None = None
        self.spared = 0
        self.caught = -1.0
        self._changed = threading.Condition()

    def answer(self) -> None:
        with self._changed:
            self.caught = time.monotonic()
            self._changed.notify_all()

    def answered(self, pressed: float) -> bool:
        """Wait until the main thread says that it dealt with a press read at this time. False if it
        does not."""
        with self._changed:
            return self._changed.wait_for(lambda: self.caught > pressed - SAME_PRESS, PATIENCE)


_presses = _Presses()


def watch() -> None:
    """Begin to watch for Ctrl-C, in a process that runs one command. If SIGINT is ignored, as in a
    script's background jobs, it stays ignored."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    _presses.signals = (signal.SIGINT,)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _press)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    sys.unraisablehook = _without_interrupts(sys.unraisablehook)
    threading.Thread(
        target=_leave_when_stuck, args=(reading,), name="kvq-interruption", daemon=True
    ).start()


def begin(*, terminates: bool = False) -> None:
    """Mark the start of the command. Before it modules are imported, nothing can be lost, and a
    press ends the process at once. If the command `terminates`, SIGTERM is a press from now on."""
    _presses.begun = True
    if terminates and _presses.signals:
        _presses.signals = (signal.SIGINT, signal.SIGTERM)
        signal.signal(signal.SIGTERM, _press)


def promise_json(as_json: Callable[[str], str] | None) -> None:
    """Say how an interruption becomes the one object of --json, or that it is printed (None)."""
    _presses.as_json = as_json


def json_promised() -> bool:
    """Return whether stdout still waits for the one object of --json."""
    return _presses.as_json is not None


def done() -> None:
    """Mark the end of the command. A press while the interpreter is torn down then has no
    effect."""
    for number in _presses.signals:
        signal.signal(number, signal.SIG_IGN)


def caught() -> None:
    """Say that a KeyboardInterrupt was dealt with and the command continues."""
    _presses.pressed = False
    _presses.answer()


@contextlib.contextmanager
def advised(advice: str) -> Iterator[None]:
    """Tell the user what to do next in the line that ends an interrupted command."""
    _presses.advice = advice
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(advice) from None
    finally:
        _presses.advice = ""


@contextlib.contextmanager
def spared() -> Iterator[None]:
    """Leave the first press to the caller's handler, however long that takes. Only the next one
    ends the process."""
    _presses.spared = 1
    try:
        yield
    finally:
        _presses.spared = 0


@contextlib.contextmanager
def noted(message: str = "") -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed. A first press has no other effect
    than the line `message`, a second one interrupts as usual. A signal that is ignored, or that has
    the system's handler, keeps it."""
    pressed = threading.Event()

    def press(*_: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()
        if message:
            _write_line(message)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread() or not handlers:
        yield pressed.is_set
        return
    for number in handlers:
        signal.signal(number, press)
    try:
        with spared():
            yield pressed.is_set
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def was_pressed() -> bool:
    """Return whether an exception may have been a KeyboardInterrupt that native code turned into
    another one."""
    return _presses.pressed


def line(advice: str = "") -> str:
    """Return the line that ends an interrupted command."""
    return f"interrupted: {advice}" if advice else "interrupted"


def leave(status: int = STATUS) -> NoReturn:
    """End the process without teardown, after flushing the output."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _press(*_: object) -> None:
    if not _presses.begun:
        _say_and_end()
    _presses.pressed = True
    raise KeyboardInterrupt


def _without_interrupts(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a hook that ignores a KeyboardInterrupt lost in a callback: the other thread ends the
    process."""

    def filtered(unraisable: Any) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            hook(unraisable)

    return filtered


def _leave_when_stuck(reading: int) -> None:
    while signals := os.read(reading, 1):
        if signals[0] not in _presses.signals:
            continue
        if _presses.spared:
            _presses.spared -= 1
        elif not _presses.answered(time.monotonic()):
            _say_and_end()


def _say_and_end() -> NoReturn:
    """End the process now. stdout is not flushed: the main thread may hold its lock in a write that
    waits for the reader of a pipe. An object that --json promised has room in an empty pipe."""
    text = line(_presses.advice)
    _write_line(text)
    if _presses.as_json is not None:
        with contextlib.suppress(OSError):
            os.write(1, f"{_presses.as_json(text)}\n".encode())
    os._exit(STATUS)


def _write_line(text: str) -> None:
    """Write a line to stderr past Python's stream, which the main thread may be writing to."""
    restored = RESTORED if os.isatty(2) else ""
    with contextlib.suppress(OSError):  # stderr may be closed
        os.write(2, f"{restored}kvq: {text}\n".encode())
