"""Describe a model and the calibration of a cache, for `kvq doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import kvq_jax as kvq
from kvq_models.calibration.file import calibration_hint, check_calibration
from kvq_models.calibration.fingerprint import partial_fingerprint_of
from kvq_models.calibration.needs import needs
from kvq_models.llama import checkpoint
from kvq_models.llama.config import LlamaConfig
from kvq_models.named_models.names import located
from kvq_tools.cli.console import counted, input_errors
from kvq_tools.evaluation.results import finite

BIAS_NAME = "model.layers.{}.self_attn.k_proj.bias"


def facts(
    model: str, config: LlamaConfig, spec: kvq.cache.CacheSpec, biases: list[np.ndarray] | None
) -> dict[str, str]:
    """Describe in words the facts about the model that matter to a cache."""
    h = config.head_dim
    normed = (
        "applied when keys are rebuilt"
        if rebuilds_keys(spec, config)
        else "keys are cached after it"
    )
    return {
        "model": f"{config.model_type}, {config.num_hidden_layers} layers",
        "heads": (
            f"{config.num_attention_heads} query heads on {config.num_key_value_heads} KV heads"
        ),
        "head_dim": str(h),
        "qk_norm": f"yes; {normed}" if config.qk_norm else "none",
        "rope": (
            f"{config.rope.rope_type}, theta {config.rope.theta:g}"
            + (f", factor {config.rope.factor:g}" if config.rope.factor != 1 else "")
        ),
        "sliding_window": _sliding_window(model, config),
        "outliers": _outliers(config, spec),
        "k_proj_bias": (
            _bias_in_words(config, biases)
            + ("; subtracted before keys are quantized" if spec.subtract_bias else "")
        ),
        "prompt_statistics": (
            "fixed by the first prompt of a sequence"
            if kvq.cache.has_prompt_statistics(spec, config)
            else "none"
        ),
    }


def rebuilds_keys(spec: kvq.cache.CacheSpec, config: LlamaConfig) -> bool:
    """Return whether any layer rebuilds its keys from cached rows."""
    return any(plan.k.facts.rebuilds for plan in kvq.cache.layout(spec, config, 1, 1).plans)


def _outliers(config: LlamaConfig, spec: kvq.cache.CacheSpec) -> str:
    width = config.num_key_value_heads * config.head_dim
    fraction = kvq.size.outlier_fraction(spec, config)
    return (
        f"full-precision slots for {fraction:.2%} of all elements; a token has {width} of each side"
        if fraction
        else "none kept in full precision"
    )


def _sliding_window(model: str, config: LlamaConfig) -> str:
    if config.sliding_window is not None:
        return (
            f"{config.sliding_window} tokens in {len(config.windowed_layers)} of"
            f" {config.num_hidden_layers} layers"
        )
    with input_errors():  # config.json has what `LlamaConfig` drops
        window = checkpoint.open_checkpoint(model, "config").fields.get("sliding_window")
    if window is None:
        return "none"
    return f"{window} in config.json, inactive: every layer attends to all tokens"


def key_biases(model: str, config: LlamaConfig) -> list[np.ndarray] | None:
    """Read the k_proj bias of every layer, [K * H] fp32, and no other tensor. None without such a
    bias or without local weights."""
    stored = _stored_weights(model) if config.qkv_bias else None
    if stored is None:
        return None
    names = [BIAS_NAME.format(layer) for layer in range(config.num_hidden_layers)]
    with input_errors():
        missing = [name for name in names if name not in stored.tensors]
        if missing:
            raise ValueError(
                f"the files lack tensor {missing[0]!r}, which the model of config.json needs"
            )
        return [stored.read(name).astype(np.float32) for name in names]


def _stored_weights(model: str) -> checkpoint.Checkpoint | None:
    """Return the local checkpoint with its weights, or None if there are none (a Hub id, a
    directory with config.json alone)."""
    path = Path(located(model))
    if not path.is_file() and not any(path.glob("*.safetensors")):
        return None
    with input_errors():
        return checkpoint.open_checkpoint(path)


def bias_facts(biases: list[np.ndarray] | None, layer: int) -> dict[str, Any]:
    """Return the size of a layer's key bias, under the key `k_proj_bias`. Numbers that are not
    finite are None."""
    if biases is None:
        return {"k_proj_bias": None}
    bias = biases[layer]
    return {
        "k_proj_bias": {
            "norm": finite(float(np.linalg.norm(bias))),
            "largest": finite(float(np.abs(bias).max())),
            "median": finite(float(np.median(np.abs(bias)))),
        }
    }


def _bias_in_words(config: LlamaConfig, biases: list[np.ndarray] | None) -> str:
    if not config.qkv_bias:
        return "none"
    if biases is None:
        return "yes; not read: the weights are not in a local directory"
    broken = [layer for layer, bias in enumerate(biases) if not np.isfinite(bias).all()]
    if broken:
        return f"yes; not finite in layer {broken[0]}"
    worst = int(np.argmax([np.abs(b).max() for b in biases]))
    return f"yes; largest {np.abs(biases[worst]).max():.3g} in layer {worst}"


def calibration_state(
    model: str, config: LlamaConfig, spec: kvq.cache.CacheSpec, file: str | None
) -> tuple[str, list[str]]:
    """Return (the state of the calibration in words, warnings). Raises UserError if the file is not
    for this cache and model."""
    needed = needs(spec, config)
    if not needed and file is None:
        rebuilds = rebuilds_keys(spec, config)
        made = "; what rebuilds keys is made from the weights" if rebuilds else ""
        return f"not needed{made}", []
    if file is None:
        keys, values = (sum(need.side == side for need in needed.values()) for side in ("k", "v"))
        return f"needed for the keys of {keys} layers and the values of {values}", [
            f"{str(spec)!r} needs a calibration: {calibration_hint(spec)}"
        ]
    stored = _stored_weights(model)
    with input_errors():
        fingerprint = None if stored is None else partial_fingerprint_of(stored)
        calibration = check_calibration(spec, config, file, fingerprint)
    assert calibration is not None, "a file is refused if none is needed"
    compared = (
        "fits this cache and model"
        if fingerprint
        else "fits this cache; the weights are not in a local directory and were not compared"
    )
    origin = calibration.origin
    words = (
        f"{compared}: {counted(origin.samples, 'samples')} of {origin.length} tokens of"
        f" {origin.text}, seed {origin.seed}, {origin.dtype}"
    )
    return words, []
