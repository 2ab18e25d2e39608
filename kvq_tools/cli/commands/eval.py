"""`kvq eval`: compare caches by a model's predictions of a text."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import kvq_jax as kvq
from kvq_jax.cache.size import COMPARED_BATCHES
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import cache_sizes, mesh, protocol_evaluation, text_evaluation
from kvq_tools.cli.console import UserError, check_finite, counted, format_bytes, print_json
from kvq_tools.cli.model_loading import load_model, prepared
from kvq_tools.cli.tables import number, print_table
from kvq_tools.cli.until_pressed import OF_READ_WINDOWS, UntilPressed, first_batch
from kvq_tools.evaluation.defaults import CACHE_DTYPE
from kvq_tools.evaluation.results import Evaluation, finite
from kvq_tools.evaluation.run import evaluate_caches
from kvq_tools.evaluation.settings import Settings
from kvq_tools.evaluation.text import TokenizedText

MODEL_ROW = "no cache"


def run(options: argparse.Namespace) -> None:
    if options.protocol:
        protocol_evaluation.run(options)
        return
    if options.flips and not options.json:
        raise UserError("--flips lists positions in the output of --json: add it")
    config, text, settings, files = text_evaluation.checked(options)
    window = min(settings.window, text.ids.size)
    specs = [spec for _, spec in options.cache]
    placement = mesh.placement_of(
        options.mesh, specs, config, settings.batch, window, options.dtype
    )
    models = prepared(load_model(options, placement), specs, files)
    text_evaluation.warn_if_nothing_quantized(options.cache, config, window, settings)
    slices, started = UntilPressed(first_batch), time.perf_counter()
    evaluations = evaluate_caches(
        models,
        text.ids,
        **settings._asdict(),
        token_bytes=text.bytes,
        progress=slices,
        placement=placement,
    )
    result = report(options, config, text, settings, evaluations, time.perf_counter() - started)
    if options.json:
        print_json("eval", result)
    else:
        _print(result)
    check_finite(
        [
            name
            for (name, _), evaluation in zip(options.cache, evaluations, strict=True)
            if not evaluation.finite
        ]
    )
    if slices.pressed:
        raise KeyboardInterrupt(OF_READ_WINDOWS)


def report(
    options: argparse.Namespace,
    config: LlamaConfig,
    text: TokenizedText,
    settings: Settings,
    evaluations: Sequence[Evaluation],
    seconds: float,
) -> dict[str, Any]:
    """Return all numbers, from the evaluations of the caches in their order."""
    first = evaluations[0]
    parts = first.by_position(options.buckets)
    return {
        "model": options.model,
        "text": options.text,
        "text_tokens": text.ids.size,
        "scored_tokens": first.tokens,
        "scored_bytes": first.utf8_bytes,
        **settings.stated(),
        "dtype": options.dtype,
        "activations": options.activations,
        "capacity": first.window,
        "read_tokens": settings.read_tokens(first.window),
        "bf16_bytes": kvq.size.dense_nbytes(config, 1, first.window),
        "seconds": seconds,
        "positions": [{"first": b.first, "last": b.last, "tokens": b.tokens} for b in parts],
        "exact": {
            "perplexity": finite(first.exact_perplexity),
            "bits_per_byte": finite(first.exact_bits_per_byte),
            "by_position": {"nats": [finite(b.exact_nats) for b in parts]},
        },
        "caches": [
            _cache_report(name, e, config, options, settings)
            for (name, _), e in zip(options.cache, evaluations, strict=True)
        ],
    }


def _cache_report(
    name: str,
    evaluation: Evaluation,
    config: LlamaConfig,
    options: argparse.Namespace,
    settings: Settings,
) -> dict[str, Any]:
    spec, parts = evaluation.spec, evaluation.by_position(options.buckets)
    layout = kvq.cache.layout(spec, config, 1, evaluation.window, CACHE_DTYPE)
    return {
        "name": name,
        "cache": str(spec),
        "perplexity": finite(evaluation.perplexity),
        "bits_per_byte": finite(evaluation.bits_per_byte),
        "kl": finite(evaluation.mean_kl),
        "agreement": evaluation.agreement,
        "flips": evaluation.flips.size,
        "quantized_tokens": settings.quantized_tokens(layout),
        **cache_sizes.of(spec, config, evaluation.window, CACHE_DTYPE),
        "windows": cache_sizes.windows(spec),
        "prompt_statistics": kvq.cache.has_prompt_statistics(spec, config),
        "by_position": {
            "nats": [finite(b.nats) for b in parts],
            "kl": [finite(b.kl) for b in parts],
            "flips": [b.flips for b in parts],
        },
        **({"flip_positions": evaluation.flips.tolist()} if options.flips else {}),
    }


def _print(result: dict[str, Any]) -> None:
    bf16 = result["bf16_bytes"]
    bf16_by_batch = [{"batch": batch, "bytes": batch * bf16} for batch in COMPARED_BATCHES]
    rows = [
        {
            "cache": MODEL_ROW,
            **_predictions(result["exact"]),
            "KL": "",
            "top-1 agreement": "",
            "quantized tokens": "",
            "cache bytes": format_bytes(bf16),
            "ratio to bf16": "1.00",
            "bits/element": "16.00",
            **cache_sizes.resident_cells({"resident_by_batch": bf16_by_batch}),
        }
    ]
    rows += [
        {
            "cache": c["name"],
            **_predictions(c),
            "KL": number(c["kl"], ".5f"),
            "top-1 agreement": f"{c['agreement']:.2%}",
            **cache_sizes.size_cells(c, result["read_tokens"]),
        }
        for c in result["caches"]
    ]
    rounding = " with int8 activations" if result["activations"] == "int8" else ""
    title = (
        f"{result['model']} on {result['text']}: {result['scored_tokens']} of"
        f" {result['text_tokens']} tokens scored in windows of {result['capacity']} by"
        f" {result['stride']}, mode {result['mode']}{_detail(result)}, {result['dtype']}"
        f"{rounding}, {result['seconds']:.0f} s"
    )
    print_table(title, rows)
    _print_positions(result)


def _predictions(numbers: dict[str, Any]) -> dict[str, str]:
    return {
        "perplexity": number(numbers["perplexity"], ".3f"),
        "bits/byte": number(numbers["bits_per_byte"], ".4f"),
    }


def _detail(result: dict[str, Any]) -> str:
    if result["mode"] == "chunked":
        return f" ({counted(result['chunk'], 'tokens')} at a time)"
    prompt = result["prompt"]
    return f" (after a prompt of {counted(prompt, 'tokens')})" if prompt else ""


def _print_positions(result: dict[str, Any]) -> None:
    """Print the numbers by position, without the parts of a window in which nothing was scored."""
    parts, names = result["positions"], ("by position in the window", "")

    def row(
        name: str, what: str, values: Sequence[float | int | None], form: str
    ) -> dict[str, str]:
        numbers = {
            f"{part['first']}-{part['last']}": number(value, form)
            for part, value in zip(parts, values, strict=True)
            if part["tokens"]
        }
        return dict(zip(names, (name, what), strict=True)) | numbers

    rows = [
        row(MODEL_ROW, "tokens", [part["tokens"] for part in parts], ".0f"),
        row("", "nats", result["exact"]["by_position"]["nats"], ".4f"),
    ]
    for c in result["caches"]:
        by = c["by_position"]
        rows += [
            row(c["name"], "nats", by["nats"], ".4f"),
            row("", "KL", by["kl"], ".5f"),
            row("", "flips", by["flips"], ".0f"),
        ]
    print_table("", rows, texts=names)
