"""`kvq memory --mesh`: what each device of a mesh would hold and read, before machines are rented.

    step time = bytes that a device reads / its bandwidth + collectives * LATENCY

A device reads its share of the weights (one row of an embedding that is not also the head), of the
full body, the windows, the statistics and the method's parameters, and what passes through a
cross-layer accumulator. Arithmetic is assumed to hide behind these reads, so the cost of rebuilding
keys is not included (see --roofline). The additional working memory of a prompt is not counted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

import kvq_jax as kvq
from kvq_jax.cache.size import accumulators, parameter_bytes
from kvq_jax.peak_rates import Device
from kvq_jax.placement.allowed import mesh_of, parse
from kvq_models.llama import sharding
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama, abstract_llama
from kvq_models.llama.whole_heads import gathered_together
from kvq_tools.cli.console import format_bytes
from kvq_tools.cli.options.memory import MEMORY
from kvq_tools.cli.tables import print_line, print_table

LATENCY = 10e-6  # seconds of a collective of a few KB within one host: assumed, not measured
AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class DeviceShare:
    """Bytes that each device holds, and what a step of one token per row costs it. `fits` is None
    if its memory is unknown."""

    placement: str
    devices: int
    weight_bytes: int
    body_bytes: int
    window_bytes: int
    parameter_bytes: int
    working_bytes: int
    total_bytes: int
    read_bytes: int
    collectives: int
    milliseconds: float
    fits: bool | None


def describe(
    spec: kvq.cache.CacheSpec,
    config: LlamaConfig,
    batch: int,
    context: int,
    dtype: str,
    mesh: str,
    devices: int | None,
    device: Device,
) -> dict[str, Any]:
    """Return each device's share of one placement. "auto" picks the fastest that fits, or the
    smallest if none does.

    Raises ValueError, in one line, for a text that cannot be parsed and for a placement that the
    cache cannot have.
    """
    if mesh != AUTO:
        placement = parse(mesh, devices or 4096)
        return dataclasses.asdict(share(spec, config, batch, context, dtype, placement, device))
    shares = []
    for placement in _placements(devices or 8):
        try:
            shares.append(share(spec, config, batch, context, dtype, placement, device))
        except ValueError:  # rows or heads do not divide; splitting tokens alone always works
            continue
    fitting = [one for one in shares if one.fits is not False]
    best = (
        min(fitting, key=lambda one: one.milliseconds)
        if fitting
        else min(shares, key=lambda one: one.total_bytes)
    )
    return dataclasses.asdict(best)


def share(
    spec: kvq.cache.CacheSpec,
    config: LlamaConfig,
    batch: int,
    context: int,
    dtype: str,
    placement: kvq.Placement,
    device: Device,
) -> DeviceShare:
    """Return what each device of a mesh holds and reads. Bytes are exact; times follow from the
    formula above."""
    cache = kvq.cache.axes(spec, config, batch, context, dtype, placement)
    body = placement.shard_nbytes([layer.body for layer in cache.layers])
    windows = placement.shard_nbytes(
        [(layer.sink, layer.ring, layer.stats, layer.intact) for layer in cache.layers]
    ) + kvq.size.nbytes(cache.lengths)
    parameters = sum(parameter_bytes(cache))
    working = max((placement.shard_nbytes(one) for one in accumulators(cache)), default=0)
    weights, embedding = _weights(config, dtype, placement)
    total = weights + body + windows + parameters + working
    read = weights + body + windows + parameters - (0 if config.tie_word_embeddings else embedding)
    # the base layer writes the accumulator, later layers read and write it, and attention reads it
    # everywhere
    read += working * sum(
        2 if plan.cross_layer.starts else 3 for plan in cache.plans if plan.cross_layer
    )
    moves = collectives(config, dtype, placement)
    memory = MEMORY.get(device.name)
    milliseconds = 1e3 * (read / device.bandwidth + moves * LATENCY)
    fits = None if memory is None else total <= memory
    return DeviceShare(
        placement=str(placement),
        devices=placement.devices,
        weight_bytes=weights,
        body_bytes=body,
        window_bytes=windows,
        parameter_bytes=parameters,
        working_bytes=working,
        total_bytes=total,
        read_bytes=read,
        collectives=moves,
        milliseconds=milliseconds,
        fits=fits,
    )


def collectives(config: LlamaConfig, dtype: str, placement: kvq.Placement) -> int:
    """Return how many collectives a decode step runs on a mesh. Each moves the numbers of one
    token.

    There is a sum for each projection whose input is split, and one for the embedding. If tokens
    are split, a maximum and a sum merge the attention of the shards. Queries, keys and values are
    then gathered as well if their weights are split further than heads are.
    """
    shardings = sharding.weight_shardings(_abstract(config, 1, dtype), placement)
    split = {path for path, where in shardings.items() if any(where.spec)}
    of_layer = sum(f"layers.0.{name}.kernel" in split for name in ("o_proj", "mlp.down_proj"))
    if placement.size("tokens") > 1:
        widths = [
            heads * config.head_dim
            for heads in (config.num_attention_heads, *(config.num_key_value_heads,) * 2)
        ]
        of_layer += 2 + len(gathered_together(widths, jnp.dtype(dtype).itemsize, placement))
    return ("embed" in split) + config.num_hidden_layers * of_layer


def _weights(config: LlamaConfig, dtype: str, placement: kvq.Placement) -> tuple[int, int]:
    """Return the bytes of all weights and of the embedding on each device. All layers are alike."""
    one, two = (
        sharding.shard_nbytes_of(_abstract(config, layers, dtype), placement) for layers in (1, 2)
    )
    of_layer = sum(two.values()) - sum(one.values())
    return sum(one.values()) + (config.num_hidden_layers - 1) * of_layer, one["embed"]


@functools.cache
def _abstract(config: LlamaConfig, layers: int, dtype: str) -> Llama:
    return abstract_llama(dataclasses.replace(config, num_hidden_layers=layers), dtype)


def _placements(devices: int) -> Iterator[kvq.Placement]:
    """Yield every way in which `devices` can share rows, heads and tokens."""
    for rows in (r for r in range(1, devices + 1) if devices % r == 0):
        for heads in (h for h in range(1, devices // rows + 1) if devices // rows % h == 0):
            sizes = {"rows": rows, "heads": heads, "tokens": devices // rows // heads}
            yield kvq.Placement(
                mesh_of(sizes, devices), rows="rows", heads="heads", tokens="tokens"
            )


def print_shares(caches: list[dict[str, Any]], device: Device) -> None:
    rows = [
        {
            "cache": cache["name"],
            "placement": placed["placement"],
            "weights": format_bytes(placed["weight_bytes"]),
            "body": format_bytes(placed["body_bytes"]),
            "windows": format_bytes(placed["window_bytes"]),
            "other": format_bytes(placed["parameter_bytes"] + placed["working_bytes"]),
            "total": format_bytes(placed["total_bytes"]),
            "fits": {True: "yes", False: "no", None: "?"}[placed["fits"]],
            "read in a step": format_bytes(placed["read_bytes"]),
            "collectives": placed["collectives"],
            "ms a token": f"{placed['milliseconds']:.2f}",
        }
        for cache, placed in ((cache, cache["mesh"]) for cache in caches)
    ]
    print_table(
        f"on each of {caches[0]['mesh']['devices']} devices ({device.name})",
        rows,
        texts=("cache", "placement"),
    )
    rates = f"{device.bandwidth / 1e12:.2f} TB/s and {LATENCY * 1e6:.0f} us for a collective"
    print_line(f"ms a token: bytes read at {rates}; predicted, not measured")
