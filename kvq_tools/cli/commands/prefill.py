"""`kvq prefill`: read a prompt once and save its cache, from which `kvq generate --from`
continues."""

from __future__ import annotations

import argparse
import time

import jax

import kvq_jax as kvq
from kvq_models.inference import decoding, prompts
from kvq_models.inference.method_parameters import prepare
from kvq_models.llama.packed_loading import fingerprint
from kvq_tools.cli import console, device_memory, handover, inputs
from kvq_tools.cli.model_loading import load_model
from kvq_tools.cli.one_prompt import prompt_from_options
from kvq_tools.cli.options.prefill import ROOM
from kvq_tools.cli.reading import reading
from kvq_tools.cli.tables import print_line


def run(options: argparse.Namespace) -> None:
    config = inputs.read_config(options.model, options.cache)
    inputs.check_calibration_option(options, config)
    _, prompt, opening = prompt_from_options(options, config)
    out = inputs.output_file(options)
    capacity = options.capacity or len(prompt) + ROOM
    if capacity < len(prompt):
        raise console.UserError(
            f"the prompt has {len(prompt)} tokens, over the capacity of {capacity}"
        )
    inputs.warn_beyond(capacity, config)
    layout = kvq.cache.layout(options.cache.spec, config, 1, capacity, inputs.rows_dtype(options))
    device_memory.check_readable(layout, options.implementation)
    llama = load_model(options)
    model_fingerprint = fingerprint(llama)
    with console.input_errors():
        llama = prepare(llama, options.cache.spec, options.calibration, progress=console.bar)
        cache = device_memory.new_cache(
            options.cache.spec, llama.config, capacity, inputs.rows_dtype(options)
        )
    tokens, lengths = decoding.checked_tokens(llama, cache, [prompt], None)
    arguments, implementation = (llama, cache, tokens, lengths), options.implementation
    with console.progress("compiling"):
        for program in prompts.lowered_prompt(*arguments, implementation=implementation):
            program.compile()
    started = time.perf_counter()
    with reading(len(prompt), config.num_hidden_layers):
        logits, cache = jax.block_until_ready(
            prompts.read_prompt(*arguments, implementation=implementation)
        )
    seconds = time.perf_counter() - started
    console.check_finite([] if bool(jax.numpy.isfinite(logits).all()) else [options.cache.text])
    handover.save(out, llama, model_fingerprint, cache, prompt, logits, opening)
    result = {
        "model": options.model,
        "cache": str(cache.spec),
        "out": str(out),
        "prompt_tokens": len(prompt),
        "quantized_tokens": kvq.size.quantized_tokens(cache, len(prompt)),
        "capacity": capacity,
        "cache_bytes": kvq.size.nbytes(cache),
        "bytes": out.stat().st_size,
        "seconds": seconds,
        "dtype": inputs.model_dtype(options),
        "rows_dtype": cache.dtype,
        "calibration": options.calibration,
    }
    if options.json:
        console.print_json("prefill", result)
        return
    print_line(
        f"[{out}: {console.format_bytes(result['bytes'])}, the cache {options.cache.text} of"
        f" {console.counted(len(prompt), 'prompt tokens')}, {result['quantized_tokens']} of them"
        f" quantized, with room for {capacity}; read in {seconds:.3f} s]"
    )
