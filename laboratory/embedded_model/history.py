"""Losses of a training run: kept as JSON, and drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvq_jax.files import whole


def read_history(out: Path) -> list[dict[str, Any]]:
    file = out / "history.json"
    return json.loads(file.read_text()) if file.exists() else []


def write_history(out: Path, history: list[dict[str, Any]]) -> None:
    whole.write(
        out / "history.json", "[\n" + ",\n".join(json.dumps(entry) for entry in history) + "\n]\n"
    )


def plot_history(history: list[dict[str, Any]], file: Path) -> None:
    """Plot the loss against tokens: every step, a running mean, and the held-out text."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    millions = np.cumsum([entry["tokens"] for entry in history]) / 1e6
    losses = np.array([entry["loss"] for entry in history])
    window = min(25, len(losses))
    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    axes.plot(
        millions, losses, linewidth=0.4, alpha=0.5, label="training rows (text and synthetic)"
    )
    axes.plot(
        millions[window - 1 :],
        np.convolve(losses, np.ones(window) / window, "valid"),
        label=f"mean of {window} steps",
    )
    probed = [
        (x, entry["held_out_loss"])
        for x, entry in zip(millions, history, strict=True)
        if "held_out_loss" in entry
    ]
    if probed:
        axes.plot(*zip(*probed, strict=True), "k.-", label="held-out text")
    axes.set(xlabel="million tokens", ylabel="nats per token")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    with whole.replacing(file) as unfinished:
        figure.savefig(unfinished, dpi=90, format="png")
    pyplot.close(figure)
