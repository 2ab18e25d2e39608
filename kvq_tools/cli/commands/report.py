"""`kvq report`: write one self-contained page with plots, from a model, a text and caches."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import console, inputs, text_evaluation
from kvq_tools.cli.model_loading import load_model, prepared
from kvq_tools.cli.options.report import CONTEXTS, NO_CONTEXTS, SAMPLE, STEPS
from kvq_tools.cli.tables import print_line
from kvq_tools.cli.until_pressed import OF_READ_WINDOWS, UntilPressed, first_batch
from kvq_tools.evaluation.defaults import BATCH, BUCKETS, CHUNK, STEP
from kvq_tools.evaluation.settings import Settings
from kvq_tools.report import schema, times, write
from kvq_tools.report.collect import ReportPlan, collect
from kvq_tools.report.quality import advice, front_by, verdict

SOURCES = ("model", "text", "cache")
# options that --from replaces, and what they are if they were not given
REPLACED = {
    **dict.fromkeys((*SOURCES, "calibration", "window", "stride", "chunk", "prompt", "step")),
    **dict.fromkeys(("limit", "contexts", "dtype", "weights")),
    "mode": "decode",
    "batch": BATCH,
    "buckets": BUCKETS,
    "steps": STEPS,
    "sample": SAMPLE,
    "activations": "float32",
}

PARTIAL = "partial"  # the folder of an interrupted report beside an earlier one


def run(options: argparse.Namespace) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise console.UserError("kvq report needs matplotlib: pip install 'kvq-jax[report]'")
    slices = UntilPressed(first_batch)
    report = _made(options, slices) if options.source is None else _read(options)
    out, kept = inputs.output_directory(options.out), ""
    if slices.pressed and (out / write.JSON).exists():
        out /= PARTIAL
        kept = f"; the earlier report in {options.out!r} is as it was"
    with console.input_errors():
        out.mkdir(parents=True, exist_ok=True)
        written = [write.write_numbers(report, out), *write.write_page(report, out, console.bar)]
    if options.json:
        console.print_json("report", summary(report, written))
    else:
        print_line(advice(report))
        size = console.format_bytes(written[1].stat().st_size)
        print(f"{written[1]}: {size}; beside it {write.JSON} and {len(written) - 2} PNGs")
    console.check_finite([c.name for c in report.caches if c.perplexity is None or c.kl is None])
    if slices.pressed:
        raise KeyboardInterrupt(f"{OF_READ_WINDOWS}, and times may be missing{kept}")


def _read(options: argparse.Namespace) -> schema.CacheReport:
    conflicts = [name for name, default in REPLACED.items() if getattr(options, name) != default]
    if conflicts:
        raise console.UserError(
            "--from redraws a report: leave out"
            f" {' and '.join(_argument(name) for name in conflicts)}"
        )
    with console.input_errors():
        return schema.read(options.source)


def _made(options: argparse.Namespace, slices: UntilPressed) -> schema.CacheReport:
    missing = [name for name in SOURCES if not getattr(options, name)]
    if missing:
        raise console.UserError(
            f"kvq report needs {' and '.join(_argument(name) for name in missing)}, or --from a"
            " report.json"
        )
    names = [name for name, _ in options.cache]
    ((name, count),) = Counter(names).most_common(1)
    if count > 1:
        raise console.UserError(f"--cache {name} is given {count} times")
    config, text, settings, files = text_evaluation.checked(options)
    shown = _contexts(options, config)
    inputs.output_directory(options.out)  # fails now rather than at the end
    plain = load_model(options)
    models = prepared(plain, [spec for _, spec in options.cache], files)
    candidates = [
        times.PreparedCache(name, spec, llama)
        for name, (llama, spec) in zip(names, models, strict=True)
    ]
    window = min(settings.window, text.ids.size)
    text_evaluation.warn_if_nothing_quantized(options.cache, config, window, settings)
    sample = min(options.sample, text.ids.size, config.positions)
    plan = ReportPlan(
        options.model,
        options.text,
        command(options, settings, shown),
        settings,
        options.buckets,
        shown,
        options.steps,
        sample,
    )
    return collect(plan, plain, candidates, text, slices, slices.whole)


def _contexts(options: argparse.Namespace, config: LlamaConfig) -> tuple[int, ...]:
    positions = config.positions
    chosen = options.contexts
    if chosen is None:
        reached = [n for n in CONTEXTS if options.steps < n < positions]
        chosen = (*reached, *([positions] if options.steps < positions <= CONTEXTS[-1] else []))
        if not chosen and options.steps > STEPS:
            raise console.UserError(
                f"--steps {options.steps} has no context within the model's {positions} positions;"
                " give fewer"
            )
    beyond = [n for n in chosen if n > positions]
    if beyond:
        raise console.UserError(
            f"--contexts {beyond[0]} is beyond the {positions} positions of the model"
        )
    if chosen and chosen[0] <= options.steps:
        raise console.UserError(
            f"--contexts {chosen[0]} has no room for {options.steps + 1} steps; give more tokens,"
            " or fewer --steps"
        )
    return chosen


def _argument(name: str) -> str:
    return "MODEL" if name == "model" else f"--{name}"


def command(options: argparse.Namespace, settings: Settings, shown: tuple[int, ...]) -> str:
    """Return a command line that makes the same report, with the chosen defaults written out."""
    parts: list[Any] = ["kvq", "report", options.model, "--text", options.text]
    for name, _ in options.cache:
        parts += ["--cache", name]
    for file in options.calibration or []:
        parts += ["--calibration", file]
    parts += ["--window", settings.window, "--stride", settings.stride]
    defaults = {"mode": "decode", "prompt": 0, "batch": BATCH}
    if settings.mode == "chunked":
        defaults["chunk"] = CHUNK
    elif settings.mode == "decode":
        defaults["step"] = STEP
    for name, default in defaults.items():
        if getattr(settings, name) != default:
            parts += [f"--{name}", getattr(settings, name)]
    for name, default in (
        ("limit", None),
        ("buckets", BUCKETS),
        ("steps", STEPS),
        ("sample", SAMPLE),
        ("weights", None),
        ("activations", "float32"),
    ):
        if getattr(options, name) != default:
            parts += [f"--{name}", getattr(options, name)]
    parts += ["--contexts", ",".join(map(str, shown)) or NO_CONTEXTS]
    parts += ["--dtype", options.dtype, "--out", options.out]
    return shlex.join(map(str, parts))


def summary(report: schema.CacheReport, written: list[Path]) -> dict[str, Any]:
    """Return the written files and the main numbers of each cache, for --json. report.json has the
    rest."""
    on_front = zip(front_by(report, "kl"), front_by(report, "perplexity"), strict=True)
    return {
        "command": report.command,
        "files": [str(file) for file in written],
        "exact_perplexity": report.exact.perplexity,
        "verdict": verdict(report),
        "caches": [
            {
                "name": c.name,
                "perplexity": c.perplexity,
                "kl": c.kl,
                "agreement": c.agreement,
                "flips": len(c.flips),
                "cache_bytes": c.bytes,
                "bits_per_element": c.bits_per_element,
                "quantized_tokens": c.quantized_tokens,
                "front_by_kl": by_kl,
                "front_by_perplexity": by_perplexity,
            }
            for c, (by_kl, by_perplexity) in zip(report.caches, on_front, strict=True)
        ],
    }
