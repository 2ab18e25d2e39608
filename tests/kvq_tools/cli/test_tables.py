"""Tables in terminals of 60, 80 and 120 columns: no line is too long, and no number is broken."""

from __future__ import annotations

import itertools
import re

import pytest
from rich.cells import cell_len

from kvq_tools.cli import tables
from kvq_tools.cli.commands import eval as eval_command

CACHES = (
    "dense",
    "kivi:bits=2,recent=128",
    "k=kivi:bits=4+v=innerq:bits=2+cache:recent=96",
    "innerq:bits=4@0-1/2,skip_layers=31",
)
COLUMNS = (
    "cache",
    "perplexity",
    "bits/byte",
    "KL",
    "top-1 agreement",
    "quantized tokens",
    "cache bytes",
    "ratio to bf16",
    "bits/element",
)
ROWS = [
    (name, "173.123", "1.0345", "0.04321", "98.76%", f"{i}00 of 1023", "1.23 GiB", "4.56", "3.05")
    for i, name in enumerate(CACHES)
]
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


def test_numbers_and_specs_stay_whole(terminal, capsys):
    tables.print_table(
        "embedded on passage.txt: 1023 of 2047 tokens", COLUMNS, ROWS, numeric=COLUMNS[1:]
    )
    text = capsys.readouterr().out
    assert_fits(text, terminal, [cell for row in ROWS for cell in row[1:]])
    for name in CACHES:
        for option in re.split(r"[,+]", name):
            assert option in text, f"{option!r} is broken in {terminal} columns:\n{text}"
    assert text.count("perplexity") == 1
    if terminal < 120:
        assert text.count("┏") > 1, "columns that do not fit stand in another table"


def test_the_check_sees_a_broken_number():
    with pytest.raises(AssertionError, match="is broken"):
        assert_fits("│ 173. │\n│ 123  │", 60, ["173.123"])
    with pytest.raises(AssertionError, match="a line of 61"):
        assert_fits("x" * 61, 60, [])


def result():
    """Return a result of `kvq eval --json` with numbers as wide as they get."""
    positions = [{"first": 256 * i, "last": 256 * i + 255, "tokens": 12345} for i in range(8)]
    by = {"nats": [12.3456] * 8, "kl": [1.23456] * 8, "flips": [1234] * 8}
    cache = {
        "perplexity": 1730.123,
        "bits_per_byte": 10.1234,
        "kl": 1.23456,
        "agreement": 0.9876,
        "quantized_tokens": 1888,
    }
    cache |= {
        "cache_bytes": 1234567890,
        "ratio": 14.56,
        "bits_per_element": 13.05,
        "resident_by_batch": [{"batch": batch, "bytes": batch * 1234567890} for batch in (1, 16)],
        "by_position": by,
    }
    return {
        "model": "embedded",
        "text": "passage.txt",
        "scored_tokens": 98760,
        "text_tokens": 123456,
        "capacity": 2048,
        "stride": 1024,
        "mode": "decode",
        "prompt": 128,
        "read_tokens": 2047,
        "dtype": "float32",
        "seconds": 12.3,
        "bf16_bytes": 1234567890,
        "positions": positions,
        "exact": {
            "perplexity": 1723.456,
            "bits_per_byte": 9.8765,
            "by_position": {"nats": [11.2345] * 8},
        },
        "caches": [{"name": name} | cache for name in CACHES],
    }


def test_eval_fits_any_terminal(terminal, capsys):
    eval_command._print(result())
    cells = [
        "1730.123",
        "10.1234",
        "1.23456",
        "98.76%",
        "1888 of 2047",
        "1.15 GiB",
        "14.56",
        "13.05",
        "12.3456",
        "1792-2047",
        "12345",
    ]
    assert_fits(capsys.readouterr().out, terminal, cells)


@pytest.mark.parametrize(
    "command",
    [
        ("memory", "embedded", "--cache", "kivi", "--cache", CACHES[3].split(",")[0]),
        ("doctor", "embedded"),
    ],
)
def test_commands_fit_any_terminal(command, terminal, run, monkeypatch):
    seen = []
    print_table = tables.print_table

    def watched(title, columns, rows, numeric=()):
        seen.extend(
            str(cell)
            for row in rows
            for cell in row
            if re.fullmatch(r"[\d.]+( [KMG]iB)?", str(cell))
        )
        print_table(title, columns, rows, numeric)

    for module in ("memory", "doctor"):
        monkeypatch.setattr(f"kvq_tools.cli.commands.{module}.print_table", watched, raising=False)
    code, out, _ = run(*command)
    assert code == 0
    assert seen, "no table has a number"
    assert_fits(out, terminal, seen)


@pytest.mark.parametrize(
    "text", ["a" * 50, "one two three 12345 four", "kivi:bits=2,recent=128", "9" * 40]
)
def test_no_break_is_between_digits(text):
    lines = tables._broken(text, 12).split("\n")
    assert "".join(lines).replace(" ", "") == text.replace(" ", ""), "nothing is lost"
    for first, second in itertools.pairwise(lines):
        assert not (first[-1:].isdigit() and second[:1].isdigit()), lines
