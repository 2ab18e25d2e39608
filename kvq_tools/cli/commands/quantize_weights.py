"""`kvq quantize-weights`: write a checkpoint whose weights take only a few distinct values, as an
ordinary one or packed in 4 bits."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax

from kvq_models.calibration.weights import WeightCount, check_request, quantize_weights
from kvq_models.llama import checkpoint
from kvq_models.llama.packed_weights import is_packed
from kvq_tools.cli import inputs, text_input
from kvq_tools.cli.console import bar, format_bytes, input_errors, loading, print_json, progress
from kvq_tools.cli.options.quantize_weights import LENGTH
from kvq_tools.cli.tables import print_line
from kvq_tools.evaluation.text import passage

STORED_DTYPES = {"BF16": "bfloat16", "F16": "float16"}


def run(options: argparse.Namespace) -> None:
    config = inputs.read_config(options.model)
    inputs.output_directory(options.out, empty=True)
    text = passage() if options.text is None else text_input.read_text(options.text)
    length = options.length or min(LENGTH, config.positions)
    inputs.warn_beyond(length, config, "samples of ")
    ids = text_input.encode(text_input.need_tokenizer(options.model, "read the text"), text)
    text_input.check_enough_text(ids, length)
    with input_errors():
        sizes = (options.bits, options.sparse, options.samples, length)
        check_request(config, ids, *sizes, packed=options.packed)
    with loading(options.model), input_errors():
        source = checkpoint.open_checkpoint(options.model)
        llama = checkpoint.load_weights(source, dtype="float32", weights="dense")
    started = time.perf_counter()
    with input_errors():
        quantized, count = quantize_weights(
            llama,
            ids,
            bits=options.bits,
            sparse=options.sparse,
            packed=options.packed,
            samples=options.samples,
            length=length,
            seed=options.seed,
            progress=bar,
        )
    seconds = time.perf_counter() - started
    stored = {header.dtype for header in source.tensors.values()}
    dtype = STORED_DTYPES.get(stored.pop(), "float32") if len(stored) == 1 else "float32"
    with progress(f"writing {options.out}"), input_errors():
        narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), quantized, is_leaf=is_packed)
        checkpoint.save_checkpoint(narrow, options.out, source.write_tokenizer)
    result = report(options, count, dtype, length, seconds)
    if options.json:
        print_json("quantize-weights", result)
    else:
        _print(result)


def report(
    options: argparse.Namespace, count: WeightCount, dtype: str, length: int, seconds: float
) -> dict[str, Any]:
    """Return the facts about the new checkpoint."""
    return {
        "model": options.model,
        "out": options.out,
        "bytes": sum(file.stat().st_size for file in Path(options.out).iterdir()),
        "dtype": dtype,
        "bits": options.bits,
        "sparse": options.sparse,
        "packed": options.packed,
        "weights": count.weights,
        "bits_per_weight": count.bits,
        "weighted_error": count.weighted_error,
        "text": options.text,
        "samples": options.samples,
        "length": length,
        "seed": options.seed,
        "seconds": seconds,
    }


def _print(done: dict[str, Any]) -> None:
    form, if_packed = ("packed", "") if done["packed"] else ("dequantized", " if they were packed")
    print_line(
        f"[{done['out']}: {format_bytes(done['bytes'])} in {done['dtype']}, {form};"
        f" {done['weights']} weights at the nearest of {2 ** done['bits']} values for each output"
        f" channel, {done['bits_per_weight']:.2f} bits each{if_packed}; their error is"
        f" {done['weighted_error']:.1e} of them, weighted as in the fit; {done['seconds']:.0f} s]"
    )
    print_line(f"use it: kvq eval {done['out']} --text F --cache dense --cache kivi:bits=4")
