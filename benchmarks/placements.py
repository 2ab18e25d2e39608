"""Make the table of docs/scale.md: bytes and times of each of eight H200s for a Llama 8B and 70B.

It counts as `kvq memory --mesh auto` does. Nothing runs and nothing is measured: bytes are counted
from described arrays, times follow from the formula in memory_mesh.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

import kvq_jax as kvq
from benchmarks.llama_8b import llama_config
from benchmarks.markdown import table
from kvq_jax.files import whole
from kvq_jax.peak_rates import DEVICES as KNOWN
from kvq_tools.cli import memory_mesh

DEVICE, DEVICES = KNOWN["h200"], 8
MODELS = {
    "8B": llama_config(),
    "70B": dataclasses.replace(
        llama_config(80),
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
    ),
}
SIZES = ((128, "K", 64), (1, "M", 1), (10, "M", 1))  # tokens and rows
CACHES = (
    "dense",
    "kivi:bits=4",
    "kivi:bits=2",
    "innerq:bits=2",
    "kvquant:bits=3",
    "xquant_cl:bits=2",
)
PAGE = pathlib.Path(__file__).parents[1] / "docs/scale.md"
HEAD = (
    *("model", "context x batch", "cache", "placement", "weights", "cache", "other", "total"),
    *("fits", "read in a step", "collectives", "predicted ms"),
)


def row(model: str, size: tuple[int, str, int], cache: str) -> tuple[str, ...]:
    """Return a row of the table. GB are 10^9 bytes."""
    count, unit, batch = size
    context = count << {"K": 10, "M": 20}[unit]
    sizes = batch, context, "bfloat16", memory_mesh.AUTO, DEVICES
    share = memory_mesh.DeviceShare(
        **memory_mesh.describe(kvq.parse(cache), MODELS[model], *sizes, DEVICE)
    )
    parts = (
        share.weight_bytes,
        share.body_bytes + share.window_bytes,
        share.parameter_bytes + share.working_bytes,
        share.total_bytes,
    )
    return (
        model,
        f"{count}{unit} x {batch}",
        f"`{cache}`",
        share.placement,
        *(f"{size / 1e9:.1f}" for size in parts),
        "yes" if share.fits else "no",
        f"{share.read_bytes / 1e9:.1f}",
        str(share.collectives),
        f"{share.milliseconds:.1f}",
    )


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.placements", description=(__doc__ or "").partition("\n")[0]
    ).parse_args()
    rows = (row(model, size, cache) for model in MODELS for size in SIZES for cache in CACHES)
    text = PAGE.read_text()
    begin = text.index("| model | context x batch |")
    end = text.index("\n\n", begin)
    whole.write(PAGE, text[:begin] + table(HEAD, rows) + text[end:])


if __name__ == "__main__":
    main()
