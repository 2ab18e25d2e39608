"""`kvq methods`: list the registered methods with their options."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import kvq_jax as kvq
from kvq_jax.attention import dispatch
from kvq_jax.cache.cache import CacheDims
from kvq_jax.did_you_mean import hint
from kvq_jax.methods.base import CACHE_OPTIONS, Method
from kvq_jax.methods.registry import register_installed
from kvq_tools.cli import cache_sizes
from kvq_tools.cli.console import format_bytes, print_json
from kvq_tools.cli.options.values import refusal
from kvq_tools.cli.tables import print_line, print_table
from kvq_tools.evaluation.defaults import CACHE_DTYPE

# Llama-3.1-8B with all layers, as a method may treat the first ones differently
REFERENCE_DIMS = CacheDims(
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    hidden_size=4096,
)
REFERENCE_CONTEXT = 32768
KERNELS: tuple[dispatch.Kernels, ...] = ("pallas", "native")


def run(options: argparse.Namespace) -> None:
    register_installed()
    for name in options.names:
        if name not in kvq.methods.METHODS:
            known = kvq.methods.METHODS
            why = f"unknown cache method {name!r}; methods: {', '.join(known)}"
            nearest = hint(name, known)
            raise refusal("methods", "NAME", f"{why}.{nearest}" if nearest else why)
    described = [
        describe(kvq.methods.METHODS[name]) for name in options.names or kvq.methods.METHODS
    ]
    if options.json:
        print_json(
            "methods",
            {
                "methods": described,
                "cache_options": list(CACHE_OPTIONS),
                "head_dim": REFERENCE_DIMS.head_dim,
            },
        )
        return
    for method in described:
        _print_method(method)
    print_line(f"Options of the cache, for every method: {', '.join(CACHE_OPTIONS)}.")
    print_line(
        "subtract_bias=true is for models whose key projection has a bias, and for methods that"
        " cache keys."
    )


def describe(method: Method) -> dict[str, Any]:
    """Return the declaration of a method, and its average bits for each value of its option `bits`,
    if it has one."""
    bits = next(
        (option.metadata["choices"] for option in method.options() if option.name == "bits"), ()
    )
    specs = [f"{method.name}:bits={b}" for b in bits] or [method.name]
    return {
        "name": method.name,
        "summary": method.summary,
        "source": method.source,
        "average_bits": {
            spec: kvq.size.body_bits_per_element(spec, REFERENCE_DIMS) for spec in specs
        },
        "resident_by_batch": {
            spec: cache_sizes.by_batch(spec, REFERENCE_DIMS, REFERENCE_CONTEXT, CACHE_DTYPE)
            for spec in specs
        },
        "read_by": dict(zip(("gpu", "cpu"), _readers(method.name), strict=True)),
        "windows": dataclasses.asdict(method.windows()),
        "prompt_statistics": kvq.cache.has_prompt_statistics(method.name, REFERENCE_DIMS),
        "presets": dict(method.presets),
        "options": [
            {
                "name": f.name,
                "default": f.default,
                "choices": list(f.metadata["choices"]),
                "per_layer": f.metadata["per_layer"],
                "help": f.metadata["help"],
            }
            for f in method.options()
        ],
    }


def _readers(spec: str) -> list[str]:
    """Return what reads this cache on a GPU, and on a CPU."""
    plan = kvq.cache.layout(spec, REFERENCE_DIMS, 1, REFERENCE_CONTEXT).plans[-1]
    heads = REFERENCE_DIMS.num_attention_heads
    return ["xla" if dispatch.unsupported(plan, heads, 1, name) else name for name in KERNELS]


def _print_method(method: dict[str, Any]) -> None:
    windows, bits = method["windows"], method["average_bits"]
    print_line(f"{method['name']}: {method['summary']}")
    print_line(f"  source: {method['source']}")
    print_line(
        f"  average bits: {', '.join(f'{spec} {value:.2f}' for spec, value in bits.items())}"
    )
    sizes = [
        f"{spec} {' and '.join(format_bytes(entry['bytes']) for entry in batches)}"
        for spec, batches in method["resident_by_batch"].items()
    ]
    print_line(
        f"  resident, {REFERENCE_CONTEXT // 1024}K tokens of Llama-3.1-8B, batch 1 and 16:"
        f" {', '.join(sizes)}"
    )
    print_line(
        f"  full-precision windows by default: sink {windows['sink']}, recent {windows['recent']},"
        f" block {windows['block']} tokens"
    )
    readers = method["read_by"]
    print_line(f"  read by {readers['gpu']} on a GPU, {readers['cpu']} on a CPU")
    for name, options in method["presets"].items():
        print_line(f"  preset={name}: {options}")
    rows = [
        {
            "option": option["name"],
            "default": _shown(option["default"]),
            "allowed": _allowed(option),
            "meaning": option["help"],
        }
        for option in method["options"]
    ]
    if rows:
        print_table("", rows, texts=None)
    print()


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _allowed(option: dict[str, Any]) -> str:
    if option["choices"]:
        text = " | ".join(_shown(c) for c in option["choices"])
    else:
        text = (
            "true | false"
            if isinstance(option["default"], bool)
            else type(option["default"]).__name__
        )
    return text + (", or by layer" if option["per_layer"] else "")
