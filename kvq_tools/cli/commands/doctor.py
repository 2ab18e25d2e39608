"""`kvq doctor`: explain layer by layer what a cache will do to a model, and warn of known
problems."""

from __future__ import annotations

import argparse
from typing import Any

import kvq_jax as kvq
from kvq_jax.attention import dispatch
from kvq_jax.codecs.codec import Codec
from kvq_jax.layer.plan import LayerPlan
from kvq_tools.cli import cache_sizes, compilation_cache, doctor_facts, inputs
from kvq_tools.cli.console import print_json
from kvq_tools.cli.doctor_warnings import known_problems
from kvq_tools.cli.tables import layer_runs, print_line, print_table

SHOWN = ("quantized", "reason", "k", "v", "kv", "no_kernel", "no_native_kernel")  # of a layer


def run(options: argparse.Namespace) -> None:
    config = inputs.read_config(options.model, options.cache, warn_unmet=False)
    context = options.context or config.positions
    cache = kvq.cache.layout(options.cache.spec, config, 1, context)
    biases = doctor_facts.key_biases(options.model, config)
    calibration, missing = doctor_facts.calibration_state(
        options.model, config, cache.spec, options.calibration
    )
    heads = config.num_attention_heads
    layers = [
        _described(index, plan, cache.spec, heads) | doctor_facts.bias_facts(biases, index)
        for index, plan in enumerate(cache.plans)
    ]
    result = {
        "model": options.model,
        "cache": str(cache.spec),
        "context": context,
        "regions": (
            cache_sizes.windows(cache.spec) | {"body": cache.spec.regions(context).body_capacity}
        ),
        "facts": (
            doctor_facts.facts(options.model, config, cache.spec, biases)
            | {
                "calibration": calibration,
                "kernels here": dispatch.kernels_here(),
                "kernels' arithmetic": dispatch.arithmetic_here(cache.plans, heads),
                "kernels' route": dispatch.route_here(cache.plans, heads),
                "compilation cache": compilation_cache.described(),
            }
        ),
        "layers": layers,
        "warnings": known_problems(config, cache, biases) + missing,
    }
    if options.json:
        print_json("doctor", result)
    else:
        _print(result, options.cache.text)


def _described(
    index: int, plan: LayerPlan, spec: kvq.cache.CacheSpec, query_heads: int
) -> dict[str, Any]:
    """Describe a layer: both sides (`kv` if both are read from the same rows), why one is left in
    full precision, and why GPU and CPU kernels cannot read the layer (None if they can)."""
    exact = [
        f"{side} is {method.name}"
        for side, method in (("k", spec.k), ("v", spec.v))
        if method.exact
    ]
    reason = None
    if index in spec.skip_layers:
        reason = "skip_layers names it"
    elif spec.exact:
        reason = "the cache is dense"
    elif not plan.quantizes:
        reason = "its options keep rows as they are"
    elif exact:
        reason = exact[0]
    sides = {side: _side(codec, plan) for side, codec in zip(plan.names, plan.codecs, strict=True)}
    return {
        "layer": index,
        "quantized": plan.quantizes,
        "reason": reason,
        "no_kernel": dispatch.unsupported(plan, query_heads, 1),
        "no_native_kernel": dispatch.unsupported(plan, query_heads, 1, "native"),
        **sides,
    }


def _side(codec: Codec, plan: LayerPlan) -> dict[str, Any]:
    """Return the codec's resolved options, its stored bits per element of keys or values, and how
    its codes are packed."""
    tokens = 32 * plan.regions.block
    body = codec.body(1, plan.heads, tokens)
    described = codec.describe()
    described["stored_bits"] = (
        8 * kvq.size.nbytes(body) / (plan.heads * tokens * plan.head_dim * (2 if plan.joint else 1))
    )
    if layout := codec.facts.code_layout:
        described["packing"] = {
            "code_bits": layout.bits,
            "plane_channels": layout.width,
            "tokens_per_word_row": layout.slots,
            "padding_channels": layout.chunks * layout.width - layout.channels,
        }
    return described


def _print(result: dict[str, Any], cache: str) -> None:
    regions = result["regions"]
    facts = [{"fact": name, "value": value} for name, value in result["facts"].items()]
    print_table(result["model"], facts, texts=None)
    rows = [
        {
            "layers": label,
            "is": "quantized" if layer["quantized"] else "full precision",
            "because": layer["reason"] or "",
            "keys": _side_text(layer["kv"] if "kv" in layer else layer["k"]),
            "values": "from the same rows" if "kv" in layer else _side_text(layer["v"]),
            "on a GPU": _reader(layer["no_kernel"]),
            "on a CPU": _reader(layer["no_native_kernel"]),
        }
        for label, layer in layer_runs(result["layers"], SHOWN)
    ]
    title = (
        f"{cache} at {result['context']} tokens: {regions['body']} in the body,"
        f" full-precision windows sink {regions['sink']}, recent {regions['recent']}, block"
        f" {regions['block']}"
    )
    print_table(title, rows, texts=None)
    biases = [
        {"layer": layer["layer"]}
        | {
            name: "-" if value is None else f"{value:.3f}"
            for name, value in layer["k_proj_bias"].items()
        }
        for layer in result["layers"]
        if layer["k_proj_bias"]
    ]
    if biases:
        print_table("k_proj bias", biases, texts=())
    for warning in result["warnings"]:
        print_line(f"warning: {warning}")
    if not result["warnings"]:
        print_line("no warnings")


def _reader(no_kernel: str | None) -> str:
    return f"XLA: {no_kernel}" if no_kernel else "kernel"


def _side_text(side: dict[str, Any]) -> str:
    options = {
        key: value
        for key, value in side.items()
        if key not in ("codec", "stored_bits", "packing", "channels", "block", "heads", "width")
        and value is not False
    }
    text = ", ".join(key if value is True else f"{key} {value}" for key, value in options.items())
    packing = side.get("packing")
    if packing:
        text += (
            f"; packed in planes of {packing['plane_channels']} channels,"
            f" {packing['tokens_per_word_row']} tokens per word row"
        )
        if padding := packing["padding_channels"]:
            text += f", {padding} channels of padding"
    return f"{side['stored_bits']:.2f} bits stored: {text}"
