"""Hand a prompt's cache from one process to another through a file: the cache's own safetensors,
together with the prompt's tokens and the logits after them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np

import kvq_jax as kvq
from kvq_jax.cache.cache import Cache
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama
from kvq_tools.cli.console import UserError, input_errors


@dataclasses.dataclass(frozen=True)
class SavedPrompt:
    """The contents of a file according to its header: the cache's layout, the prompt, and logits
    [1, V] float32."""

    path: str
    layout: Cache
    prompt: list[int]
    logits: np.ndarray


def save(
    path: Path,
    llama: Llama,
    model_fingerprint: str,
    cache: Cache,
    prompt: list[int],
    logits: jax.Array,
) -> None:
    """Write the file completely or not at all. `model_fingerprint` is of the model without method
    parameters."""
    beside = {"tokens": np.asarray(prompt, np.int32), "logits": np.asarray(logits, np.float32)}
    with input_errors():
        kvq.save_cache(
            cache,
            path,
            model_fingerprint=model_fingerprint,
            parameters_fingerprint=kvq.fingerprint(llama.cache_parameters),
            beside=beside,
        )


def described(path: str, config: LlamaConfig) -> SavedPrompt:
    """Read everything that needs no weights. Raises UserError if `save` did not write the file, or
    if it belongs to a model with other dimensions."""
    with input_errors():
        layout, beside = kvq.saved_layout(path), kvq.load_beside(path)
        if kvq.layout(layout.spec, config, 1, layout.capacity, layout.dtype).dims != layout.dims:
            raise UserError(
                f"{path!r} holds the cache of a model of other dimensions: {layout.dims}"
            )
    tokens, logits = beside.get("tokens"), beside.get("logits")
    if tokens is None or logits is None or layout.batch != 1:
        raise UserError(
            f"{path!r} holds no prompt beside its cache; kvq prefill writes files that do"
        )
    fits = (
        tokens.ndim == 1
        and tokens.dtype == np.int32
        and 0 < len(tokens) <= layout.capacity
        and logits.dtype == np.float32
    )
    if (
        not fits
        or logits.shape != (1, config.vocab_size)
        or not all(0 <= token < config.vocab_size for token in tokens.tolist())
    ):
        raise UserError(
            f"{path!r} does not fit the model: {tokens.dtype}{list(tokens.shape)} tokens, logits"
            f" {list(logits.shape)}"
        )
    return SavedPrompt(path, layout, tokens.tolist(), logits)


def check_same(saved: SavedPrompt, prompt: list[int]) -> None:
    """Raise UserError if the prompt differs from the one in the file."""
    if prompt != saved.prompt:
        pairs = enumerate(zip(prompt, saved.prompt, strict=False))
        first = next(
            (i for i, (ours, theirs) in pairs if ours != theirs),
            min(len(prompt), len(saved.prompt)),
        )
        raise UserError(
            f"{saved.path!r} holds the cache of another prompt: {len(saved.prompt)} tokens, and"
            f" the one given has {len(prompt)}; they differ from token {first} on"
        )


def load(saved: SavedPrompt, llama: Llama, model_fingerprint: str, config: LlamaConfig) -> Cache:
    """Return the cache, bit for bit. Raises UserError if the model or its parameters differ, or if
    the file is damaged."""
    with input_errors():
        cache = kvq.load_cache(
            saved.path,
            spec=saved.layout.spec,
            config=config,
            model_fingerprint=model_fingerprint,
            parameters_fingerprint=kvq.fingerprint(llama.cache_parameters),
        )
    if cache.lengths.tolist() != [len(saved.prompt)]:
        raise UserError(
            f"{saved.path!r} holds a cache of {cache.lengths.tolist()[0]} tokens, and"
            f" {len(saved.prompt)} beside it"
        )
    return cache
