"""Measure the rows of a plan. Each is in the file as soon as it is measured, so a run that is
stopped loses at most the rows that were being measured together."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import kvq_jax as kvq
from benchmarks.model_names import shown
from benchmarks.progress import progress
from benchmarks.protocol import large_models
from benchmarks.protocol.page import cells
from benchmarks.protocol.plan import Plan, Wanted
from benchmarks.protocol.report import ProtocolReport, Row, Text
from benchmarks.report_file import COMMIT, header
from kvq_jax.files.whole import delete_directory
from kvq_models import Llama, load_llama, prepare, resolved
from kvq_models.calibration.fingerprint import partial_fingerprint
from kvq_models.calibration.fit import calibrate
from kvq_models.calibration.needs import needs
from kvq_models.llama.model import HiddenBTD
from kvq_tools.evaluation import program_memory
from kvq_tools.evaluation.protocol import ScoredText, Sizes, cut, exact_share, measure, tokenized
from kvq_tools.processor import processor_name

TOGETHER = {"prompt": 8, "decoded": 1}  # caches that share the pass over a prompt


class Bench:
    """The model, the windows, and the report so far. Raises ValueError if the file's rows are of
    another model, other texts or other sizes."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.llama, self.tokenizer = load_llama(plan.model, dtype="float32")
        self.texts = [self._tokens(*text) for text in plan.texts]
        self.report = self._begun()
        self.work = plan.json.with_name(f"{plan.json.stem}.calibration")
        self.hidden: dict[int, dict[int, HiddenBTD]] = {}  # of full precision, by context

    def _tokens(self, domain: str, name: str, contents: str) -> tuple[str, ScoredText]:
        return name, tokenized(self.tokenizer, domain, contents)

    def _begun(self) -> ProtocolReport:
        plan, texts = self.plan, tuple(_described(*text) for text in self.texts)
        calibration = (
            None if plan.calibration is None else _described(*self._tokens(*plan.calibration))
        )
        report = ProtocolReport(
            title=f"{shown(plan.model)} by the protocol",
            **header(plan.command),
            model=shown(plan.model),
            fingerprint=partial_fingerprint(self.llama),
            texts=texts,
            calibration_text=calibration,
            scored=plan.scored,
            windows=plan.windows,
            large_model=large_models.like(self.llama.config),
        )
        if not plan.json.exists():
            return report
        before = ProtocolReport.read(plan.json)
        same = (
            "fingerprint",
            "texts",
            "calibration_text",
            "scored",
            "windows",
            "jax_version",
            "device",
        )
        different = [name for name in same if getattr(before, name) != getattr(report, name)]
        if _calibration_sizes(before.command) != _calibration_sizes(report.command):
            different.append("samples and length of calibration")
        if different:
            raise ValueError(
                f"{plan.json} holds rows of another run ({', '.join(different)}): give another"
                " --json, or delete it to begin anew"
            )
        contexts = sorted({*plan.contexts, *(row.context for row in before.rows)})
        every = dataclasses.replace(plan, contexts=tuple(contexts))
        return dataclasses.replace(
            report,
            **header(every.command),
            rows=tuple(self._with_size(row) for row in before.rows),
            elsewhere=tuple(self._with_size(row) for row in before.elsewhere),
        )

    def _with_size(self, row: Row) -> Row:
        """Return a row of the file with the bytes that its cache takes today."""
        width = self.plan.sizes(row.context).width
        size = kvq.size.of(row.spec, self.llama.config, 1, width)
        return dataclasses.replace(row, model_bytes=size.resident)

    def run(self, rows: Sequence[Wanted], hours: float | None = None) -> None:
        """Measure the rows that the file lacks, and write it after each group. After `hours` no
        further group is begun."""
        started, measured = time.monotonic(), {row.key for row in self.report.rows}
        missing = [row for row in rows if row not in measured]
        progress(f"{len(rows)} rows, {len(missing)} to measure")
        if measured and not missing:
            self.report.write(self.plan.json)  # with the bytes that its caches take today
        for group in _groups(missing):
            if hours is not None and time.monotonic() - started > 3600 * hours:
                progress(f"stopped after {hours:g} hours")
                return
            self._add(self.measured(group))
        if self.work.exists():
            delete_directory(self.work)

    def _add(self, rows: Sequence[Row]) -> None:
        self.report = dataclasses.replace(self.report, rows=(*self.report.rows, *rows))
        self.report.write(self.plan.json)
        for row in rows:
            kl = self.report.kl(row)
            progress(
                f"{row.context:6d} {row.reading:8s} {row.spec:60s} KL {kl.value:.5f}"
                f" {row.seconds:7.0f} s"
            )

    def measured(self, group: Sequence[Wanted]) -> list[Row]:
        """Measure rows of one length and reading together."""
        context, reading = group[0].context, group[0].reading
        sizes = self.plan.sizes(context)
        specs = [self.plan.spec(wanted) for wanted in group]
        prepared = [self._prepared(spec) for spec in specs]
        candidates = [(llama, spec) for llama, spec, _ in prepared]
        started = time.process_time()
        measured = measure(
            candidates,
            self._windows(sizes),
            self.report.headline,
            sizes,
            reading,
            self.hidden.setdefault(context, {}),
            _progress,
        )
        seconds = (time.process_time() - started) / len(group)
        jax.clear_caches()  # programs of other caches are not needed again
        return [
            Row(
                wanted.cache,
                str(spec),
                wanted.own_windows,
                context,
                reading,
                exact_share(spec, self.llama.config, sizes),
                kvq.size.of(spec, self.llama.config, 1, sizes.width).resident,
                calibrated,
                numbers,
                round(seconds, 1),
                COMMIT,
                processor_name(),
            )
            for wanted, (_, spec, calibrated), numbers in zip(
                group, prepared, measured, strict=True
            )
        ]

    def _windows(self, sizes: Sizes) -> np.ndarray:
        bos = self.tokenizer.bos_token_id
        return np.concatenate([cut(text, sizes, bos) for _, text in self.texts])

    def _prepared(self, spec: kvq.cache.CacheSpec) -> tuple[Llama, kvq.cache.CacheSpec, bool]:
        """Return the model with the cache's parameters, the cache as calibration decides it, and
        whether it was calibrated."""
        if not needs(spec, self.llama.config):
            return prepare(self.llama, spec), spec, False
        if self.plan.calibration is None:
            raise ValueError(f"{spec} learns from a text: give --calibration-text")
        name, text = self._tokens(*self.plan.calibration)
        progress(f"{spec}: calibrating on {name}")
        calibration = calibrate(
            self.llama,
            text.ids,
            spec,
            samples=self.plan.samples,
            length=self.plan.length,
            work=self.work,
            text=name,
        )
        program_memory.drop_if_many()
        return prepare(self.llama, spec, calibration), resolved(spec, calibration), True


