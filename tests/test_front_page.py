"""What a visitor sees first shows what it is for: the README's examples quantize tokens, and its
picture and speeds are those of committed results."""

import itertools
import json
import pathlib
import re
import shlex
import statistics
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

import kvq_jax as kvq
from benchmarks import front_picture, front_speeds
from benchmarks.cpu.timing import CpuReport
from benchmarks.protocol import front_page
from benchmarks.protocol.report import ProtocolReport
from kvq_models import EMBEDDED
from kvq_models.llama.checkpoint import open_checkpoint, read_config
from kvq_tools.cli import main, text_input
from kvq_tools.cli.main import build_parser
from kvq_tools.cli.options import calibrate, generate
from tests.test_readme import README

ROOT = pathlib.Path(__file__).parents[1]
FLAT = " ".join(README.split())
COMMANDS = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")


def generated(text: str) -> list[str]:
    """Return the lines that generate from a prompt of their own on the embedded model."""
    lines = re.findall(r"kvq (generate embedded .*--prompt .*)", text.replace("\\\n", " "))
    assert lines, "no example generates"
    return lines


HELP = (main.EPILOG, generate.EPILOG, calibrate.EPILOG)
PAGES = (README, COMMANDS, *HELP)


@pytest.mark.parametrize("line", [line for page in PAGES for line in generated(page)])
def test_generated_text_is_long_enough_to_be_quantized(line: str):
    arguments = shlex.split(line, comments=True)
    options = build_parser(arguments[0]).parse_args(arguments)
    tokenizer = open_checkpoint(EMBEDDED, "tokenizer").tokenizer()
    tokens = len(text_input.encode(tokenizer, options.prompt)) + options.max_new_tokens
    cache = kvq.cache.layout(options.cache, read_config(EMBEDDED), 1, tokens)
    assert kvq.size.quantized_tokens(cache, tokens) > tokens / 2
    assert options.temperature, "a small model repeats itself if it is greedy"


@pytest.fixture(scope="module")
def report() -> ProtocolReport:
    report = front_page.report_for_readme()
    assert report, "the results lack a row of the README's table"
    return report


def test_readme_has_a_column_of_another_model(report: ProtocolReport):
    other = front_page.other_report()
    assert other
    assert other.model != report.model
    reading = front_page.most_measured(other)
    lines = front_page.section(report, "", other).splitlines()
    cells = {
        line.split("|")[1].strip(" `*†"): line.split("|")[-2].strip()
        for line in lines
        if "|" in line
    }
    for row in other.rows:
        if row.reading == reading and row.cache in cells:
            assert cells[row.cache].startswith(f"{other.kl(row).value:#.2g} ["), row.cache
    measured = {row.cache for row in other.rows if row.reading == reading}
    assert cells.keys() & measured
    missing = cells.keys() - measured - {"cache", "---"}
    assert all(cells[cache] == "" for cache in missing), "a cache without a row has a number"


def test_the_pictures_are_drawn_from_the_committed_results():
    for file in front_page.FILE, front_page.OTHER_FILE:
        drawn = front_page.picture(ProtocolReport.read(file))
        assert front_page.picture_of(file).read_text(encoding="utf-8") == drawn, (
            f"python -m benchmarks.results_page draws it from {file.name}"
        )
    assert "](docs/front.svg)" in README


def test_the_picture_names_the_caches_of_the_front_with_their_intervals(report: ProtocolReport):
    shown = front_page.picture(report)
    drawn = "".join(ElementTree.fromstring(shown).itertext())
    every = front_page.points(report, front_page.most_measured(report))
    inside = [p for p in every if p.kl < front_picture.KL[1]]
    best = front_picture.front(inside)
    assert 3 <= len(best) < len(inside)
    for point in inside:
        better = [p for p in inside if p.gib <= point.gib and p.kl <= point.kl]
        assert (better == [point]) == (point in best), point
        assert f"<title>{point.name}</title>" in shown
        assert point.interval.low <= point.kl <= point.interval.high
    for point in best:
        assert point.name in drawn
    names = re.findall(r'<text [^>]*x="([^"]*)"[^>]*>(?=[a-z0-9_]*:)', shown)
    assert len(names) >= len(best)
    assert all(float(x) >= front_picture.LEFT for x in names), (
        "a name is on the numbers of the axis"
    )


