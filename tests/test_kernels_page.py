"""docs/kernels.md: its tables hold the counts of the committed results."""

import json
import pathlib

import pytest

from benchmarks.machine_code.attentions import ATTENTIONS
from benchmarks.machine_code.launches import LaunchReport
from benchmarks.machine_code.report import Instructions
from benchmarks.machine_code.routes import COMPARED, compared
from benchmarks.markdown import table

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGE = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
FORMATS = {  # the page's name of a cache -> the name of its kernel in the results
    "`innerq:bits=2`": "innerq, 3-bit hybrid",
    "`innerq:bits=3`": "innerq, 4-bit hybrid",
    "`innerq:bits=2,mode=asym`": "innerq, 2-bit asym",
    "`innerq:bits=1,mode=sym`": "innerq, 2-bit sym",
    "`kivi:bits=2`": "kivi, 2-bit",
    "`kivi:bits=3`": "kivi, 3-bit",
    "`kivi:bits=4`": "kivi, 4-bit",
    "`kivi:bits=4,pre_rope=true`": "kivi, 4-bit, before RoPE",
    "tables of 4 bits, keys after RoPE": "nuq4, after RoPE",
    "tables of 3 bits": "nuq3, after RoPE",
    "tables of 2 bits": "nuq2, after RoPE",
    "3 bits and 1 % of outliers, before RoPE": "nuq3-1%, before RoPE",
    "polar keys of 4 + 4 bits, values in full precision": "polar 4+4, groups of 128, exact values",
    "`waterfill:bits=2.5`": "waterfill, 2.5 bits",
    "`waterfill:bits=4`": "waterfill, 4 bits",
    "`dense`": "dense, bf16",
}


def counts() -> dict[str, dict]:
    files = ("instructions", "instructions_tables")
    rows = [r for f in files for r in json.loads((RESULTS / f"{f}.json").read_text())["rows"]]
    return {row["name"]: row for row in rows if row["target"] == "h200"}


def formats_table() -> list[str]:
    rows, lines = counts(), []
    for cache, kernel in FORMATS.items():
        cells = [cache]
        for arithmetic in ("asm", "jnp"):
            row = rows.get(f"{kernel}, H 128, {arithmetic}")
            if arithmetic == "asm":
                assert row, kernel
                cells += [f"{row['stored_bits']:.3g}", f"{row['derived']['budget']:.2f}"]
            cells += (
                [
                    f"{row['derived']['instructions_per_element']:.2f}",
                    f"{row['derived']['share']:.0%}".replace("%", " %"),
                ]
                if row
                else ["", ""]
            )
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return lines


def launches_table() -> list[str]:
    rows = LaunchReport.read(RESULTS / "launches_jax_0_10.json").rows
    at = {(row.spec, row.tokens): row for row in rows if row.batch == 16}
    return [
        f"| `{spec}` | {at[spec, 32768].beside} | {at[spec, 32768].limit_us:.1f} |"
        f" {at[spec, 32768].over_limit:.2f} | {at[spec, 4096].limit_us:.1f} |"
        f" {at[spec, 4096].over_limit:.2f} |"
        for spec in dict.fromkeys(spec for spec, _ in at)
    ]


@pytest.mark.parametrize("table", [formats_table, launches_table])
def test_a_table_is_that_of_the_results(table):
    wanted = "\n".join(table())
    assert wanted in PAGE, f"the table of docs/kernels.md is\n\n{wanted}"


def test_the_page_compares_both_routes_as_they_were_counted():
    """Its table has a line for every kernel that Mosaic GPU has, and no other."""
    both = Instructions.read(RESULTS / "instructions_routes.json")
    other = Instructions.read(RESULTS / "instructions_routes_jax_0_11.json")
    section = PAGE.partition("## Two routes to a GPU")[2]
    header = [cell.format(version=other.jax_version) for cell in COMPARED]
    wanted = table(header, compared(both.rows, other.rows))
    assert wanted.count("\n") == 1 + len(ATTENTIONS), "a kernel was not counted"
    assert wanted in section, wanted
