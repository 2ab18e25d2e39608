"""The sizes of caches, in the results and tables of commands that compare them.

Resident bytes are those of one sequence and of 16, because what a method adds to the model weighs
less in a large batch.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import jax.numpy as jnp

import kvq_jax as kvq
from kvq_jax.cache.size import COMPARED_BATCHES
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.gguf_file import GgufFile
from kvq_models.llama.open_checkpoint import open_checkpoint
from kvq_models.llama.weight_count import weight_count
from kvq_tools.cli.console import format_bytes
from kvq_tools.cli.options.values import MAX_TOKENS


def of(
    spec: kvq.cache.CacheSpec, config: kvq.types.ModelDims, capacity: int, dtype: str
) -> dict[str, Any]:
    """Return the sizes of a cache of one sequence, counted from its layout."""
    size = kvq.size.nbytes(kvq.cache.layout(spec, config, 1, capacity, dtype))
    return {
        "cache_bytes": size,
        "ratio": kvq.size.dense_nbytes(config, 1, capacity) / size,
        "bits_per_element": kvq.size.bits_per_element(spec, config, capacity, dtype),
        "resident_by_batch": by_batch(spec, config, capacity, dtype),
    }


def weights(config: LlamaConfig, dtype: str) -> int:
    """Return the bytes of a model's weights in this dtype."""
    return weight_count(config) * jnp.dtype(dtype).itemsize


def weights_in_words(size: int, dtype: str, model: str) -> str:
    """Return a sentence about the bytes of the weights. Those of a GGUF file stay packed on a
    CPU."""
    checkpoint = open_checkpoint(model, "config")
    packed = ""
    if isinstance(checkpoint, GgufFile):
        packed = f" ({format_bytes(checkpoint.nbytes)} packed, as on a CPU)"
    return f"The weights take {format_bytes(size)} more in {dtype}{packed}."


def size_cells(cache: dict[str, Any], read: int | None = None) -> dict[str, str]:
    """Return the cells of a table with what `of` returned and how many of the tokens that are
    `read` are quantized."""
    return {
        "quantized tokens": quantized_in_words(cache["quantized_tokens"], read),
        "cache bytes": format_bytes(cache["cache_bytes"]),
        "ratio to bf16": f"{cache['ratio']:.2f}",
        "bits/element": f"{cache['bits_per_element']:.2f}",
        **resident_cells(cache),
    }


def quantized_in_words(quantized: int, read: int | None = None) -> str:
    """Return how many of the tokens that are read are quantized. None at all is written NONE, so
    that it stands out."""
    return f"{quantized}" + ("" if read is None else f" of {read}") if quantized else "NONE"


def windows(spec: kvq.cache.CacheSpec) -> dict[str, int]:
    """Return the sizes of the windows of full precision."""
    return {"sink": spec.sink, "recent": spec.recent, "block": spec.block}


def by_batch(
    spec: kvq.cache.CacheSpec | str,
    config: kvq.types.ModelDims,
    capacity: int,
    dtype: str,
    batch: int = 1,
) -> list[dict[str, int]]:
    """Return the resident bytes of a cache for the batches that are always compared, and for
    `batch`."""
    return [
        {"batch": rows, "bytes": kvq.size.of(spec, config, rows, capacity, dtype).resident}
        for rows in sorted({*COMPARED_BATCHES, batch})
    ]


def resident_cells(cache: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a table with the bytes that `by_batch` counted for a cache."""
    return {
        f"resident, batch {entry['batch']}": format_bytes(entry["bytes"])
        for entry in cache["resident_by_batch"]
    }


def largest_context(
    spec: kvq.cache.CacheSpec, config: kvq.types.ModelDims, batch: int, dtype: str, budget: int
) -> int:
    """Return the largest capacity whose resident bytes are at most `budget`, or 0. A cache never
    shrinks when its capacity grows.

    It is MAX_TOKENS if no capacity is too large: a cache whose layers are all windowed stops
    growing.
    """

    def fits(capacity: int) -> bool:
        return kvq.size.of(spec, config, batch, capacity, dtype).resident <= budget

    beyond = 1
    while beyond <= MAX_TOKENS and fits(beyond):
        beyond *= 2
    choices = range(1, min(beyond, MAX_TOKENS + 1))
    return bisect_left(choices, True, key=lambda capacity: not fits(capacity))


def context_in_words(tokens: int) -> str:
    """Return what `largest_context` returned as the text of a table's cell."""
    return "any" if tokens == MAX_TOKENS else f"{tokens}"
