"""README and docs: the numbers that they quote are those of committed outputs, and their commands
parse."""

import json
import pathlib
import re
import shlex
from typing import Any

import pytest

from benchmarks import front_speeds
from benchmarks.markdown import replaced
from benchmarks.protocol import front_page
from kvq_tools.cli.console import format_bytes
from kvq_tools.cli.main import COMMANDS, build_parser

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EVALUATION = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "kvq_jax/methods").glob("*/README.md")),
]
EXAMPLE = re.compile(
    r"^(?:\$ |\S*/)?kvq ([a-z][\w-]* .*|methods)$", re.MULTILINE
)  # in a block of code, a line to type


def output(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "docs" / "examples" / f"{name}.json").read_text(encoding="utf-8"))


def examples(text: str) -> list[str]:
    """Lines of code blocks that call kvq, continued lines joined."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in EXAMPLE.findall(block.replace("\\\n", " "))]


def parse(line: str) -> None:
    arguments = shlex.split(line, comments=True)
    build_parser(arguments[0]).parse_args(arguments)


def test_the_tables_are_the_generator_s():
    report = front_page.report_for_readme()
    assert report, "the results lack a row of the README's table"
    section = front_page.section(report, "benchmarks/results/", front_page.other_report())
    page = replaced(README, front_page.BEGIN, section)
    page = replaced(page, front_speeds.BEGIN, front_speeds.section("benchmarks/results/"))
    assert page == README, "python -m benchmarks.results_page writes the tables"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_parse(page: pathlib.Path):
    for line in examples(page.read_text(encoding="utf-8")):
        parse(line)


def test_every_command_has_an_example_and_a_line_in_its_page():
    page = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    assert {line.split()[0] for line in examples(page)} == set(COMMANDS)
    assert set(re.findall(r"`kvq ([\w-]+)`", page)) == set(COMMANDS)


def test_the_table_of_kvq_eval_is_that_of_its_output():
    made = output("eval_decode")
    command = re.search(
        r"^\$ kvq eval (\S+) --text (\S+) --window (\d+) (.*)$", EVALUATION, re.MULTILINE
    )
    assert command, "docs/evaluation.md has no kvq eval"
    assert (command[1], command[2], int(command[3])) == (
        made["model"],
        made["text"],
        made["window"],
    )
    assert re.findall(r"--cache (\S+)", command[4]) == [cache["name"] for cache in made["caches"]]
    assert (
        f"{made['scored_tokens']} of {made['text_tokens']} tokens scored in windows of"
        f" {made['window']} by {made['stride']}" in EVALUATION
    )
    for cache in made["caches"]:
        columns = (
            cache["name"],
            f"{cache['perplexity']:.3f}",
            f"{cache['bits_per_byte']:.4f}",
            f"{cache['kl']:.5f}",
            f"{cache['agreement']:.2%}",
            f"{cache['quantized_tokens']} of {made['window'] - 1}",
            f"{cache['cache_bytes'] / 2**10:.2f} KiB",
            f"{cache['ratio']:.2f}",
            f"{cache['bits_per_element']:.2f}",
            *(format_bytes(entry["bytes"]) for entry in cache["resident_by_batch"]),
        )
        line = next(
            (line for line in EVALUATION.splitlines() if line.startswith(f"│ {cache['name']} ")), ""
        )
        assert tuple(map(str.strip, line.strip("│").split("│"))) == columns, (
            f"the line of {cache['name']}: {line!r}"
        )


def test_the_three_modes_are_those_of_their_outputs():
    kl = {
        mode: next(c["kl"] for c in output(f"eval_{mode}")["caches"] if c["name"] == "kivi:bits=2")
        for mode in ("decode", "chunked", "fake")
    }
    said = re.sub(r"\s+", " ", EVALUATION)
    wanted = (
        f"KL of `kivi:bits=2` above: {kl['decode']:.4f} in `decode`, {kl['chunked']:.4f} in"
        f" `chunked`, {kl['fake']:.4f} in `fake`."
    )
    assert wanted in said, wanted


def test_the_pass_keys_found_are_those_of_the_output():
    made = output("passkey_harder")
    found = {
        cache["name"]: round(cache["scores"]["accuracy"] * made["samples"])
        for cache in made["caches"]
    }
    said = {name: "none" if n == 0 else str(n) for name, n in found.items()}
    wanted = (
        f"Of {made['samples']} pass keys the exact cache finds {said['dense']}, `int4`"
        f" {said['int4']}, `kivi:bits=2` {said['kivi:bits=2']}"
    )
    assert wanted in re.sub(r"\s+", " ", EVALUATION), wanted


def test_int4_is_as_good_as_exact_where_no_key_is_an_outlier():
    dense, int4 = (cache["scores"]["accuracy"] for cache in output("passkey_embedded")["caches"])
    said = "on the embedded model itself `int4` is as good as exact"
    assert (dense == int4) is (said in re.sub(r"\s+", " ", EVALUATION))
