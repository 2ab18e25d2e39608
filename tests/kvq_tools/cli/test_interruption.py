"""Ctrl-C in a real terminal ends the command within a second with one line and status 130, even
while XLA compiles."""

import os
import select
import signal
import struct
import subprocess
import sys
import time

import pytest

from kvq_tools.cli import interruption

pty = pytest.importorskip("pty", reason="pseudo-terminals are POSIX")
fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")

COMMAND = ("generate", "embedded", "--prompt", "Once upon", "--max-new-tokens", "1500")
DELAY = 0.6  # seconds after "compiling", while the command compiles
MAX_SECONDS = 1.5  # to leave on a free core: one second and a margin


# A new session has no controlling terminal, to which Ctrl-C would go, until its leader opens one. A
# process whose parent ignores Ctrl-C, as shells' background jobs do, would ignore it as well.
IN_THIS_TERMINAL = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.open(os.ttyname(0), os.O_RDWR)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """`kvq` in a pseudo-terminal. `text` is its output so far."""

    def __init__(self, arguments):
        self._file, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._process = (
            subprocess.Popen(  # not pty.fork: JAX, which this process runs, warns of forks
                [sys.executable, "-c", IN_THIS_TERMINAL, "-m", "kvq_tools", *arguments],
                stdin=side,
                stdout=side,
                stderr=side,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
            )
        )
        os.close(side)
        self.text = ""

    def read(self, seconds, until=None):
        """Read for some time, or until the text contains `until`. Return False if the command has
        ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and (until is None or until not in self.text):
            if select.select([self._file], [], [], 0.02)[0]:
                try:
                    self.text += os.read(self._file, 4096).decode(errors="replace")
                except OSError:  # the other side is closed
                    return False
        return True

    def press_ctrl_c(self):
        os.write(self._file, b"\x03")

    def status(self):
        """Return the exit code, negative for a signal. The command has closed its terminal, so it
        is about to end."""
        return self._process.wait()

    def end(self):
        """Kill a command that a failed test left running."""
        self._process.kill()
        self._process.wait()
        os.close(self._file)


def waiting() -> float:
    """Return how many times longer than its CPU time a process takes now because others run: 1 on a
    free core."""
    start, used = time.monotonic(), time.process_time()
    while time.process_time() - used < 0.3:
        pass
    return max(1.0, (time.monotonic() - start) / 0.3)


@pytest.fixture
def terminal():
    """terminal(*arguments) -> the Terminal in which they run."""
    opened = []
    yield lambda *arguments: opened.append(Terminal(arguments)) or opened[-1]
    for one in opened:
        one.end()


def test_ctrl_c_ends_a_compiling_command_within_a_second(terminal):
    shell = terminal(*COMMAND)
    assert shell.read(300, until="compiling"), f"it ended before it compiled:\n{shell.text}"
    assert "compiling" in shell.text
    assert shell.read(DELAY), f"it ended before Ctrl-C:\n{shell.text}"
    pressed = time.monotonic()
    shell.press_ctrl_c()
    left = not shell.read(30)
    seconds = time.monotonic() - pressed
    assert left, f"it went on after Ctrl-C:\n{shell.text}"
    status = shell.status()
    assert status == 130, f"it ended with {status} after Ctrl-C:\n{shell.text}"
    maximum = MAX_SECONDS * waiting()
    assert seconds < maximum, (
        f"it took {seconds:.1f} s to leave, of at most {maximum:.1f} beside what else runs"
    )
    assert shell.text.count("kvq: interrupted") == 1, shell.text
    assert "Traceback" not in shell.text, shell.text
    hidden, shown = shell.text.rfind("\x1b[?25l"), shell.text.rfind("\x1b[?25h")
    assert shown > hidden or hidden < 0, "the cursor stays hidden"


PRESSED = """
import os, signal
from kvq_tools.cli import interruption
signal.signal(signal.SIGINT, signal.default_int_handler)
interruption.watch()
os.kill(os.getpid(), signal.SIGINT)
"""


def test_ctrl_c_ends_a_command_whose_stderr_cannot_be_written():
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    with open(os.devnull) as only_read:
        done = subprocess.run(
            [sys.executable, "-c", PRESSED], stderr=only_read, env=environment, timeout=60
        )
    assert done.returncode == 130


TERMINATED = """
import os, signal, sys
from kvq_tools.cli import interruption
signal.signal(signal.SIGINT, getattr(signal, sys.argv[1]))
interruption.watch()
interruption.begin(terminates=True)
with interruption.noted("finishing") as pressed:
    os.kill(os.getpid(), signal.SIGTERM)
    print(pressed())
try:
    os.kill(os.getpid(), signal.SIGTERM)
except KeyboardInterrupt:
    interruption.caught()
    print("interrupted")
"""


@pytest.mark.parametrize("sigint", ["default_int_handler", "SIG_IGN"])
def test_sigterm_is_a_press_for_a_command_that_keeps_what_is_complete(sigint):
    done = subprocess.run(
        [sys.executable, "-c", TERMINATED, sigint],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("True\ninterrupted\n", "kvq: finishing\n")


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("ignored", [False, True])
def test_a_press_is_noted_unless_sigint_is_ignored(ignored):
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interruption.noted() as pressed:
        signal.raise_signal(signal.SIGINT)
        assert pressed() is not ignored


@pytest.mark.usefixtures("sigint")
def test_a_second_press_interrupts():
    with interruption.noted() as pressed:
        signal.raise_signal(signal.SIGINT)
        assert pressed()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
