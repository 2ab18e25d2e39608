"""Print the table of `kvq plan`."""

from __future__ import annotations

import argparse
from typing import Any

import kvq_jax as kvq
from kvq_tools.cli import cache_sizes
from kvq_tools.cli.console import format_bytes
from kvq_tools.cli.tables import print_line, print_table
from kvq_tools.planning.defaults import METHOD, Bases
from kvq_tools.planning.measuring import FACTOR


def print_plan(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the caches of a plan, how far predictions were off, and how to use the chosen cache."""
    rows = [
        {
            "": ">" if cache["name"] == result["chosen"] else "",
            "cache": _short(cache["name"]),
            "stored bits": f"{cache['body_bits_per_element']:.3f}",
            "bytes": format_bytes(cache["bytes"]),
            "smaller than bf16, times": f"{result['bf16_bytes'] / cache['bytes']:.2f}",
            **cache_sizes.resident_cells(cache),
            "predicted KL": _number(cache["predicted_kl"]),
            "measured KL": _number(cache["measured_kl"]),
            **(_other_cells(cache) if result["other_text"] else {}),
        }
        for cache in result["caches"]
    ]
    title = f"{result['model']}, {result['batch']} x {result['context']} tokens"
    print_table(title, rows, texts=("", "cache"))
    error = result["prediction"]
    if all(cache["predicted_kl"] is None for cache in result["caches"]):
        print_line("values in a rotation have no prediction of KL: --text measures it")
    elif error is None:
        print_line(
            "KL in nats per token, to second order, of tokens outside the windows: this ranks"
            " budgets; kvq eval measures one"
        )
    else:
        kind = "they only rank caches" if error["ranks_only"] else f"within a factor of {FACTOR:g}"
        print_line(
            f"KL in nats per token, on {result['text']} and {result['other_text']}."
            " Predictions add up the costs of sides; on windows that nothing else saw"
            f" the worst is {error['factor']:.2f} times off: {kind}"
        )
        print_line(comparison(result))
    for path, written in ((options.out, "the cache"), (options.picture, "the picture")):
        if path:
            print_line(f"[{path}: {written}]")
    if "key_basis=eigen" in result["chosen"]:
        print_line(
            "on GPUs key_basis=eigen is read by Mosaic GPU kernels (JAX 0.11 or newer); --key-basis"
            " pairs by Triton's too"
        )
    calibration = f" --calibration {result['calibration']}" if METHOD in result["chosen"] else ""
    cache = options.out or f"'{result['chosen']}'{calibration}"
    print_line(f"use it: kvq generate {result['model']} --prompt P --cache {cache}")


def _other_cells(cache: dict[str, Any]) -> dict[str, str]:
    cells = {
        f"{kind} KL, other text": _number(cache[f"{kind}_kl_on_other_text"])
        for kind in ("predicted", "measured")
    }
    low, high = cache["over_chosen_interval"] or (None, None)
    times = "" if low is None else f"{cache['over_chosen']:.2f} [{low:.2f}, {high:.2f}]"
    return cells | {"compared KL": _number(cache["compared_kl"]), "times that of >": times}


def comparison(result: dict[str, Any]) -> str:
    """Return in words how the chosen cache was chosen, and from which others it is not told
    apart."""
    close = [
        _short(cache["name"])
        for cache in result["caches"]
        if cache["compared_kl"] is not None and cache["name"] != result["chosen"]
        # without a limit nothing is told apart
        if not (cache["over_chosen_interval"][0] or 0) > 1
    ]
    apart = f"it is not told apart from {', '.join(close)}" if close else "all others have more"
    return (
        "compared KL is the geometric mean over both texts, (1 + 2s) times if a cache keeps a share"
        f" s more of the windows exact; > has the least, and on these windows {apart} (95 %"
        " intervals). They chose it, so its KL on other windows is rather higher"
    )


def _number(kl: float | None) -> str:
    return "" if kl is None else f"{kl:.4f}"


def _short(name: str) -> str:
    """Return a cache's name without the digits of its widths. The last line has them."""
    if not name.startswith(f"{METHOD}:") or "k_widths" not in name:
        return name
    spec = kvq.parse(name)
    bases = Bases.of(spec.k)
    short = METHOD if bases == Bases() else bases.spec()
    if spec.recent == kvq.parse(METHOD).recent:
        return short
    return f"{short}{',' if ':' in short else ':'}recent={spec.recent}"
