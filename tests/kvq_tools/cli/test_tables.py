"""Tables in terminals of 60, 80 and 120 columns: no line is too long, and no number is broken."""

import io
import re

import pytest
from rich.cells import cell_len

from kvq_tools.cli import tables

WIDTHS = (60, 80, 120)


@pytest.fixture(params=WIDTHS)
def terminal(request, monkeypatch):
    monkeypatch.setattr(tables, "terminal_width", lambda: request.param)
    return request.param


def assert_fits(text, width, cells):
    lines = text.splitlines()
    assert max(map(cell_len, lines)) <= width, (
        f"a line of {max(map(cell_len, lines))} columns in {width}:\n{text}"
    )
    for cell in cells:
        assert re.search(rf"(?<![\d.]){re.escape(cell)}(?![\d.])", text), (
            f"{cell!r} is broken in {width} columns:\n{text}"
        )


@pytest.mark.parametrize(
    "command", ["memory embedded --cache kivi --cache innerq:bits=4@0-1/2", "doctor embedded"]
)
def test_commands_fit_any_terminal(command, terminal, run, monkeypatch):
    seen = []
    print_table = tables.print_table

    def watched(title, rows, *texts, **named):
        seen.extend(
            str(cell)
            for row in rows
            for cell in row.values()
            if re.fullmatch(r"[\d.]+( [KMG]iB)?", str(cell))
        )
        print_table(title, rows, *texts, **named)

    for module in ("memory", "doctor"):
        monkeypatch.setattr(f"kvq_tools.cli.commands.{module}.print_table", watched, raising=False)
    code, out, _ = run(command)
    assert code == 0
    assert seen, "no table has a number"
    assert_fits(out, terminal, seen)


def test_a_terminal_that_says_it_has_no_columns_gets_the_usual_ones(monkeypatch):
    """A width of 0 would break lines forever."""
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert tables.terminal_width() >= 40


def test_numbers_are_aligned_right_and_what_a_row_lacks_is_blank(capsys):
    rows = [{"cache": "kivi", "size": 12345, "read by": "xla"}, {"cache": "x", "size": 6}]
    tables.print_table("sizes", rows, texts=("cache", "read by"))
    title, *_, first, second, _ = capsys.readouterr().out.splitlines()
    assert title == "sizes"
    assert first == "│ kivi  │ 12345 │ xla     │"
    assert second == "│ x     │     6 │         │"


def test_equal_neighbours_among_layers_are_one_row():
    layers = [{"layer": i, "bits": bits} for i, bits in enumerate((4, 2, 2, 4, 4, 4))]
    found = [(label, layer["bits"]) for label, layer in tables.layer_runs(layers, ("bits",))]
    assert found == [("0", 4), ("1-2", 2), ("3-5", 4)]
