"""`kvq eval --protocol`: compare caches on a text by the protocol of docs/evaluation.md."""

from __future__ import annotations

import argparse
from typing import Any

import kvq_jax as kvq
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import cache_sizes, inputs, text_input
from kvq_tools.cli.console import UserError, check_finite, input_errors, print_json
from kvq_tools.cli.model_loading import load_model, prepared
from kvq_tools.cli.tables import number, print_line, print_table
from kvq_tools.cli.until_pressed import OF_READ_WINDOWS, UntilPressed, first_batch
from kvq_tools.evaluation.defaults import BATCH, BUCKETS, CACHE_DTYPE
from kvq_tools.evaluation.intervals import EACH, Estimate
from kvq_tools.evaluation.protocol import (
    DECODED_FROM,
    READINGS,
    RECENT,
    SINK,
    WORDS,
    Measured,
    Reading,
    ScoredText,
    Sizes,
    choice,
    cut,
    exact_share,
    measure,
    tokenized,
    windowed,
)
from kvq_tools.evaluation.results import finite
from kvq_tools.report.verdict import sentence

MIN_WINDOWS = 4  # windows that a default context leaves: intervals are over windows
# options that the protocol sets, and what they are if they were not given
REFUSED = {
    **dict.fromkeys(("stride", "chunk", "prompt", "step", "limit", "mesh")),
    "mode": "decode",
    "batch": BATCH,
    "buckets": BUCKETS,
    "flips": False,
}


def run(options: argparse.Namespace) -> None:
    """Measure the caches in both readings and print a table and a verdict for each. Everything that
    needs no weights is checked before they are read."""
    for name, default in REFUSED.items():
        if getattr(options, name) != default:
            raise UserError(f"--{name} is not for --protocol, which sets how a text is read")
    options.dtype = inputs.model_dtype(options)
    config = inputs.read_config(options.model, *options.cache)
    files = inputs.calibrations(config, options.cache, options.calibration or [])
    tokenizer = text_input.need_tokenizer(options.model, "read the text")
    text = tokenized(tokenizer, "text", text_input.read_text(options.text))
    with input_errors():
        sizes = sizes_for(config, text, options.window)
        rows = cut(text, sizes, tokenizer.bos_token_id)
        specs = [windowed(spec, config, sizes) for _, spec in options.cache]
    models = prepared(load_model(options), specs, files)
    kept, slices = {}, UntilPressed(first_batch)
    measured: dict[Reading, list[Measured]] = {}
    for reading in READINGS:
        if numbers := measure(models, rows, range(len(rows)), sizes, reading, kept, slices):
            measured[reading] = numbers
    names = [name for name, _ in options.cache]
    result = {
        "model": options.model,
        "text": options.text,
        "dtype": options.dtype,
        "activations": options.activations,
        "context": sizes.context,
        "scored": sizes.scored,
        "text_windows": sizes.windows,
        "caches": [
            _cache(name, spec, config, sizes, {r: numbers[i] for r, numbers in measured.items()})
            for i, (name, spec) in enumerate(zip(names, specs, strict=True))
        ],
        "verdicts": {
            reading: _verdict(names, specs, config, sizes, numbers)
            for reading, numbers in measured.items()
        },
    }
    if options.json:
        print_json("protocol", result)
    else:
        _print(result)
    check_finite(
        [c["name"] for c in result["caches"] for reading in measured if c[reading]["kl"] is None]
    )
    if slices.pressed:
        raise KeyboardInterrupt(OF_READ_WINDOWS)


