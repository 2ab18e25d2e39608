"""`kvq memory`: count the bytes of a cache, from config.json alone."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import kvq_jax as kvq
from kvq_jax.cache.cache import Cache
from kvq_jax.cache.paper_bits import paper_bits
from kvq_jax.peak_rates import DEVICES
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import cache_sizes, inputs, memory_fits, memory_roofline
from kvq_tools.cli.console import UserError, format_bytes, print_json, progress
from kvq_tools.cli.options.memory import MESH_DEVICE
from kvq_tools.cli.tables import print_line, print_table


def run(options: argparse.Namespace) -> None:
    for name in ("devices", "device"):
        if getattr(options, name) is not None and options.mesh is None:
            raise UserError(
                f"--{name} is for the devices of a mesh: give --mesh auto, or --mesh"
                " rows=R,heads=H,tokens=T"
            )
    options.device = options.device or DEVICES[MESH_DEVICE]
    if Path(options.model).name == "config.json":
        options.model = str(Path(options.model).parent)
    if not options.cache:
        return memory_fits.run(options)
    config = inputs.read_config(options.model, *options.cache)
    context = options.context or config.positions
    inputs.warn_beyond(context, config)
    with progress("counting"):
        caches = [
            {"name": text} | _described(spec, config, context, options)
            for text, spec in options.cache
        ]
    device = options.roofline
    result: dict[str, Any] = {
        "model": options.model,
        "context": context,
        "batch": options.batch,
        "dtype": options.dtype,
        "budget_bytes": options.budget,
        "max_position_embeddings": config.max_position_embeddings,
        "bf16_bytes": kvq.size.dense_nbytes(config, options.batch, context),
        "weight_bytes": cache_sizes.weights(config, options.dtype),
        "device": None if device is None else memory_roofline.describe_device(device, config),
        "caches": caches,
    }
    if options.json:
        return print_json("memory", result)
    _print(result)
    if options.mesh is not None:
        from kvq_tools.cli import memory_mesh

        memory_mesh.print_shares(caches, options.device)


def _described(
    spec: kvq.cache.CacheSpec, config: LlamaConfig, context: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the numbers of one cache, all counted from its layout."""
    batch, dtype, budget, device = options.batch, options.dtype, options.budget, options.roofline
    layout = kvq.cache.layout(spec, config, batch, context, dtype)
    size = kvq.size.of(spec, config, batch, context, dtype)
    return {
        "cache": str(spec),
        "cache_bytes": size.cache,
        "ratio": kvq.size.dense_nbytes(config, batch, context) / size.cache,
        "bits_per_element": kvq.size.bits_per_element(spec, config, context, dtype),
        "quantized_tokens": kvq.size.quantized_tokens(layout, context),
        "body_bits_per_element": kvq.size.body_bits_per_element(spec, config, context),
        "components": [dataclasses.asdict(component) for component in kvq.size.components(layout)],
        "parameter_bytes": size.parameters,
        "working_bytes": size.working,
        "resident_bytes": size.resident,
        "resident_by_batch": cache_sizes.by_batch(spec, config, context, dtype, batch),
        "paper_layout_bytes": paper_layout_bytes(layout),
        "paper_bits_per_element": paper_bits(spec, config, context),
        "outlier_fraction": kvq.size.outlier_fraction(spec, config),
        "largest_context": (
            None
            if budget is None
            else cache_sizes.largest_context(spec, config, batch, dtype, budget)
        ),
        "roofline": (
            None if device is None else memory_roofline.describe(layout, config, dtype, device)
        ),
        "mesh": None if options.mesh is None else _on_mesh(spec, config, context, options),
    }


def _on_mesh(
    spec: kvq.cache.CacheSpec, config: LlamaConfig, context: int, options: argparse.Namespace
) -> dict[str, Any]:
    from kvq_tools.cli import memory_mesh  # imported late: it takes longer than all counting

    ways = options.mesh, options.devices, options.device
    with inputs.input_errors():
        return memory_mesh.describe(spec, config, options.batch, context, options.dtype, *ways)