def _speeds() -> dict[str, dict[str, str]]:
    """Return the cells of the README's table of speeds, by cache and column."""
    lines = README.partition(front_speeds.BEGIN)[2].strip().splitlines()
    head, _, *rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    columns, *shown = (
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in (head, *rows)
    )
    return {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in shown}


def _samples(file: pathlib.Path, key: str, **of_shape: int) -> dict[str, list[float]]:
    """Return the times in a file's rows of one shape, in ms, by the row's `key`."""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return {
        row[key] + row.get("arithmetic", ""): row["samples_ms"]
        for row in rows
        if of_shape.items() <= row["shape"].items()
    }


@pytest.mark.parametrize(
    ("file", "tokens", "column"),
    [
        (front_speeds.STEP, 6144, "step at 6K, ms"),
        (front_speeds.SHORT_AND_LONG, 1024, "at 1K, ms"),
        (front_speeds.SHORT_AND_LONG, 16384, "at 16K, ms"),
    ],
)
def test_a_step_in_the_readme_is_that_of_a_committed_result(
    file: pathlib.Path, tokens: int, column: str
):
    report = CpuReport.read(file)
    measured = {
        row.implementation: report.cycle(row).step(row.samples_ms)
        for row in report.rows
        if row.shape.tokens == tokens
    }
    shown = {cache: row[column] for cache, row in _speeds().items() if row[column]}
    assert {"dense", "kivi:bits=2", "kivi:bits=4"} <= shown.keys()
    for cache, cell in shown.items():
        assert cell == f"{measured[cache]:.1f}", cache
    left_out = any(report.cycle(row).left_out for row in report.rows)
    assert ("steps that quantize a block (one in 32) left out" in FLAT) >= left_out


def test_the_sizes_of_caches_in_the_readme_are_those_of_the_committed_result():
    rows = json.loads(front_speeds.STEP.read_text(encoding="utf-8"))["rows"]
    measured = {row["implementation"]: f"{row['cache_bytes'] / 2**20:.0f}" for row in rows}
    shown = {cache: row["cache at 6K, MiB"] for cache, row in _speeds().items()}
    assert [shown.pop(way) for way in front_speeds.LLAMA_CPP] == ["", ""]
    assert shown == {cache: measured[cache] for cache in shown}


def test_attention_on_a_gpu_in_the_readme_is_that_of_the_committed_result():
    measured = _samples(front_speeds.GPU, "candidate", batch=16, tokens=32768)
    measured["densemosaic"] = measured["cuDNN bf16"]
    shown = {cache: row["H200, us"] for cache, row in _speeds().items() if row["H200, us"]}
    assert len(shown) == 4
    said = re.search(r"`(waterfill:\S*)`, which has the same basis of keys, takes (\d+) us", FLAT)
    assert said
    shown[said[1]] = said[2]
    for cache, cell in shown.items():
        samples = measured[f"{cache}mosaic"]
        assert cell == f"{1e3 * statistics.median(samples):.0f}", cache


def test_a_request_in_the_readme_is_that_of_the_committed_result():
    report = json.loads(front_speeds.REQUEST.read_text(encoding="utf-8"))

    def of_a_block(row: dict[str, Any]) -> float:
        """Return the mean time of the last 32 tokens."""
        tokens = report["steps"] // len(row["samples_ms"])
        return statistics.fmean(row["samples_ms"][-32 // tokens :])

    cell = {"model": "smollm2", "prompt": 4096, "cores": 1}
    rows = [row for row in report["rows"] if cell.items() <= row.items() and row["samples_ms"]]
    ways = {row["way"]: row for row in rows if row["system"] == "kvq"}
    ways |= {f"llama.cpp, {row['way']}": row for row in rows if row["system"] == "llama.cpp"}
    shown = {cache: row for cache, row in _speeds().items() if row["peak, GB"]}
    assert shown.keys() == {"dense", "kivi:bits=4", *front_speeds.LLAMA_CPP}
    for cache, cells in shown.items():
        row = ways[cache]
        assert cells["first token, s"] == f"{row['first_ms'] / 1e3:.1f}", cache
        assert cells["later ones, ms"] == f"{of_a_block(row):.1f}", cache
        assert cells["peak, GB"] == f"{row['peak_bytes'] / 1e9:.1f}", cache