def sizes_for(config: LlamaConfig, text: ScoredText, context: int | None) -> Sizes:
    """Return the sizes for a text: the context asked for, or the longest up to the protocol's that
    the model has positions for and that leaves MIN_WINDOWS windows."""
    scored, tokens = min(Sizes.scored, config.positions // 8), text.ids.size
    fitting = min(config.positions, tokens // MIN_WINDOWS) - scored - 1
    # a text with room for fewer windows is refused below, in its tokens
    chosen = min(Sizes.context, max(fitting, DECODED_FROM + 1)) if context is None else context
    if chosen + scored + 1 > config.positions:
        raise ValueError(
            f"a window of {chosen} tokens and {scored} scored ones is beyond the"
            f" {config.positions} positions of the model"
        )
    windows = min(Sizes.windows, tokens // (chosen + scored + 1)) if chosen > 0 else 0
    if windows < 2:
        raise ValueError(
            f"the protocol compares windows, and a text of {tokens} tokens has fewer than two of"
            f" {max(chosen, 1)} tokens and {scored} scored ones: give a longer text, or a shorter"
            " --window"
        )
    return Sizes(chosen, scored, windows)


def _cache(
    name: str,
    spec: kvq.cache.CacheSpec,
    config: LlamaConfig,
    sizes: Sizes,
    measured: dict[Reading, Measured],
) -> dict[str, Any]:
    return {
        "name": name,
        "cache": str(spec),
        "windows": cache_sizes.windows(spec),
        "exact_share": exact_share(spec, config, sizes),
        "resident_by_batch": cache_sizes.by_batch(spec, config, sizes.width, CACHE_DTYPE),
        **{
            reading: {
                **_estimate("kl", numbers.kl(numbers.every_window)),
                "kl_median": finite(numbers.median),
                "kl_p999": finite(numbers.p999),
                "agreement": numbers.agreement(numbers.every_window),
                **_estimate("perplexity", numbers.perplexity(numbers.every_window)),
                "rounding": finite(numbers.rounding),
                "window_kl": [finite(kl) for kl in numbers.window_kl],
            }
            for reading, numbers in measured.items()
        },
    }


def _estimate(name: str, estimate: Estimate) -> dict[str, Any]:
    return {
        name: finite(estimate.value),
        f"{name}_interval": [finite(limit) for limit in estimate.interval],
    }


def _verdict(
    names: list[str],
    specs: list[kvq.cache.CacheSpec],
    config: LlamaConfig,
    sizes: Sizes,
    measured: list[Measured],
) -> str:
    return sentence(
        [
            choice(
                name,
                spec,
                kvq.size.of(spec, config, 1, sizes.width).resident_bits,
                numbers,
                numbers.every_window,
                exact_share(spec, config, sizes),
            )
            for name, spec, numbers in zip(names, specs, measured, strict=True)
        ]
    )


def _print(result: dict[str, Any]) -> None:
    print_line(
        f"{result['model']} on {result['text']}: {result['text_windows']} windows of"
        f" {result['context']} tokens and {result['scored']} scored ones; the first {SINK} and the"
        f" newest {RECENT} tokens are exact in every cache"
    )
    for reading in result["verdicts"]:
        rows = [
            {
                "cache": cache["name"],
                "exact": f"{cache['exact_share']:.1%}",
                "KL": _with_interval(cache[reading], "kl", ".5f"),
                "median": number(cache[reading]["kl_median"], ".2g"),
                "99.9 %": number(cache[reading]["kl_p999"], ".2g"),
                "same top token": f"{cache[reading]['agreement']:.2%}",
                "perplexity": _with_interval(cache[reading], "perplexity", ".2f"),
                **cache_sizes.resident_cells(cache),
            }
            for cache in result["caches"]
        ]
        complete = len(result["caches"][0][reading]["window_kl"])
        part = f", {complete} windows" * (complete < result["text_windows"])
        print_table(WORDS[reading] + part, rows)
        print_line(result["verdicts"][reading])
    print_line(f"{EACH}.")


def _with_interval(numbers: dict[str, Any], name: str, form: str) -> str:
    value, (low, high) = numbers[name], numbers[f"{name}_interval"]
    if value is None:
        return "-"
    if low is None or high is None:
        return f"{value:{form}}"
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"
