"""Measure the adapters of kvq_hosts: lines of code, and tokens, errors, bytes and times beside each
host's own cache.

    python -m benchmarks.hosts --json benchmarks/results/hosts.json

A host that is not installed is left out, and the page says why. `make hosts` installs them. With
--only, the file keeps what it has of other hosts from the same commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import pathlib
import warnings
from collections.abc import Sequence

from benchmarks.hosts import host, measured
from benchmarks.hosts.report import CACHES, HostsReport, page
from benchmarks.report_file import cores, header
from benchmarks.turns import check_rounds
from kvq_tools.processor import processor_name

MODULES = {name: f"benchmarks.hosts.in_{name}" for name in ("scan", "linen", "tunix", "bonsai")}
SHAPES = (
    f"Random models in float32 of width {host.WIDTH}, {host.HEADS} query heads and {host.KV_HEADS}"
    f" KV heads (Linen: {host.HEADS}) of {host.HEAD_DIM} channels, {host.LAYERS} layers"
    f" (Gemma 3: {host.WITH_WINDOWS}, all but one with windows of {host.WINDOW} tokens)."
    f" Texts: {host.BATCH} prompts of {host.PROMPT}"
    f" tokens and {host.STEPS} steps. Timed steps: {host.STREAMS} sequences."
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hosts",
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=(2048, 4096),
        metavar="S",
        help="lengths of timed caches, powers of two",
    )
    parser.add_argument("--rounds", type=int, default=32, metavar="N", help="timed steps")
    parser.add_argument("--only", nargs="+", choices=MODULES, default=tuple(MODULES), metavar="H")
    parser.add_argument("--json", metavar="F", help="write the report")
    args = parser.parse_args(argv)
    if any(tokens & (tokens - 1) or tokens < args.rounds + 512 for tokens in args.tokens):
        parser.error("--tokens are powers of two with room for 512 tokens and --rounds")
    try:
        check_rounds(CACHES, [tokens - args.rounds for tokens in args.tokens], args.rounds)
    except ValueError as error:
        parser.error(str(error))
    warnings.filterwarnings("ignore")  # the hosts' own
    adapters, steps, missing, load = [], [], {}, []
    for name in args.only:
        try:
            hosts = importlib.import_module(MODULES[name]).HOSTS
        except ModuleNotFoundError as error:
            missing[name] = str(error)
            print(f"{name}: {error}")
            continue
        for one in hosts:
            print(f"{one.name}: tokens", flush=True)
            load.append(round(os.getloadavg()[0], 2))
            adapters.append(measured.adapter(one))
            for tokens in args.tokens:
                print(f"{one.name}: steps at {tokens} tokens", flush=True)
                steps += measured.steps(one, tokens, args.rounds)
    whole = ["--tokens", *map(str, args.tokens), "--rounds", str(args.rounds)]
    whole += ["--json", args.json] if args.json else []
    report = HostsReport(
        title="Adapters for other people's models",
        cpu=processor_name(),
        cores=cores(),
        load=(*load, round(os.getloadavg()[0], 2)),
        shapes=SHAPES,
        adapters=tuple(adapters),
        steps=tuple(steps),
        missing=missing,
        **header(("benchmarks.hosts", *whole)),
    )
    if args.json:
        kept(report, pathlib.Path(args.json), args.only).write(args.json)
    print(page(report, pathlib.Path(args.json or "hosts.json")))


def kept(report: HostsReport, file: pathlib.Path, tried: Sequence[str]) -> HostsReport:
    """Return the report of the modules `tried`, and what the file has of other modules if it is of
    the same commit."""
    before = HostsReport.read(file) if file.exists() else report
    if before.commit != report.commit:
        return report
    measured_now = {one.host for one in report.adapters}
    adapters = (*report.adapters, *(a for a in before.adapters if a.host not in measured_now))
    steps = (*report.steps, *(s for s in before.steps if s.host not in measured_now))
    return dataclasses.replace(
        report,
        load=report.load if before is report else (*before.load, *report.load),
        adapters=tuple(sorted(adapters, key=lambda one: one.host)),
        steps=tuple(sorted(steps, key=lambda one: (one.host, one.tokens))),
        missing={n: why for n, why in before.missing.items() if n not in tried} | report.missing,
    )


if __name__ == "__main__":
    main()
