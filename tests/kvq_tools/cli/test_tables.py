"""Tables in terminals of 60, 80 and 120 columns: no line is too long, and no number is broken."""

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
    "command",
    ["memory embedded --cache kivi --cache innerq:bits=4@0-1/2", "doctor embedded"],
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
