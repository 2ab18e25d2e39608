"""The benchmark of whole requests: its order, a run that goes on, what is left out, and the page.
Other people's libraries are not run here."""

import dataclasses
import json
import pathlib
import subprocess
import sys
from unittest.mock import MagicMock

import numpy as np
import pytest

from benchmarks.cpu.request import __main__ as command
from benchmarks.cpu.request import child, goals, plan, report, with_onnx
from benchmarks.cpu.request.child import Request
from benchmarks.cpu.request.plan import Cell
from benchmarks.cpu.request.report import RequestReport, RequestRow
from benchmarks.report_file import header
from kvq_tools.processor import processor_name

CELL = Cell(plan.SMOLLM2, plan.KVQ, "dense", 128, 1)
REQUEST = Request("dense", "m", "t.json", 128, 4, 1, "f")


def row(system: str, step_ms: float) -> RequestRow:
    cell = dataclasses.replace(CELL, system=system)
    samples = 16 * (9 * step_ms,) + 31 * (step_ms,) + (2 * step_ms,)
    times = {"first_ms": 64.0, "samples_ms": tuple(ms * 32 / 33 for ms in samples)}
    of_run = {"version": "1", "cpu": processor_name(), "commit": "1234567"}
    return RequestRow(**dataclasses.asdict(cell), peak_bytes=5 * 10**6, **of_run, **times)


def test_short_prompts_of_every_way_come_before_long_ones():
    cells = list(plan.cells(tuple(plan.WAYS), tuple(plan.MODULES), (1024, 128), (1, 2)))
    assert [cell.prompt for cell in cells] == sorted(cell.prompt for cell in cells)
    assert len(set(cells)) == len(cells) == 2 * 2 * (14 + 4)
    only = list(plan.cells([plan.SMOLLM2], [plan.LLAMA_CPP], (128,), (1,)))
    assert [cell.way for cell in only] == ["f16", "f16, two products", "q8_0", "q4_0"]


def test_a_prompt_repeats_the_text_to_its_length(tmp_path: pathlib.Path):
    (tmp_path / "t.json").write_text("[1, 2, 3]")
    request = dataclasses.replace(REQUEST, tokens=str(tmp_path / "t.json"), prompt=7)
    assert request.prompt_ids() == [1, 2, 3, 1, 2, 3, 1]


def test_the_first_call_after_the_prompt_does_not_count():
    calls: list[str] = []
    times = child.request_times(lambda: calls.append("p"), lambda: calls.append("t"), 3)
    assert "".join(calls) == "ptttt"
    assert len(times["samples_ms"]) == 3


def test_short_prompts_are_read_three_times_and_their_median_counts(monkeypatch):
    monkeypatch.setattr(child, "timed", lambda work: work())
    taken = iter([9.0, 1.0, 4.0, 2.0, 2.0])
    readings = dataclasses.replace(REQUEST, prompt=1024).readings
    emptied = []
    times = child.request_times(
        lambda: next(taken),
        lambda: next(taken),
        1,
        readings=readings,
        reset=lambda: emptied.append(True),
    )
    assert len(emptied) == 3
    assert times == {"first_ms": 4.0, "samples_ms": [2.0], "each": 1}
    assert dataclasses.replace(REQUEST, prompt=1025).readings == 1


def test_a_run_goes_on_where_it_ended_and_measures_again_what_failed(tmp_path: pathlib.Path):
    file, failed = tmp_path / "request.json", dataclasses.replace(CELL, way="kivi:bits=4")
    rows = (row(plan.KVQ, 7.0), RequestRow(**dataclasses.asdict(failed), skipped="no"))
    common = dict(title="T", cpu=processor_name(), cores=2, **header(("x",)))
    RequestReport(**common, steps=48, rows=rows).write(file)
    assert RequestReport.read(file).rows[0] == rows[0]
    options = ["--json", str(file), "--folder", str(tmp_path)]
    run = command.Run(command.parser_of_options().parse_args(options), options)
    assert list(run.rows) == [CELL]
    other = command.parser_of_options().parse_args([*options, "--steps", "8"])
    with pytest.raises(SystemExit, match="48 steps"):
        command.Run(other, options)
    elsewhere = dataclasses.replace(rows[0], cpu="Z80")
    RequestReport(**common, steps=48, rows=(rows[0], elsewhere)).write(file)
    with pytest.raises(SystemExit, match=r"rows of Z80, .* give --json a new file"):
        command.Run(command.parser_of_options().parse_args(options), options)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import nothing_of_this_name", "No module named"),
        ("import time; time.sleep(60)", command.TOO_LONG),
    ],
)
def test_what_cannot_be_measured_says_why(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
):
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n{code}\n")
    script.chmod(0o755)
    found = command.measured(CELL, str(script), REQUEST, 5, warm=False)
    assert reason in found.skipped
    assert not found.samples_ms
    answer = json.dumps({"first_ms": 1.0, "samples_ms": [2.0], "peak_bytes": 3})
    script.write_text(f"#!/bin/sh\necho '{answer}'\n")
    assert command.measured(CELL, str(script), REQUEST, 60, warm=True).samples_ms == (2.0,)


def test_a_token_takes_the_mean_of_whole_blocks_of_tokens():
    segments = (4.8, 5.0, 10.4, 5.2, 5.2, 5.2)
    ours = dataclasses.replace(row(plan.KVQ, 1.0), samples_ms=segments, each=8)
    assert ours.step_ms == pytest.approx((10.4 + 3 * 5.2) / 4)
    beside = dataclasses.replace(ours, samples_ms=48 * (5.0,), each=1)
    assert beside.step_ms == 5
    longer = dataclasses.replace(ours, samples_ms=(9.0, *range(8)))
    assert longer.step_ms == 3.5


