"""What a visitor sees first shows what it is for: the README's examples quantize tokens, and its
picture and speeds are those of committed results."""

from __future__ import annotations

import pathlib
import re
import shlex
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

import kvq_jax as kvq
from benchmarks import front_picture, readme_table, results_page
from benchmarks.cpu.timing import CpuReport
from benchmarks.protocol import front_page
from benchmarks.report_file import RESULTS
from kvq_models import EMBEDDED
from kvq_models.llama.checkpoint import open_checkpoint, read_config
from kvq_tools.cli import main, text_input
from kvq_tools.cli.main import build_parser
from kvq_tools.cli.options import calibrate, generate
from tests.test_pictures import texts_outside
from tests.test_readme import README

ROOT = pathlib.Path(__file__).parents[1]
COMMANDS = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
SERVING = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
SPEED = "decode_step_6k_smollm2_cpu"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def test_the_python_example_reads_quantized_tokens(capsys):
    """Run as it stands."""
    (block,) = blocks(README, "python")
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)
    live = names["out"].cache.lengths.tolist()[0]
    assert kvq.size.quantized_tokens(names["out"].cache, live) > live / 2
    said = f"{kvq.size.quantized_tokens(names['out'].cache, live)} of {live} tokens quantized"
    assert said in capsys.readouterr().out
    assert kvq.size.quantized_tokens(names["cache"], int(names["cache"].lengths[0])) > live / 2


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


def test_a_short_example_is_noticed():
    line = 'generate embedded --prompt "It was" --cache kivi:bits=2 --max-new-tokens 64'
    with pytest.raises(AssertionError):
        test_generated_text_is_long_enough_to_be_quantized(line)


def test_the_client_of_the_serving_page_sets_a_temperature():
    """A model of 135M parameters writes gibberish at OpenAI's default of 1."""
    (client,) = blocks(SERVING, "python")
    (temperature,) = re.findall(r"temperature=([\d.]+)", client)
    assert float(temperature) <= 0.3


def test_the_picture_is_drawn_from_the_committed_results():
    made = results_page.drawn_front(front_page.report_for_readme(), readme_table.read()[1])
    assert front_picture.FILE.read_text(encoding="utf-8") == made, (
        "python -m benchmarks.results_page draws it"
    )
    assert "](docs/front.svg)" in README


def test_the_picture_names_the_caches_of_the_front_with_their_intervals():
    report = readme_table.read()[1]
    shown = results_page.drawn_front(None, report)
    drawn = "".join(ElementTree.fromstring(shown).itertext())
    inside = [p for p in front_picture.points(report) if p.kl < front_picture.KL[1]]
    best = front_picture.front(inside)
    assert 3 <= len(best) < len(inside)
    for point in inside:
        better = [p for p in inside if p.gib <= point.gib and p.kl <= point.kl]
        assert (better == [point]) == (point in best), point
        assert f"<title>{point.name}</title>" in shown
        assert point.interval.low <= point.kl <= point.interval.high
    for point in best:
        assert re.sub(",(sink|recent)=[0-9]+", "", point.name) in drawn
    assert not texts_outside(shown)


def luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_the_picture_can_be_read_in_both_themes(theme: int):
    """WCAG's contrast: 4.5 for text, 3 for marks."""
    paper = luminance(front_picture.COLOURS["paper"][theme])
    for name, least in (("ink", 4.5), ("front", 3), ("other", 3)):
        light, dark = sorted((luminance(front_picture.COLOURS[name][theme]), paper), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= least, name
    assert "prefers-color-scheme: dark" in front_picture.FILE.read_text(encoding="utf-8")


def test_the_speed_is_that_of_the_committed_results():
    report = CpuReport.read(RESULTS / f"{SPEED}.json")
    rows = {row.implementation: row for row in report.rows}
    said = " ".join(README.split())
    for cache in ("kivi:bits=2", "kivi:bits=4"):
        row = rows[cache]
        wanted = f"{row.ratio:.2f} of dense's time and {row.cache_bytes / 2**20:.0f} MiB"
        assert f"through `{cache}` takes {wanted}" in said, wanted
    dense = f"{rows['dense'].cache_bytes / 2**20:.0f} MiB in float32"
    assert dense in said, dense
    assert f"results/{SPEED}.md" in README
    assert {row.shape.tokens for row in report.rows} == {6144}


def test_the_first_screen_says_why_before_it_says_what():
    """The problem, one picture and a speed come before commands, and the table after them."""
    order = [README.index(part) for part in ("front.svg", SPEED, "```sh", readme_table.BEGIN)]
    assert order == sorted(order)
    assert README.count("](docs/front.svg)") == 1
    assert len(readme_table.CACHES) <= 10
