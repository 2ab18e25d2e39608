"""`kvq calibrate`: fit the parameters that a cache needs, from a model and a text."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from kvq_models.calibration import fit
from kvq_models.calibration.file import Calibration, save_calibration
from kvq_models.calibration.store import Store
from kvq_models.llama.checkpoint import load_llama
from kvq_tools.cli import console, inputs, interruption, text_input
from kvq_tools.cli.options.calibrate import LENGTH
from kvq_tools.cli.tables import layer_runs, print_line, print_table


def run(options: argparse.Namespace) -> None:
    out = inputs.output_file(options)
    work = inputs.output_directory(options.work or f"{out}.work", "--work")
    ids, length = _checked(options)
    with console.loading(options.model), console.input_errors():
        llama, _ = load_llama(options.model, dtype=options.dtype, weights="dense")
    started = time.perf_counter()
    with (
        interruption.advised(f"the same command continues from {str(work)!r}"),
        console.input_errors(),
    ):
        calibration = fit.calibrate(
            llama,
            ids,
            options.cache.spec,
            samples=options.samples,
            length=length,
            seed=options.seed,
            work=work,
            text=Path(options.text).name,
            progress=console.bar,
        )
        save_calibration(calibration, out)
    if options.work is None:
        Store.delete(work)
    result = report(calibration, options, len(ids), time.perf_counter() - started)
    if options.json:
        console.print_json("calibrate", result)
    else:
        _print(result)


def _checked(options: argparse.Namespace) -> tuple[list[int], int]:
    """Check everything that needs no weights, and return (the text's tokens, tokens per sample)."""
    config = inputs.read_config(options.model, options.cache)
    length = options.length or min(LENGTH, config.positions)
    inputs.warn_beyond(length, config, "samples of ")
    tokenizer = text_input.need_tokenizer(options.model, "read the text")
    ids = text_input.encode(tokenizer, text_input.read_text(options.text))
    text_input.check_enough_text(ids, length)
    with console.input_errors():
        fit.check_request(options.cache.spec, config, ids, options.samples, length)
    return ids, length


def report(
    calibration: Calibration, options: argparse.Namespace, text_tokens: int, seconds: float
) -> dict[str, Any]:
    """Return the facts about the new calibration."""
    origin = calibration.origin
    sides = [
        [calibration.keys.get(f"layers.{layer}.{side}") for side in ("k", "v")]
        for layer in range(calibration.dims.num_hidden_layers)
    ]
    return {
        "file": options.out,
        "bytes": Path(options.out).stat().st_size,
        "seconds": seconds,
        "model": options.model,
        "cache": calibration.spec,
        "text": origin.text,
        "text_tokens": text_tokens,
        "samples": origin.samples,
        "length": origin.length,
        "seed": origin.seed,
        "dtype": origin.dtype,
        "loss": origin.loss,
        "work": options.work,
        "layers": [{"layer": layer, "k": k, "v": v} for layer, (k, v) in enumerate(sides)],
    }


def _print(result: dict[str, Any]) -> None:
    rows = [
        {"layers": label, "keys": layer["k"] or "need none", "values": layer["v"] or "need none"}
        for label, layer in layer_runs(result["layers"], ("k", "v"))
    ]
    print_table(f"{result['file']}: parameters fitted for {result['cache']}", rows, texts=None)
    print_line(
        f"[{result['file']}: {console.format_bytes(result['bytes'])};"
        f" {console.counted(result['samples'], 'samples')} of {result['length']} tokens out of"
        f" {result['text_tokens']} of {result['text']}, seed {result['seed']},"
        f" {result['dtype']}; the model's loss on them {result['loss']:.3f} nats per"
        f" token; {result['seconds']:.1f} s]"
    )
    print_line(
        f"use it: kvq generate {result['model']} --prompt P --cache '{result['cache']}'"
        f" --calibration {result['file']}"
    )
