"""What a visitor sees first shows what it is for: the README's examples quantize tokens, and its
picture and speeds are those of committed results."""

import pathlib
import re
import shlex
import xml.etree.ElementTree as ElementTree

import pytest

import kvq_jax as kvq
from benchmarks import front_picture
from benchmarks.cpu.request.report import RequestReport
from benchmarks.cpu.timing import CpuReport
from benchmarks.gpu.report import GpuReport
from benchmarks.protocol import front_page
from benchmarks.protocol.report import ProtocolReport
from benchmarks.report_file import RESULTS
from kvq_models import EMBEDDED
from kvq_models.llama.checkpoint import open_checkpoint, read_config
from kvq_tools.cli import main, text_input
from kvq_tools.cli.main import build_parser
from kvq_tools.cli.options import calibrate, generate
from tests.test_readme import README

ROOT = pathlib.Path(__file__).parents[1]
COMMANDS = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
SPEED = "decode_step_6k_smollm2_cpu"


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


def test_the_speed_is_that_of_the_committed_results():
    report = CpuReport.read(RESULTS / f"{SPEED}.json")
    rows = {row.implementation: row for row in report.rows}
    said = " ".join(README.split())
    for cache in ("kivi:bits=2", "kivi:bits=4"):
        row = rows[cache]
        wanted = f"{row.ratio:.2f} of dense's time and {row.cache_bytes / 2**20:.0f} MiB"
        assert f"through `{cache}` takes {wanted}" in said, wanted
    pairs, rotated = (
        f"{rows[cache].ratio:.2f}"
        for cache in ("waterfill:bits=2.5", "waterfill:bits=2.25,preset=rotated")
    )
    slower = f"`waterfill` takes {pairs}, with `preset=rotated` {rotated}"
    assert slower in said, slower
    dense = f"{rows['dense'].cache_bytes / 2**20:.0f} MiB in float32"
    assert dense in said, dense
    assert f"results/{SPEED}.md" in README
    assert {row.shape.tokens for row in report.rows} == {6144}


def test_the_times_of_a_gpu_are_those_of_the_committed_results():
    report = GpuReport.read(RESULTS / "kernels_h200.json")
    times = {
        (row.candidate, row.arithmetic): f"{1e3 * row.median_ms:.0f}"
        for row in report.rows
        if row.section == "attention" and (row.shape.batch, row.shape.tokens) == (16, 32768)
    }
    said = " ".join(README.split())
    kivi, cudnn = times["kivi:bits=4", "mosaic"], times["cuDNN bf16", ""]
    eigen = times["waterfill:bits=2.5,key_basis=eigen", "mosaic"]
    assert f"16 x 32K tokens take `kivi:bits=4` [{kivi} us]" in said, kivi
    assert f"cuDNN in bf16 {cudnn}, `waterfill` in an eigenbasis {eigen}." in said, (cudnn, eigen)


def test_the_request_is_that_of_the_committed_results():
    report = RequestReport.read(RESULTS / "request_cpu.json")
    rows = {
        (row.system, row.way): row
        for row in report.rows
        if (row.model, row.prompt, row.cores) == ("smollm2", 4096, 1) and row.samples_ms
    }
    ways = [rows["kvq", "kivi:bits=4"], rows["kvq", "dense"]]
    llama_cpp = [rows["llama.cpp", way] for way in ("f16", "f16, two products")]
    ways.append(min(llama_cpp, key=lambda row: row.step_ms))
    first, second, third = (f"{row.first_ms / 1e3:.1f} s" for row in ways)
    steps = [f"{row.step_ms:.1f}" for row in ways]
    peaks = [f"{row.peak_bytes / 1e9:.1f}" for row in ways]
    said = " ".join(README.split())
    assert f"{first} with `kivi:bits=4`, {second} dense and {third} in llama.cpp with f16" in said
    assert f"a later token {steps[0]}, {steps[1]} and {steps[2]} ms" in said
    assert f"memory peaks at {peaks[0]}, {peaks[1]} and {peaks[2]} GB" in said
