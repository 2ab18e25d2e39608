"""Time whole requests on a CPU: kvq against llama.cpp, transformers, and ONNX Runtime's attention.

    python -m venv /tmp/llama_cpp
    CMAKE_ARGS=-DGGML_NATIVE=ON /tmp/llama_cpp/bin/pip install llama-cpp-python
    python -m venv /tmp/onnx && /tmp/onnx/bin/pip install onnxruntime onnx
    python -m venv /tmp/quanto
    /tmp/quanto/bin/pip install torch transformers optimum-quanto ninja
    python -m benchmarks.cpu.request --python-of llama.cpp=/tmp/llama_cpp/bin/python \\
        --python-of onnxruntime=/tmp/onnx/bin/python \\
        --python-of transformers=/tmp/quanto/bin/python --json request_cpu.json

Each measurement is a process of its own. The file is written after each, and a run that finds it
goes on where it ended. What is not installed is left out, with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.cpu.request import plan, random_file
from benchmarks.cpu.request.child import Request
from benchmarks.cpu.request.plan import Cell
from benchmarks.cpu.request.report import BLOCK, RequestReport, RequestRow, page
from benchmarks.progress import progress
from benchmarks.report_file import COMMIT, arguments, cores, header
from kvq_jax.files import whole
from kvq_models import load_llama, save_llama
from kvq_models.inference.generation import STREAM_STEPS
from kvq_models.named_models.names import located
from kvq_tools.processor import processor_name

REPOSITORY = pathlib.Path(__file__).parents[3]
TOO_LONG = "took too long"


def measured(
    cell: Cell, python: str, request: Request, seconds: float, *, warm: bool
) -> RequestRow:
    """Run the process of a cell, after one that compiles its programs if `warm`."""
    load = round(os.getloadavg()[0], 2)
    deadline = time.monotonic() + seconds
    answer: dict[str, Any] = {}
    for each in (dataclasses.replace(request, warm=True), request)[not warm :]:
        module = f"benchmarks.cpu.request.{plan.MODULES[cell.system]}"
        command = [python, "-m", module, json.dumps(dataclasses.asdict(each))]
        path = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "models")))
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                cwd=REPOSITORY,
                env=os.environ | {"PYTHONPATH": path},
                timeout=max(1.0, deadline - time.monotonic()),
                check=True,
            )
            answer = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            answer = {"skipped": f"{TOO_LONG} (more than {seconds:.0f} s)"}
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or "").strip().splitlines() or [f"status {error.returncode}"]
            answer = {"skipped": lines[-1][:200]}
        except OSError as error:
            answer = {"skipped": str(error)}
        if "skipped" in answer:
            break
    if samples := answer.pop("samples_ms", None):
        answer["samples_ms"] = tuple(samples)
    of_run = {"load": load, "cpu": processor_name(), "commit": COMMIT}
    return RequestRow(**dataclasses.asdict(cell), **of_run, **answer)


class Run:
    """A run: what it measured before, and the files that its processes read."""

    def __init__(self, options: argparse.Namespace, argv: Sequence[str]):
        self.options, self.argv = options, argv
        self.folder: pathlib.Path = options.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rows: dict[Cell, RequestRow] = {}
        if options.json and options.json.exists():
            before = RequestReport.read(options.json)
            if before.steps != options.steps:
                raise SystemExit(f"{options.json} has {before.steps} steps a row: give --steps so")
            if others := {row.cpu for row in before.rows if row.samples_ms} - {processor_name()}:
                raise SystemExit(
                    f"{options.json} has rows of {', '.join(sorted(others))}, and this is a"
                    f" {processor_name()}: give --json a new file"
                )
            self.rows = {row.cell: row for row in before.rows if row.samples_ms and row.current}
        self.pythons = {system: sys.executable for system in plan.MODULES}
        self.pythons |= dict(options.python_of)

    def file_of(self, cell: Cell) -> str:
        """Return the path of the cell's model as its system reads it, made if it is not there."""
        if cell.model != plan.SMOLLM2:
            return str(random_file.written(self.folder / f"{cell.model}.gguf"))
        if cell.system != plan.TRANSFORMERS:
            return str(located(cell.model))
        directory = self.folder / "in_float32"
        if not directory.exists():
            save_llama(load_llama(cell.model, dtype="float32", weights="dense")[0], directory)
        return str(directory)

    def request(self, cell: Cell) -> Request:
        tokens = self.folder / "tokens.json"
        if not tokens.exists():
            _, tokenizer = load_llama(plan.SMOLLM2)
            ids = tokenizer.encode((REPOSITORY / "README.md").read_text(encoding="utf-8"))
            whole.write(tokens, json.dumps(np.asarray(ids).tolist()))
        folder, steps = str(self.folder), self.options.steps
        model = self.file_of(cell)
        return Request(cell.way, model, str(tokens), cell.prompt, steps, cell.cores, folder)

    def report(self) -> RequestReport:
        return RequestReport(
            title="Requests on a CPU: kvq, llama.cpp, transformers, ONNX Runtime",
            **header(("benchmarks.cpu.request", *self.argv)),
            cpu=processor_name(),
            cores=cores(),
            steps=self.options.steps,
            rows=tuple(self.rows.values()),
        )

    def all(self) -> None:
        options, end = self.options, time.monotonic() + self.options.minutes * 60
        todo = list(plan.cells(options.model, options.system, options.prompt, options.cores))
        long: set[tuple[str, str, str, int]] = set()
        for number, cell in enumerate(todo, 1):
            if cell in self.rows:
                continue
            seconds = min(options.seconds, end - time.monotonic())
            reason = self._reason(cell, seconds, long)
            if reason:
                row = RequestRow(**dataclasses.asdict(cell), skipped=reason)
            else:
                progress(f"[{number}/{len(todo)}] {cell}")
                warm = cell.system == plan.KVQ
                row = measured(
                    cell, self.pythons[cell.system], self.request(cell), seconds, warm=warm
                )
            if row.skipped.startswith(TOO_LONG):
                long.add(cell.shorter)
            said = row.skipped or (
                f"first token {row.first_ms:.0f} ms, then {row.step_ms:.2f} ms a token,"
                f" peak {row.peak_bytes / 1e6:.0f} MB"
            )
            progress(f"    {said}")
            self.rows[cell] = row
            if options.json:
                self.report().write(options.json)

    def _reason(self, cell: Cell, seconds: float, long: set[Any]) -> str:
        """Return why a cell is not measured, or an empty text."""
        if cell.cores > cores():
            return f"the process may use {cores()} cores"
        if cell.shorter in long:
            return "a shorter prompt took too long"
        if seconds < 5:
            return f"the run's {self.options.minutes:g} minutes were over: run it again to go on"
        return ""


