"""Numbers that README quotes are those of the committed outputs of its commands."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

from benchmarks import overview
from benchmarks.overview import OverviewReport

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def output(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "docs" / "examples" / f"{name}.json").read_text(encoding="utf-8"))


def test_the_table_of_caches_is_that_of_the_overview():
    report = OverviewReport.read(ROOT / "benchmarks" / "results" / "overview.json")
    wanted = overview.readme_table(report)
    assert wanted in README, f"the numbers of `python -m benchmarks.overview` are\n\n{wanted}"


def test_the_table_of_kvq_eval_is_that_of_its_output():
    made = output("eval_decode")
    command = re.search(r"^\$ kvq eval (\S+) --text (\S+) --window (\d+) (.*)$", README, re.MULTILINE)
    assert command, "README has no kvq eval"
    assert (command[1], command[2], int(command[3])) == (made["model"], made["text"], made["window"])
    assert re.findall(r"--cache (\S+)", command[4]) == [cache["name"] for cache in made["caches"]]
    assert f"{made['scored_tokens']} of {made['text_tokens']} tokens scored in windows of {made['window']} by {made['stride']}" in README
    for cache in made["caches"]:
        columns = (
            cache["name"],
            f"{cache['perplexity']:.3f}",
            f"{cache['bits_per_byte']:.4f}",
            f"{cache['kl']:.5f}",
            f"{cache['agreement']:.2%}",
            f"{cache['cache_bytes'] / 2**10:.2f} KiB",
            f"{cache['ratio']:.2f}",
            f"{cache['bits_per_element']:.2f}",
        )
        line = next((line for line in README.splitlines() if line.startswith(f"│ {cache['name']} ")), "")
        assert tuple(map(str.strip, line.strip("│").split("│"))) == columns, f"README's line of {cache['name']}: {line!r}"


def test_the_three_modes_are_those_of_their_outputs():
    kl = {
        mode: next(c["kl"] for c in output(f"eval_{mode}")["caches"] if c["name"] == "kivi:bits=2")
        for mode in ("decode", "chunked", "fake")
    }
    said = re.sub(r"\s+", " ", README)
    wanted = f"KL of `kivi:bits=2` above: {kl['decode']:.4f} in `decode`, {kl['chunked']:.4f} in `chunked`, {kl['fake']:.4f} in `fake`."
    assert wanted in said, wanted


def test_the_pass_keys_found_are_those_of_the_output():
    made = output("passkey_harder")
    found = {cache["name"]: round(cache["scores"]["accuracy"] * made["samples"]) for cache in made["caches"]}
    said = {name: "none" if n == 0 else str(n) for name, n in found.items()}
    wanted = (
        f"Of {made['samples']} pass keys the exact cache finds {said['dense']}, `int4` {said['int4']}, `kivi:bits=2` {said['kivi:bits=2']}"
    )
    assert wanted in README, wanted


def test_int4_is_as_good_as_exact_where_no_key_is_an_outlier():
    dense, int4 = (cache["scores"]["accuracy"] for cache in output("passkey_embedded")["caches"])
    assert (dense == int4) is ("on the embedded model itself `int4` is as good as exact" in README)