def test_rows_of_an_older_file_are_of_its_header(tmp_path: pathlib.Path):
    file = tmp_path / "request.json"
    common = dict(title="T", cpu="an old one", cores=2, steps=48, **header(("x",)))
    old = dataclasses.replace(row(plan.KVQ, 1.0), samples_ms=6 * (2.0,), cpu="", commit="")
    RequestReport(**common, rows=(old,)).write(file)
    (found,) = RequestReport.read(file).rows
    assert (found.cpu, found.commit, found.each) == ("an old one", common["commit"], 8)


def test_attention_of_onnx_reads_a_prompt_as_often_as_the_others_do(monkeypatch):
    calls: list[int] = []

    class Session:
        def io_binding(self) -> MagicMock:
            binding = MagicMock()
            binding.bind_cpu_input = lambda name, rows: name == "q" and calls.append(rows.shape[1])
            return binding

        def run_with_iobinding(self, binding: object) -> None:
            drawn.append(random.standard_normal.call_count)

    drawn, random = [], MagicMock()
    random.standard_normal.side_effect = lambda shape, _: np.zeros(shape, np.float32)
    monkeypatch.setattr(np.random, "default_rng", lambda _: random)
    monkeypatch.setattr(with_onnx, "_session", lambda *_: Session())
    monkeypatch.setitem(sys.modules, "onnxruntime", MagicMock(__version__="1"))
    answer = with_onnx.measure(dataclasses.replace(REQUEST, steps=2))
    assert calls == [128] + 3 * [128] + 3 * [1]
    assert set(drawn) == {6}, "rows are drawn inside the clock"
    assert answer["method"] == plan.METHODS[plan.ONNX]


def test_the_page_has_speeds_and_reasons(tmp_path: pathlib.Path):
    missing = RequestRow(**dataclasses.asdict(CELL), skipped="no such file")
    other = dataclasses.replace(row(plan.LLAMA_CPP, 8.0), commit="7654321")
    onnx = row(plan.ONNX, 1.0)
    rows = (row(plan.KVQ, 4.0), other, onnx, missing)
    common = dict(title="T", cpu="c", cores=2, steps=48, rows=rows, **header(("x",)))
    text = report.page(RequestReport(**common), tmp_path / "request.json")
    assert "| 128 | kvq, dense | 64.0 | 2000 | 4.00 | 250.0 | 5 |" in text
    assert "| 128 | llama.cpp, dense | 64.0 | 2000 | 8.00 | 125.0 | 5 |" in text
    assert "the mean of the last 32 tokens" in " ".join(text.split())
    assert "- no such file: smollm2, one core, 128 tokens (kvq dense)" in text
    assert "Rows by commit: 1234567: 2, 7654321: 1." in text
    assert "Rows of onnxruntime were measured in an older way" in text
    again = (*rows[:2], dataclasses.replace(onnx, method=plan.METHODS[plan.ONNX]))
    text = report.page(RequestReport(**common | {"rows": again}), tmp_path / "request.json")
    assert "older way" not in text


@pytest.mark.parametrize(
    ("prompt", "step_ms", "said"),
    [
        (128, 7.9, "0.99 | at most 1 | met"),
        (128, 8.2, "1.02 | at most 1 | missed"),
        (4096, 3.9, "0.49 | at most 0.5 | met"),
        (4096, 7.9, "0.99 | at most 0.5 | missed"),
    ],
)
def test_a_goal_is_judged_by_the_best_way_of_another_system(prompt: int, step_ms: float, said: str):
    ours = dataclasses.replace(row(plan.KVQ, step_ms), way="kivi:bits=4", prompt=prompt)
    best, worse = (
        dataclasses.replace(row(plan.LLAMA_CPP, ms), way=way, prompt=prompt)
        for way, ms in (("f16", 8.0), ("q8_0", 16.0))
    )
    shorter = dataclasses.replace(best, prompt=prompt - 1, samples_ms=(1.0,))
    text = goals.goals([ours, worse, best, shorter])
    assert (
        f"| ms a token over llama.cpp's best | smollm2 | 1 | {prompt} | kivi:bits=4 | {said} |"
        in text
    )
    assert "prompt's speed over llama.cpp's best" in text
    assert "transformers" not in text, "a system that was not measured is judged"
    assert not goals.goals([ours])


def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it():
    large = np.ones(1 << 26)  # 512 MiB
    code = "from benchmarks.cpu.request import child; print(child.peak_bytes())"
    alone = int(subprocess.check_output([sys.executable, "-c", code], text=True))
    assert 0 < alone < large.nbytes <= child.peak_bytes()


def test_exact_attention_is_judged_beside_the_products_that_it_cannot_do_without():
    attention = dataclasses.replace(row(plan.KVQ, 2.0), way=f"{plan.ATTENTION}dense")
    products = dataclasses.replace(row(plan.KVQ, 2.5), way=plan.PRODUCTS, first_ms=32.0)
    text = goals.goals([attention, products])
    said = "| smollm2 | 1 | 128 | dense |"
    speed = f"| attention's speed over a plain product's {said} 0.50 | at least 0.7 | missed |"
    assert speed in text
    assert f"| attention of a token over its two products {said} 0.80 | at most 1 | met |" in text
    assert not goals.goals([attention])