def _pair(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name not in plan.MODULES or not python:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be NAME=PATH, of {', '.join(plan.MODULES)}"
        )
    return name, python


def parser_of_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.request",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", nargs="+", choices=plan.WAYS, default=tuple(plan.WAYS), help="models")
    add("--system", nargs="+", choices=plan.MODULES, default=tuple(plan.MODULES), help="systems")
    lengths = (128, 1024, 4096, 16384)
    add("--prompt", type=int, nargs="+", default=lengths, metavar="N", help="tokens of prompts")
    add("--cores", type=int, nargs="+", default=(1, 2), metavar="N", help="cores of a process")
    add("--steps", type=int, default=48, metavar="N", help="tokens after the first")
    add("--seconds", type=float, default=90, help="of one measurement, at most")
    add("--minutes", type=float, default=24, help="of the run, at most; a later run goes on")
    add(
        "--python-of",
        action="append",
        type=_pair,
        default=[],
        metavar="NAME=PATH",
        help="the Python that has a system's packages (default: this one)",
    )
    folder = pathlib.Path("/tmp/kvq_request")
    add("--folder", type=pathlib.Path, default=folder, help="for programs and models; kept")
    add(
        "--json",
        metavar="FILE",
        type=pathlib.Path,
        help="write the raw samples here; `python -m benchmarks.results_page` makes a page of them",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of_options()
    options = parser.parse_args(argv)
    if options.steps < BLOCK or options.steps % STREAM_STEPS:
        parser.error(f"--steps is a multiple of {STREAM_STEPS}, and at least {BLOCK}")
    run = Run(options, arguments(argv))
    run.all()
    print(page(run.report(), options.json or pathlib.Path("request.json")))


if __name__ == "__main__":
    main()
