"""Measure the CPU time of verifying the memory of an engine's slots, against that of a decode step.

    python -m benchmarks.faults.cost --model smollm2 --json verification.json

In turns: a step of all slots, the sums of one layer, the sums of all layers, and what the default
sweep does between two steps. CPU time of all threads, so that other processes count little; medians
and means over the rounds. The slots' contents are random: nothing here depends on them.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import kvq_jax as kvq
from benchmarks.markdown import head, table
from benchmarks.report_file import Report, arguments, cores, header
from kvq_models import load_llama, prepare
from kvq_models.inference.engine import programs
from kvq_models.inference.engine.accepted import VACANT, Accepted
from kvq_models.inference.engine.requests import Request
from kvq_models.inference.engine.sweep import CHECK_SHARE, Sweep
from kvq_models.inference.row_sampling import row_rules
from kvq_models.llama.flat_llama import FlatLlama


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostReport(Report):
    """Milliseconds of CPU time for each round: of a step, of the sums of one layer and of all, and
    of the default sweep between two steps."""

    model: str
    cache: str
    cores: int
    slots: int
    capacity: int
    tokens: int
    layers: int
    step_ms: tuple[float, ...]
    one_layer_ms: tuple[float, ...]
    all_layers_ms: tuple[float, ...]
    sweep_ms: tuple[float, ...]
    turns: int


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return the milliseconds of CPU time of all threads, and the result."""
    began = time.process_time()
    result = jax.block_until_ready(work(*arguments))
    return 1e3 * (time.process_time() - began), result


def measured(
    model: str, spec: str, slots: int, capacity: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Return the fields of the report."""
    plain, _ = load_llama(model, dtype="float32")
    llama, rng = prepare(plain, spec), np.random.default_rng(0)
    arrays = FlatLlama(llama)
    cache = kvq.init_cache(spec, llama.config, slots, capacity)
    cache = dataclasses.replace(cache, lengths=jax.device_put(np.full(slots, tokens, np.int32)))
    offsets = programs.no_offsets(slots, llama.config.vocab_size, None)
    rules = row_rules([VACANT] * slots)
    accepted = [Accepted(i, Request((0,) * tokens, rounds + 9)) for i in range(slots)]
    sweep, turns = Sweep(), 0
    times: dict[str, list[float]] = {
        f"{name}_ms": [] for name in ("step", "one_layer", "all_layers", "sweep")
    }

    def step(cache: kvq.cache.Cache, offsets: programs.Offsets) -> tuple:
        return programs.step_slots(
            arrays,
            cache,
            offsets,
            rng.integers(0, llama.config.vocab_size, slots).astype(np.int32),
            np.ones(slots, bool),
            np.zeros(slots, np.float32),
            np.bool_(False),
            rules,
            np.int32(1),
        )

    kvq.files.seal(cache)  # compiled before the sweep looks at the clock
    for number in range(rounds + 2):
        took, (_, cache, offsets) = timed(step, cache, offsets)
        for one in accepted:
            one.read, one.drawn = tokens, number + 2
        before = sweep._next
        swept, damaged = timed(sweep.damaged, cache, accepted)
        assert not damaged
        layer = number % len(cache.layers)
        one, _ = timed(kvq.files.seal, cache, [layer])
        whole, _ = timed(kvq.files.seal, cache)
        if number >= 2:  # before, programs were compiled
            for name, value in zip(times, (took, one, whole, swept), strict=True):
                times[name].append(value)
            turns += sweep._next != before
        print(f"round {number}: step {took:.1f}, one {one:.2f}, all {whole:.1f}, {swept:.2f} ms")
    return {name: tuple(values) for name, values in times.items()} | {
        "layers": len(cache.layers),
        "turns": turns,
    }


def page(report: CostReport, file: pathlib.Path) -> str:
    """Render the shares of a step."""
    step = float(np.median(report.step_ms))

    def line(name: str, values: Sequence[float], middle: Callable[..., Any]) -> tuple[str, ...]:
        value = float(middle(values))
        return name, f"{value:.2f}", f"{100 * value / step:.2f} %"

    said = (
        f"{report.cores} cores. {report.model}, float32, `{report.cache}`: {report.slots} slots of"
        f" {report.capacity} tokens with {report.tokens} tokens each, {len(report.step_ms)} rounds."
        " CPU time of all threads."
    )
    lines = [
        ("a decode step of all slots", f"{step:.2f}", ""),
        line("sums of one layer", report.one_layer_ms, np.median),
        line(f"sums of all {report.layers} layers", report.all_layers_ms, np.median),
        line("the default sweep between two steps, mean", report.sweep_ms, np.mean),
    ]
    steps = len(report.step_ms) * report.layers / max(report.turns, 1)
    bound = (
        f"The default sweep takes up to {100 * CHECK_SHARE:.0f} % of the time. It compared"
        f" {report.turns} layers in {len(report.step_ms)} steps, between which the other"
        f" measurements took their time: all layers once in {steps:.0f} steps. When a slot is"
        " filled, it takes over the sums of its row, made after the prompt's last chunk. Before an"
        " answer ends, all layers of its row are compared once."
    )
    return "\n\n".join([*head(report, file, said), table(("", "ms", "of a step"), lines), bound])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults.cost", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cache", default="kivi:bits=4", metavar="SPEC")
    parser.add_argument("--slots", type=int, default=8, metavar="B")
    parser.add_argument("--capacity", type=int, default=1024, metavar="S")
    parser.add_argument("--tokens", type=int, default=600, metavar="N", help="in each slot")
    parser.add_argument("--rounds", type=int, default=60, metavar="N")
    parser.add_argument("--json", metavar="F", help="write the report")
    args = parser.parse_args(argv)
    sizes = args.slots, args.capacity, args.tokens
    if min(*sizes, args.rounds) < 1 or args.tokens + args.rounds + 2 > args.capacity:
        parser.error("--tokens and the steps of --rounds must fit --capacity")
    report = CostReport(
        title="The cost of verifying live memory",
        model=args.model,
        cache=args.cache,
        cores=cores(),
        slots=args.slots,
        capacity=args.capacity,
        tokens=args.tokens,
        **measured(args.model, args.cache, *sizes, args.rounds),
        **header(("benchmarks.faults.cost", *arguments(argv))),
    )
    print(page(report, pathlib.Path(args.json or "verification.json")))
    if args.json:
        report.write(args.json)


if __name__ == "__main__":
    main()
