"""`kvq memory --roofline`: the longest context at which rebuilding keys and values hides behind
memory traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

import kvq_jax as kvq
from kvq_jax.cache.cache import Cache
from kvq_jax.cache.size import parameter_bytes
from kvq_jax.layer.plan import LayerPlan
from kvq_jax.methods.xquant import roofline
from kvq_jax.methods.xquant.roofline import LayerCost
from kvq_jax.peak_rates import Device
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli.console import format_bytes
from kvq_tools.cli.tables import layer_runs, print_line, print_table
from kvq_tools.evaluation.results import finite

BLOCKS = 32  # blocks whose bytes are counted, as in `kvq.size.body_bits_per_element`
NOTHING = "attention reads codes directly and rebuilds nothing"
EXPLAINED = """\
FLOPs and bytes are per layer and cached token, in a step with one new token;
weights are per layer and include the cache's parameters. "hidden up to" is the
number of cached tokens, over all sequences, up to which rebuilding takes no
longer than reading at the device's peaks. "here" counts bytes as stored; keys
are rebuilt, values never are (cached rows are summed with their weights, and
the sum is projected). "the paper's equation" is (3) or (4) of XQuant with this
model's weights; it counts bits without scales and rebuilds keys and values."""


def describe_device(device: Device, config: LlamaConfig) -> dict[str, Any]:
    """Return the device's peaks, and the bytes of a bf16 cache that a layer reads per token."""
    both = 2 * 2 * config.num_key_value_heads * config.head_dim
    return dataclasses.asdict(device) | {"ridge": device.ridge, "bf16_bytes_per_token": both}


def describe(cache: Cache, config: LlamaConfig, dtype: str, device: Device) -> dict[str, Any]:
    """Describe every layer of a cache's layout and find the layer that limits its length. dtype: of
    the weights. Lengths are None if any length is hidden or nothing is rebuilt."""
    weights = roofline.weight_bytes(config, jnp.dtype(dtype).itemsize)
    costs = [
        layer_cost(plan, config, weights + parameters)
        for plan, parameters in zip(cache.plans, parameter_bytes(cache), strict=True)
    ]
    base = next(
        (plan.k for plan in cache.plans if plan.cross_layer and plan.cross_layer.starts), None
    )
    paper_costs = [
        roofline.paper_cost_of((plan.k, plan.v), base, config, weights) for plan in cache.plans
    ]
    rebuilding = [cost for cost in costs if cost.flops_per_token]
    return {
        "rebuilds": bool(rebuilding),
        "hidden_tokens": finite(roofline.longest_hidden(rebuilding, device.ridge)),
        "paper_hidden_tokens": finite(
            roofline.longest_hidden((cost for cost in paper_costs if cost), device.ridge)
        ),
        "layers": [
            {
                "layer": layer,
                "here": _described(cost, device),
                "paper": None if paper is None else _described(paper, device),
            }
            for layer, (cost, paper) in enumerate(zip(costs, paper_costs, strict=True))
        ],
    }


def _described(cost: LayerCost, device: Device) -> dict[str, Any]:
    return dataclasses.asdict(cost) | {"hidden_tokens": finite(cost.longest_hidden(device.ridge))}


def layer_cost(plan: LayerPlan, config: LlamaConfig, weight_bytes: float) -> LayerCost:
    """Return the cost of a step in this layer per cached token.

    Codes are read as stored, keys are rebuilt from rows, and values are weighted sums of rows. A
    side that stores keys or values directly rebuilds nothing.

    If a layer builds on the one below it, rows come from the accumulator. That is at least read and
    written to add this layer's differences (only written in the base layer), and read by attention.
    """
    tokens = BLOCKS * plan.regions.block
    bodies = [codec.body(1, plan.heads, tokens) for codec in plan.codecs]
    read = kvq.size.nbytes(bodies) / tokens
    heads, kv_width = config.num_attention_heads, plan.heads * plan.head_dim
    cross = plan.cross_layer
    if cross is None:
        k, v = (
            codec.facts.row_width(plan.heads, plan.head_dim) if codec.facts.rebuilds else 0
            for codec in (plan.k, plan.v)
        )
        return LayerCost(roofline.flops_of_keys(k, v, kv_width, heads), read, weight_bytes)
    accumulator = cross.accumulator(1, 1)
    width = accumulator.shape[2]
    flops = roofline.flops_of_keys(width, width, kv_width, heads)
    flops += 0 if cross.starts else cross.flops
    return LayerCost(
        flops, read + (2 if cross.starts else 3) * kvq.size.nbytes(accumulator), weight_bytes
    )


def print_roofline(caches: Sequence[dict[str, Any]], device: dict[str, Any]) -> None:
    rebuilding = [c for c in caches if c["roofline"]["rebuilds"]]
    if rebuilding:
        peaks = (
            f"{device['flops'] / 1e12:g} TFLOP/s, {device['bandwidth'] / 1e12:g} TB/s,"
            f" {device['ridge']:.0f} FLOPs for each byte"
        )
        print_table(
            f"rebuilding keys and values on {device['name']}: {peaks}",
            [row for c in rebuilding for row in _rows(c)],
            texts=("cache", "layers"),
        )
        print(EXPLAINED)
        both = device["bf16_bytes_per_token"]
        print_line(
            f"A bf16 cache reads {both} bytes per token and layer. A cache that reads more hides"
            " more, but is not faster."
        )
    for c in rebuilding:
        here, paper = (
            _length(c["roofline"][name]) for name in ("hidden_tokens", "paper_hidden_tokens")
        )
        print_line(
            f"{c['name']}: the shortest of its layers' lengths is {here}; by the paper's equation"
            f" {paper}"
        )
    for c in caches:
        if not c["roofline"]["rebuilds"]:
            print_line(f"{c['name']}: {NOTHING}")


def _rows(cache: dict[str, Any]) -> list[dict[str, str]]:
    """Return one row for each run of equal layers."""
    rows = []
    for label, layer in layer_runs(cache["roofline"]["layers"], ("here", "paper")):
        here, paper = layer["here"], layer["paper"]
        rebuilds = bool(here["flops_per_token"])
        rows.append(
            {
                "cache": cache["name"],
                "layers": label,
                "FLOPs": f"{here['flops_per_token']:.4g}",
                "bytes": f"{here['cache_bytes_per_token']:.0f}",
                "weights": format_bytes(int(here["weight_bytes"])) if rebuilds else "",
                "hidden up to, here": (
                    _length(here["hidden_tokens"]) if rebuilds else "rebuilds nothing"
                ),
                "by the paper's equation": (
                    _length(paper["hidden_tokens"]) if rebuilds and paper is not None else ""
                ),
            }
        )
    return rows


def _length(tokens: float | None) -> str:
    return "any length" if tokens is None else f"{tokens:.0f}"
