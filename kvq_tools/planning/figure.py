"""Draw a plan: KL over stored bits, predicted and measured."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import kvq_jax as kvq
from kvq_jax.files.whole import replacing
from kvq_tools.planning.defaults import KEY_BASES, VALUE_BASES, Bases

DPI = 130
LINES, MARKERS = {"pairs": "-", "eigen": "--"}, {"eigen": "o", "rotation": "s"}


def missing() -> str | None:
    """Return what to install if drawing is not possible, or None."""
    if importlib.util.find_spec("matplotlib"):
        return None
    return "a picture needs matplotlib: pip install 'kvq-jax[report]'"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the caches of a plan (`kvq plan --json`) as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    names = {cache["name"]: kvq.parse(cache["name"]).k for cache in result["caches"]}
    for keys, values in itertools.product(KEY_BASES, VALUE_BASES):
        bases, style = Bases(keys, values), LINES[keys] + MARKERS[values]
        ours = sorted(
            (cache["body_bits_per_element"], cache["predicted_kl"])
            for cache in result["caches"]
            if cache["predicted_kl"] is not None and Bases.of(names[cache["name"]]) == bases
        )
        if ours:
            label = f"{bases.spec()}, predicted"
            axes.plot(*zip(*ours, strict=True), style, color="#2f6fd0", mfc="white", label=label)
    measured = [cache for cache in result["caches"] if cache["measured_kl"] is not None]
    for cache in measured:
        other = cache["predicted_kl"] is None
        axes.plot(
            cache["body_bits_per_element"],
            cache["measured_kl"],
            "s" if other else "o",
            color="#d0521b" if other else "#2f6fd0",
        )
        label = (
            cache["name"].partition(",")[0]
            if other
            else "the plan"
            if cache["name"] == result["chosen"]
            else "waterfill"
        )
        axes.annotate(
            label,
            (cache["body_bits_per_element"], cache["measured_kl"]),
            xytext=(5, 4),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set(
        xlabel="stored bits of an element",
        ylabel="KL to full precision, nats per token",
        title=f"Caches of {result['model']}",
    )
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=DPI, format="png")
