"""The benchmark of kvq beside transformers: who steps when, what is decoded, and the page. That of transformers itself is not run here."""

from __future__ import annotations

import pathlib

import numpy as np

import kvq_jax as kvq
from benchmarks.cpu.generation import GenerationReport, GenerationRow, ours, page, timed
from benchmarks.report_file import header
from kvq_models import generate, prepare
from tests.kvq_models.checkpoints import random_llama, tiny_config


def test_ways_take_turns_and_the_first_step_does_not_count():
    calls: list[str] = []
    rows = list(timed({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 7, 3))
    assert "".join(calls) == "abababab"
    assert [(row.way, row.prompt, len(row.samples_ms)) for row in rows] == [("a", 7, 3), ("b", 7, 3)]


def test_kvqs_steps_are_those_of_generate():
    llama, prompt = random_llama(tiny_config(num_hidden_layers=1)), np.arange(40, dtype=np.int32)
    step = ours(llama, "kivi:bits=2", prompt, 3)
    tokens = [int(np.asarray(step())[0]) for _ in range(3)]
    cache = kvq.init_cache("kivi:bits=2", llama.config, 1, 64, "float32")
    expected = np.asarray(generate(prepare(llama, "kivi:bits=2"), cache, prompt[None], max_new_tokens=4).tokens)[0]
    assert tokens == expected[1:4].tolist(), "the first token comes with the prompt"


def test_the_page_tells_ratios_to_the_first_cache_and_what_is_missing(tmp_path: pathlib.Path):
    rows = (GenerationRow("kvq, dense", 9, (10.0, 30.0)), GenerationRow("kvq, kivi:bits=2", 9, (10.0, 10.0)))
    versions = {"model": "m", "transformers": "5", "torch": "2", "cores": 2}
    report = GenerationReport(title="T", **header(("x",)), **versions, missing=("hqq",), rows=rows)
    report.write(tmp_path / "generation.json")
    assert GenerationReport.read(tmp_path / "generation.json") == report
    text = page(report, tmp_path / "generation.json")
    assert "| 9 | kvq, kivi:bits=2 | 100.0 | 2.00 | 10.0 |" in text
    assert "Not installed, so not measured: hqq." in text