def paper_layout_bytes(cache: Cache) -> int | None:
    """Return the cache's bytes if bodies were stored as their methods' papers count them (InnerQ's
    hybrid groups) and the rest as it is. None if there is no difference."""
    saved = []
    for plan, layer in zip(cache.plans, cache.layers, strict=True):
        for codec, body in zip(plan.codecs, layer.body, strict=True):
            elements = (
                cache.batch
                * plan.regions.held_capacity
                * codec.facts.row_width(plan.heads, plan.head_dim)
            )
            if count := codec.facts.paper.bytes:
                saved.append(kvq.size.nbytes(body) - count(elements))
    return kvq.size.nbytes(cache) - sum(saved) if saved else None


def _print(result: dict[str, Any]) -> None:
    title = (
        f"{result['model']}: context {result['context']}, batch {result['batch']}; as bf16"
        f" {format_bytes(result['bf16_bytes'])}"
    )
    rows = []
    for c in result["caches"]:
        body_bits = c["body_bits_per_element"]
        rows.append(
            {
                "cache": c["name"],
                "bytes": c["cache_bytes"],
                "size": format_bytes(c["cache_bytes"]),
                "ratio to bf16": f"{c['ratio']:.2f}",
                "bits/element": f"{c['bits_per_element']:.3f}",
                "without windows": f"{body_bits:.3f}",
                "of 16 bits": f"{body_bits / 16:.4f} ({16 / body_bits:.2f}x)",
                "quantized tokens": cache_sizes.quantized_in_words(c["quantized_tokens"]),
                **cache_sizes.resident_cells(c),
            }
        )
        if result["budget_bytes"] is not None:
            budget = format_bytes(result["budget_bytes"])
            longest = cache_sizes.context_in_words(c["largest_context"])
            rows[-1][f"largest context in {budget}"] = longest
    print_table(title, rows)
    _print_parts(result["caches"])
    for cache in result["caches"]:
        _print_notes(cache)
    if result["device"] is not None:
        memory_roofline.print_roofline(result["caches"], result["device"])
    weights = cache_sizes.weights_in_words(result["weight_bytes"], result["dtype"], result["model"])
    if result["budget_bytes"] is None:
        print_line(weights)
    else:
        print_line(
            f"The budget is for resident bytes, without weights. {weights} The model was trained"
            f" for {result['max_position_embeddings']} positions."
        )


def _print_parts(caches: list[dict[str, Any]]) -> None:
    """Print the parts of each cache, and the memory that it needs besides them."""
    parts = [
        {"cache": c["name"], "side": p["side"], "part": p["name"]} | _bytes(p["bytes"])
        for c in caches
        for p in c["components"]
        if p["bytes"]
    ]
    print_table("components", parts, texts=("cache", "side", "part"))
    beside = [
        {"cache": c["name"], "part": label} | _bytes(c[key])
        for c in caches
        for key, label in (("parameter_bytes", "parameters"), ("working_bytes", "working memory"))
        if c[key]
    ]
    if beside:
        print_table("beside the cache", beside, texts=("cache", "part"))


def _bytes(size: int) -> dict[str, object]:
    return {"bytes": size, "size": format_bytes(size)}


def _print_notes(cache: dict[str, Any]) -> None:
    """Print the counts that differ from those in the table."""
    name, bits = cache["name"], cache["paper_bits_per_element"]
    if cache["paper_layout_bytes"] is not None:
        here, theirs = (format_bytes(cache[key]) for key in ("cache_bytes", "paper_layout_bytes"))
        print_line(f"{name}: {here} as stored here, {theirs} in the paper's layout")
    if fraction := cache["outlier_fraction"]:
        print_line(f"{name}: full-precision slots for {fraction:.3%} of all elements")
    if bits is not None:
        print_line(
            f"{name}: {bits:.3f} bits/element as the KVQuant paper counts them, without windows"
        )