def recompute(plan: Plan, report: ProtocolReport, rows: int) -> tuple[list[str], bool]:
    """Measure the cheapest rows of the command's caches again. Return a line for each, and True if
    all printed digits are the same. If digits differ, the line says by how much KL moved, beside
    the row's rounding. Rows that another kind of processor measured are added to the file."""
    bench = Bench(plan)
    lines, equal = [], True
    chosen = [row for row in report.rows if plan.caches is None or row.cache in plan.caches]
    for row in sorted(chosen, key=lambda row: row.seconds)[:rows]:
        (again,) = bench.measured([Wanted(*row.key)])
        if row.processor not in ("", again.processor):
            report = dataclasses.replace(report, elsewhere=(*report.elsewhere, again))
            report.write(plan.json)
        before, now = cells(report, row)[1:], cells(report, again)[1:]  # without marks
        moved = report.kl(again).value / report.kl(row).value - 1
        equal &= before == now
        outcome = (
            "the same digits"
            if before == now
            else f"KL moved by {moved:+.2%}, rounding {row.measured.rounding:.2%}"
        )
        lines.append(f"{row.spec} at {row.context}, {row.reading}: {outcome}")
    return lines, equal


def _groups(rows: Sequence[Wanted]) -> list[list[Wanted]]:
    groups = []
    for (_, reading), alike in itertools.groupby(rows, lambda row: (row.context, row.reading)):
        chosen = list(alike)
        size = TOGETHER[reading]
        groups += [chosen[at : at + size] for at in range(0, len(chosen), size)]
    return groups


def _progress(items: Sequence[Any], message: str) -> Iterable[Any]:
    """Show a bar, also in a file, where each minute has one."""
    return tqdm(items, desc=message, mininterval=0.5 if sys.stderr.isatty() else 60)


def _calibration_sizes(command: str) -> list[str]:
    """Return the words of a run's command that say how much of a text was calibrated on."""
    return re.findall(r"--(?:samples|length) \S+", command)


def _described(name: str, text: ScoredText) -> Text:
    return Text(text.domain, name, text.sha256, len(text.ids))
