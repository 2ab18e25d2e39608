"""Inject faults of every kind into kvq, and count what it noticed and what came out wrong.

    python -m benchmarks.faults --json faults.json --work runs/faults
    python -m benchmarks.faults --kind "prefix files" --tries 20
    python -m benchmarks.faults --soak 30 --kind

Each kind runs in a process of its own, so that a crash or a hang is one of its outcomes: the next
process goes on after it. Equal numbers are equal faults. A run that was stopped goes on with the
folder of --work. Servers listen on this machine only. The model is the embedded one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.faults.kinds import CONTROLS, KINDS
from benchmarks.faults.outcome import Outcome
from benchmarks.faults.report import FaultReport, FaultRow, page
from benchmarks.faults.soak import CONNECTIONS, soak
from benchmarks.report_file import arguments, from_json, header
from kvq_tools.evaluation.journal import Journal

START_SECONDS, HANG_SECONDS = 900, 300  # without a line of a process
PROGRAMS = pathlib.Path(tempfile.gettempdir()) / "kvq-faults-programs"  # compiled once
KEEP_ALL = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
CHILD = ("-m", "benchmarks.faults.child")
SLICE, NOTES = 100, 5  # injections between two rows of the journal; kept reasons of a kind


def lines_of(kind: str, row: FaultRow, tries: int, seconds: float) -> Iterator[list]:
    """Yield the lines of one process: [True, outcome] for each injection that the row lacks, then
    [False, outcome] for each control. A process that does not get to its end gives the reason as
    its last outcome."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "TMPDIR": name}
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(PROGRAMS), KEEP_ALL: "0"}
        if kind == "compiled programs":
            del environment["JAX_COMPILATION_CACHE_DIR"]
        if KINDS[kind].preloaded:
            from benchmarks.faults.stored import compiled_short_reads

            environment["LD_PRELOAD"] = str(compiled_short_reads(folder))
        numbers = (row.tried, tries, CONTROLS - row.controls, int(seconds))
        command = [sys.executable, *CHILD, kind, *map(str, numbers)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        with process, selectors.DefaultSelector() as selector:
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ)
            ready, checked = False, row.tried < tries
            while True:
                if not selector.select(HANG_SECONDS if ready else START_SECONDS):
                    process.kill()
                    yield [checked, Outcome(False, "hang", "the process says nothing")]
                    return
                line = json.loads(process.stdout.readline() or "[]")
                if line == ["done"]:
                    return
                if not line and not ready:
                    raise RuntimeError(f"{kind} cannot begin: {process.wait()}")
                if not line:
                    note = f"the process ends with {process.wait()}"
                    yield [checked, Outcome(False, "crash", note)]
                    return
                if line != ["ready"]:
                    checked = line[0]
                    yield [checked, Outcome(*line[1])]
                ready = True


def counted(row: FaultRow, outcome: Outcome) -> FaultRow:
    """Return the row with one more outcome."""
    new = {"tried": row.tried + 1, "detected": row.detected + outcome.detected}
    new["recovered"] = row.recovered + (outcome.detected and outcome.result == "right")
    if outcome.bad or outcome.result == "other":
        new[outcome.result] = getattr(row, outcome.result) + 1
    notes = row.notes
    if outcome.bad and len(notes) < NOTES:
        notes = (*notes, f"{row.tried}: {outcome.result}: {outcome.note}"[:1000])
    return dataclasses.replace(row, **new, notes=notes)


def run_kind(
    kind: str,
    tries: int,
    row: FaultRow,
    keep: Callable[[FaultRow], None] = lambda row: None,
    seconds: float = 1e6,
) -> FaultRow:
    """Return the row of a kind after `tries` injections, or those of that many seconds, and its
    controls. keep(row) is called from time to time."""
    row, began = dataclasses.replace(row, without=KINDS[kind].without), time.monotonic()
    due = began + seconds
    while (row.tried < tries and time.monotonic() < due) or row.controls < CONTROLS:
        for checked, outcome in lines_of(kind, row, tries, due - time.monotonic()):
            if checked:
                row = counted(row, outcome)
            else:
                control = row.control + outcome.bad
                row = dataclasses.replace(row, controls=row.controls + 1, control=control)
            if checked and row.tried % SLICE == 0:
                now = time.monotonic()
                row, began = dataclasses.replace(row, seconds=row.seconds + now - began), now
                keep(row)
                say(row, tries)
    row = dataclasses.replace(row, seconds=row.seconds + time.monotonic() - began)
    keep(row)
    say(row, tries)
    return row


def say(row: FaultRow, tries: int) -> None:
    bad = f"{row.wrong} wrong, {row.crash} crashes, {row.hang} hangs"
    control = f"; control {row.control} of {row.controls}" if row.controls else ""
    print(
        f"{row.kind}: {row.tried} of {tries}, {row.detected} detected, {row.recovered} recovered,"
        f" {bad}{control}; {row.seconds:.0f} s",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--kind", nargs="*", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--tries", type=int, metavar="N", help="of each kind, in place of its own")
    parser.add_argument(
        "--minutes", type=float, default=1e4, metavar="M", help="in all, shared by the kinds"
    )
    parser.add_argument("--soak", type=float, default=0, metavar="MINUTES")
    parser.add_argument("--work", type=pathlib.Path, metavar="DIR", help="to go on after a stop")
    parser.add_argument("--json", metavar="F", help="write the report")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        work = args.work or pathlib.Path(folder)
        head = header(("benchmarks.faults", *arguments(argv)))
        journal = Journal(work / "faults.jsonl", {"commit": head["commit"], "tries": args.tries})
        rows, due = [], time.monotonic() + 60 * args.minutes
        for number, kind in enumerate(args.kind):
            before = from_json(FaultRow, journal.rows.get(kind, {"kind": kind}))
            tries = args.tries or KINDS[kind].tries

            def keep(row: FaultRow) -> None:
                journal.add(row.kind, dataclasses.asdict(row))

            seconds = (due - time.monotonic()) / (len(args.kind) - number) * 1.5
            rows.append(run_kind(kind, tries, before, keep, seconds))
        samples = tuple(soak(args.soak)) if args.soak else ()
    report = FaultReport(
        title="Injected faults" if rows else f"{args.soak:g} minutes of mixed traffic",
        rows=tuple(rows),
        connections=CONNECTIONS if samples else 0,
        soak=samples,
        **head,
    )
    if args.json:
        report.write(args.json)
        print(page(report, pathlib.Path(args.json)))
    for row in rows:
        for note in row.notes:
            print(f"{row.kind}, {note}")
    blind = [row.kind for row in rows if not row.control]
    if blind:
        parser.exit(1, f"the harness sees nothing of: {', '.join(blind)}\n")


if __name__ == "__main__":
    main()
