"""Print the scores of `kvq passkey`, `kvq niah` and `kvq ruler`."""

from __future__ import annotations

from typing import Any

from kvq_tools.cli import inputs, resident
from kvq_tools.cli.console import format_bytes
from kvq_tools.cli.tables import print_table


def print_scores(result: dict[str, Any]) -> None:
    """Print the rules of a task, the scores of each cache, and the scores by each label."""
    for name, rule in result["rules"].items():
        print(f"{name}: {rule}".replace("\n", "\\n"))
    first = result["caches"][0]
    metrics = list(first["scores"])
    title = (
        f"\n{result['model']}: {result['task']}, {result['samples']} samples with prompts of"
        f" {result['prompt_tokens'][0]} to {result['prompt_tokens'][1]} tokens; scores in percent;"
        f" bytes at {first['capacity']} tokens; {result['dtype']}"
    )
    rows = [
        (
            c["name"],
            *(_percent(c["scores"][m]) for m in metrics),
            inputs.quantized_in_words(c["quantized_tokens"]),
            format_bytes(c["cache_bytes"]),
            f"{c['ratio']:.2f}",
            f"{c['bits_per_element']:.2f}",
            *resident.cells(c),
        )
        for c in result["caches"]
    ]
    columns = (
        "cache",
        *metrics,
        "quantized tokens",
        "cache bytes",
        "ratio to bf16",
        "bits/element",
        *resident.columns(result["caches"]),
    )
    print_table(title, columns, rows, numeric=columns[1:])
    for label, parts in first["by"].items():
        if len(parts) > 1:
            columns = ("cache", *(f"{part[label]} ({part['samples']})" for part in parts))
            rows = [
                (c["name"], *(_percent(part[metrics[0]]) for part in c["by"][label]))
                for c in result["caches"]
            ]
            print_table(f"{metrics[0]} by {label} (samples)", columns, rows, numeric=columns[1:])


def _percent(score: float) -> str:
    return f"{100 * score:.1f}"
