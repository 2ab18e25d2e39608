"""Progress on stderr: one at a time, on one line of a terminal, and a line every few seconds of a
long prompt elsewhere."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest
from rich.console import Console
from tqdm import tqdm

from kvq_tools.cli import console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_on_stderr(monkeypatch) -> Terminal:
    """Put a terminal in the place of stderr. A fixture would do it before pytest's own capture."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def load_slowly():
    """Show the bar of `load_llama` as a slow disk makes it appear."""
    for _ in tqdm(range(20), desc="loading weights", leave=False, mininterval=0, disable=None):
        time.sleep(0.02)


def test_loading_stays_on_one_line_of_a_terminal(monkeypatch):
    terminal = terminal_on_stderr(monkeypatch)
    with console.loading("some/model"):
        load_slowly()
    shown = terminal.getvalue()
    assert "\n" not in shown
    assert "loading weights: 100%" in shown
    assert shown.startswith("kvq: loading some/model ...")
    assert shown.endswith("\r" + console.ERASED), "the line is left behind"


def test_two_libraries_would_flood_the_terminal(monkeypatch):
    terminal = terminal_on_stderr(monkeypatch)
    with Console(file=terminal, force_terminal=True).status("loading"):
        load_slowly()
    assert terminal.getvalue().count("\n") > 5, "the test above shows nothing"


def test_a_terminal_shows_the_seconds_so_far(monkeypatch):
    terminal = terminal_on_stderr(monkeypatch)
    with console.progress("compiling"):
        time.sleep(1.2)
    shown = terminal.getvalue()
    assert "\n" not in shown
    assert re.findall(r"compiling \.\.\. (\d\d:\d\d)", shown)[-1] == "00:01"


def test_a_pipe_gets_a_line_every_few_seconds_of_a_long_prompt(capsys, monkeypatch):
    monkeypatch.setattr(console, "PIPED_SECONDS", 0.1)
    with console.progress("reading the prompt", 640):
        time.sleep(0.35)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "kvq: reading the prompt, 640 tokens ..."
    assert len(lines) >= 4
    assert re.fullmatch(r"kvq: 640 tokens read in \d s, \d+ tokens/s", lines[-1])


def test_a_pipe_gets_one_line_about_a_short_prompt_and_about_other_work(capsys):
    with console.progress("reading the prompt", 6):
        pass
    with console.progress("compiling"), pytest.raises(ValueError, match="x"):
        raise ValueError("x")
    with console.loading("m\x1b[2J"):
        pass
    assert capsys.readouterr().err.splitlines() == [
        "kvq: reading the prompt, 6 tokens ...",
        "kvq: compiling ...",
        "kvq: loading m\\x1b[2J ...",
    ]


def test_an_error_ends_the_line_and_says_no_speed(capsys, monkeypatch):
    monkeypatch.setattr(console, "PIPED_SECONDS", 0)
    with pytest.raises(ValueError, match="x"), console.progress("reading the prompt", 6):
        raise ValueError("x")
    assert "tokens/s" not in capsys.readouterr().err
