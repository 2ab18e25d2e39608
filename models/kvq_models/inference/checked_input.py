"""Check tokens and caches before a model runs. Errors are one line that says what is allowed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from kvq_jax.cache.cache import Cache, CacheDims, check_cache, dims_of
from kvq_jax.types.array_types import Integers
from kvq_jax.types.integers import check_at_most, int32
from kvq_models.inference.method_parameters import parameters_for
from kvq_models.inference.padding import padded
from kvq_models.llama.model import Llama


def checked_tokens(
    llama: Llama, cache: Cache, tokens: Integers, lengths: Integers | None, *, new_tokens: int = 0
) -> tuple[Array, Array]:
    """Return tokens [B, W] and lengths [B] as int32 arrays, padded to the width of a program.

    `new_tokens` will be generated after them. Traced values cannot be inspected: inside a caller's
    jit only shapes and dtypes are checked, and nothing is padded.

    Raises ValueError, in one line, if they are not integers, do not fit the cache, the vocabulary
    or the capacity, the cache was consumed, or the model was prepared for another cache.
    """
    check_dims(llama, cache)
    tokens = int32("tokens", tokens)
    if tokens.ndim != 2 or tokens.shape[0] != cache.batch or tokens.shape[1] < 1:
        raise ValueError(
            f"tokens must be [batch, length] with batch {cache.batch} and at least one token, got"
            f" shape {tokens.shape}"
        )
    check_mesh(llama, cache)
    parameters_for(llama, cache.spec)
    if lengths is None:
        lengths = np.full(tokens.shape[:1], tokens.shape[1], np.int32)
    lengths = int32("lengths", lengths)
    if lengths.shape != (cache.batch,):
        raise ValueError(f"lengths must be [{cache.batch}], got shape {lengths.shape}")
    if any(isinstance(a, Tracer) for a in (tokens, lengths, cache.lengths)):
        return jnp.asarray(tokens), jnp.asarray(lengths)
    ids, new, cached = (np.asarray(a) for a in (tokens, lengths, cache.lengths))
    check_at_most("lengths", new, ids.shape[1])
    real = np.arange(ids.shape[1]) < new[:, None]
    outside = real & ((ids < 0) | (ids >= llama.config.vocab_size))
    if outside.any():
        row, at = (int(i) for i in np.argwhere(outside)[0])
        raise ValueError(
            f"token id {ids[row, at]} at row {row}, position {at} is outside the vocabulary of"
            f" {llama.config.vocab_size}"
        )
    need = cached + new + new_tokens
    if need.max() > cache.capacity:
        row = int(need.argmax())
        more = f" + {new_tokens} new" if new_tokens else ""
        raise ValueError(
            f"row {row} needs {need[row]} tokens ({cached[row]} cached + {new[row]} prompt{more}),"
            f" but the cache's capacity is {cache.capacity}"
        )
    # A copy: device_put may take over the caller's memory, which the caller may change while the
    # program still runs.
    return jax.device_put(
        (padded(ids, new, cache.capacity), np.array(new)),
        None if cache.placement is None else cache.placement.everywhere,
    )


def check_dims(llama: Llama, cache: Cache) -> None:
    """Raise ValueError, in one line, unless `llama` is a Llama and `cache` comes from `init_cache`,
    is not consumed and was made for the model's dimensions. Only static values are compared."""
    if not isinstance(llama, Llama):
        raise ValueError(f"this call takes a Llama of load_llama, got {type(llama).__name__}")
    check_cache(cache)
    if different := other_dims(cache.dims, dims_of(llama.config)):
        raise ValueError(f"the cache was made for another model: it has {different}")


def other_dims(of_cache: CacheDims, of_model: CacheDims) -> str:
    """Return the dimensions in which a cache is not the model's, such as "head_dim=64 and not 128,
    hidden_size=576 and not 2048", or ""."""
    names = [field.name for field in dataclasses.fields(of_model)]
    pairs = [(name, getattr(of_cache, name), getattr(of_model, name)) for name in names]
    return ", ".join(
        f"another {name}" if isinstance(cached, tuple) else f"{name}={cached} and not {needed}"
        for name, cached, needed in pairs
        if cached != needed
    )


def check_mesh(llama: Llama, cache: Cache) -> None:
    """Raise ValueError, in one line, if model and cache are on different devices. Inside a caller's
    jit this cannot be checked."""
    of_model = getattr(llama.embed[...], "sharding", None)
    if isinstance(llama.embed[...], Tracer) or of_model is None:
        return
    placement = cache.placement
    remedy = "kvq_models.shard_llama moves the model, kvq_jax.rows.move the cache"
    if placement is None and len(of_model.device_set) > 1:
        raise ValueError(
            f"the model lies on a mesh of {len(of_model.device_set)} devices, and the cache does"
            f" not: {remedy}"
        )
    if placement is not None and of_model.device_set != placement.everywhere.device_set:
        if len(of_model.device_set) == 1:
            raise ValueError(
                f"the cache lies on a mesh ({placement}), and the model does not: {remedy}"
            )
        raise ValueError(f"the model lies on another mesh than the cache ({placement}): {remedy}")


def right_padded(
    sequences: list[list[int]], pad: int = 0
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
    """Pad token lists of different lengths on the right, as every function here expects.

    Args:
        sequences: B lists of token ids.
        pad: the id that fills the rest.

    Returns tokens [B, T] int32 and lengths [B] int32.
    """
    lengths = np.array([len(s) for s in sequences], np.int32)
    tokens = np.full((len(sequences), max(int(lengths.max(initial=0)), 1)), pad, np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    return tokens, lengths
