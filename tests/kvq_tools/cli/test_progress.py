"""Progress on stderr: one at a time, on one line of a terminal, and a line every few seconds of a
long prompt elsewhere."""

import io
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tqdm import tqdm

from cpu_kernels.exact_attention import exact_attention
from cpu_kernels.library import prompts_attended, unavailable
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


def test_the_share_that_is_read_is_shown_with_its_speed_in_a_pipe(capsys, monkeypatch):
    monkeypatch.setattr(console, "PIPED_SECONDS", 0.1)
    shares = iter([0.0, 0.25, 0.5, 2.0, *[1.0] * 9])
    with console.progress("reading the prompt", 640, lambda: next(shares)):
        time.sleep(0.55)
    lines = capsys.readouterr().err.splitlines()
    assert "%" not in lines[1], "a share of 0 may be an unknown one"
    assert re.fullmatch(
        r"kvq: reading the prompt, 640 tokens ... 25%, \d+ tokens/s ... 0 s", lines[2]
    )
    assert " 50%" in lines[3]
    assert " 100%" in lines[4]


def test_a_pipe_gets_a_line_every_minute_of_a_long_loop(capsys, monkeypatch):
    monkeypatch.setattr(console, "PIPED_BAR_SECONDS", 0.1)
    for seconds in console.bar([0, 0.15, 0, 0.15, 0], "evaluating"):
        time.sleep(seconds)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "kvq: evaluating, 5 ..."
    assert {"kvq: evaluating: 2/5 ...", "kvq: evaluating: 4/5 ..."} <= set(lines)


@pytest.mark.skipif(unavailable() is not None, reason="the CPU kernels are not compiled")
def test_the_kernel_counts_layers_of_prompts_and_not_their_older_bodies():
    rows, counts = jnp.ones((1, 1, 4, 8)), [prompts_attended()]
    for old in (0, 2, 4):
        reach, new = jnp.full((1, old), 4), jnp.full((1, 4), 4 - old)
        arrays = rows, rows, rows, reach, new, jnp.full(1, 4)
        jax.block_until_ready(exact_attention(*arrays, scale=1.0))
        counts.append(prompts_attended())
    assert np.diff(counts).tolist() == [1, 1, 0], "the last call has no new tokens"
