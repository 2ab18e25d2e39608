"""Hand a prompt's cache from one process to another through a file: the cache's own safetensors,
together with the prompt's tokens and text, and the logits after them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import kvq_jax as kvq
from kvq_jax.cache.cache import Cache, dims_of
from kvq_jax.cache.row_operations import check_windows
from kvq_models.inference.checked_input import other_dims
from kvq_models.inference.method_parameters import parameters_for
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama
from kvq_tools.cli.console import UserError, input_errors
from kvq_tools.cli.opening import Opening, stored

_trim = jax.jit(kvq.rows.trim, donate_argnums=0)  # else the whole body is copied to write one block


@dataclasses.dataclass(frozen=True)
class SavedPrompt:
    """The contents of a file according to its header: the cache's layout, the prompt, logits [1, V]
    float32, and the prompt's text unless it was given as token ids."""

    path: str
    layout: Cache
    prompt: list[int]
    logits: np.ndarray
    opening: Opening | None


def save(
    path: Path,
    llama: Llama,
    model_fingerprint: str,
    cache: Cache,
    prompt: list[int],
    logits: jax.Array,
    opening: Opening | None,
) -> None:
    """Write the file completely or not at all. `model_fingerprint` is of the model without method
    parameters."""
    beside = {"tokens": np.asarray(prompt, np.int32), "logits": np.asarray(logits, np.float32)}
    beside |= opening.arrays() if opening else {}
    with input_errors():
        kvq.files.save(
            cache,
            path,
            model_fingerprint=model_fingerprint,
            parameters_fingerprint=kvq.files.fingerprint(llama.cache_parameters),
            beside=beside,
        )


def described(path: str, config: LlamaConfig) -> SavedPrompt:
    """Read everything that needs no weights. Raises UserError if `save` did not write the file, or
    if it belongs to a model with other dimensions."""
    with input_errors():
        layout, beside = kvq.files.saved_layout(path), kvq.files.load_beside(path)
        if different := other_dims(layout.dims, dims_of(config)):
            raise UserError(f"{path!r} holds the cache of another model: it has {different}")
    tokens, logits = beside.get("tokens"), beside.get("logits")
    if tokens is None or logits is None or layout.batch != 1:
        raise UserError(
            f"{path!r} holds no prompt beside its cache; kvq prefill writes files that do"
        )
    fits = (
        tokens.ndim == 1
        and tokens.dtype == np.int32
        and 0 < len(tokens) <= layout.capacity
        and all(0 <= token < config.vocab_size for token in tokens.tolist())
        and logits.dtype == np.float32
        and logits.shape == (1, config.vocab_size)
    )
    if not fits:
        raise UserError(
            f"{path!r} does not fit the model: {tokens.dtype}{list(tokens.shape)} tokens, logits"
            f" {list(logits.shape)}"
        )
    with input_errors():
        return SavedPrompt(path, layout, tokens.tolist(), logits, stored(beside))


def load(saved: SavedPrompt, llama: Llama, model_fingerprint: str) -> Cache:
    """Return the cache, bit for bit. Raises UserError if the model or its parameters differ, or if
    the file is damaged."""
    with input_errors():
        cache = kvq.files.load(
            saved.path,
            spec=saved.layout.spec,
            config=llama.config,
            model_fingerprint=model_fingerprint,
            parameters_fingerprint=kvq.files.fingerprint(llama.cache_parameters),
        )
    if cache.lengths.tolist() != [len(saved.prompt)]:
        raise UserError(
            f"{saved.path!r} holds a cache of {cache.lengths.tolist()[0]} tokens, and"
            f" {len(saved.prompt)} beside it"
        )
    return cache


def can_shorten(cache: Cache, kept: int) -> bool:
    """Return False if a sliding window has left tokens that the first `kept` tokens need."""
    try:
        check_windows(cache, jnp.asarray([kept]))
    except ValueError:
        return False
    return True


def shortened(llama: Llama, cache: Cache, kept: int) -> Cache:
    """Return a cache of one sequence without the tokens after the first `kept`. Tokens that return
    from the quantized body keep the value that attention saw (`kvq.rows.trim`). Raises UserError if
    a sliding window has left tokens that the shorter sequence needs."""
    with input_errors():
        check_windows(cache, jnp.asarray([kept]))  # which a compiled trim cannot
        return _trim(cache, jnp.asarray([kept]), parameters_for(llama, cache.spec))
