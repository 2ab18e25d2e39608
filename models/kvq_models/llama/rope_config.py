"""Settings of RoPE: one frozen value, read from both spellings of config.json and written in the
older one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from kvq_models.llama.config_fields import LIMIT, check_positive, optional, required, typed
from kvq_models.llama.families import Family

_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "llama_4_scaling_beta",
    ),
    "longrope": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    ),
}


_KINDS = ("full_attention", "sliding_attention")
ROPE_TYPES = tuple(_ROPE_FIELDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Settings of the rotary frequencies (models/kvq_models/llama/rope.py). Fields that `rope_type`
    does not use keep their defaults.

    Raises NotImplementedError for another rope_type and ValueError for a value that gives no
    rotation.
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    llama_4_scaling_beta: float | None = None
    partial_rotary_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise NotImplementedError(
                f"config field rope_type={self.rope_type!r} is not supported; supported:"
                f" {', '.join(ROPE_TYPES)}"
            )
        if not 1 < self.theta < LIMIT:
            raise ValueError(
                f"config field rope_theta={self.theta} must be above 1 and finite in float32"
            )
        for name in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
        ):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(
                f"config field partial_rotary_factor={self.partial_rotary_factor} must be above 0"
                " and at most 1"
            )
        for name in ("short_factor", "long_factor"):
            for value in getattr(self, name):
                check_positive(name, value)
        for name in ("mscale", "mscale_all_dim", "llama_4_scaling_beta"):
            if getattr(self, name):  # 0 means none
                check_positive(name, getattr(self, name))
        if self.original_max_position_embeddings < 2:  # longrope divides by its logarithm
            raise ValueError(
                "config field"
                f" original_max_position_embeddings={self.original_max_position_embeddings} must be"
                " at least 2"
            )
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"config field low_freq_factor={self.low_freq_factor} must be below"
                f" high_freq_factor={self.high_freq_factor}"
            )


def rotary_dim(rope: RopeConfig, head_dim: int) -> int:
    """Return the number of channels of a head that rotate."""
    return int(head_dim * rope.partial_rotary_factor) // 2 * 2


def check_rotation(rope: RopeConfig, head_dim: int) -> None:
    """Raise ValueError if no channel rotates, if too few do for dynamic, or if longrope has another
    number of factors than pairs of channels that do."""
    pairs = rotary_dim(rope, head_dim) // 2
    if not pairs:
        raise ValueError(
            f"config field partial_rotary_factor={rope.partial_rotary_factor} leaves no pair of the"
            f" {head_dim} channels to rotate"
        )
    if rope.rope_type == "dynamic" and pairs == 1:  # the exponent of its base is R / (R - 2)
        partial = rope.partial_rotary_factor
        stated = "" if partial == 1 else f"partial_rotary_factor={partial} of "
        raise ValueError(
            f"config field {stated}head_dim={head_dim} is too small for rope_type='dynamic'"
        )
    for name in ("short_factor", "long_factor"):
        count = len(getattr(rope, name))
        if rope.rope_type == "longrope" and count != pairs:
            raise ValueError(f"config field {name} has {count} entries for {pairs} pairs")


def rope_from_hf(hf: Mapping[str, Any], family: Family) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the RoPE of a config.json, and the one of windowed layers if they have their own.

    Reads `rope_parameters`, of the model or of each kind of layer, or `rope_theta` with an optional
    `rope_scaling` whose type key is `rope_type` or `type`.
    """
    section, fields = _section(hf, family)
    local = family.local_rope_theta
    kinds = [fields.get(kind) for kind in _KINDS]
    if local is None or not any(isinstance(kind, Mapping) for kind in kinds):
        rope = _rope(hf, fields, family.rope_theta, section)
        if local is None:
            return rope, None
        # the older spelling: scaling is of full layers alone
        if "rope_local_base_freq" not in family.fields:
            local = optional(hf, "rope_theta", float, local)
        return rope, RopeConfig(theta=optional(hf, "rope_local_base_freq", float, local))
    for kind, value in zip(_KINDS, kinds, strict=True):
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"config field {section}.{kind}={str(value)[:40]} must be an object")
    full, windowed = (kind or {} for kind in kinds)
    return (
        _rope(hf, full, family.rope_theta, f"{section}.{_KINDS[0]}"),
        _rope({**hf, "rope_theta": None}, windowed, local, f"{section}.{_KINDS[1]}"),
    )


def _section(hf: Mapping[str, Any], family: Family) -> tuple[str, Mapping[str, Any]]:
    """Return the object that states the RoPE, with its name. Raise ValueError for one that is no
    object, and for two of which one would be ignored."""
    names = ("rope_scaling", "rope_parameters")
    stated = {name: hf[name] for name in names if hf.get(name) is not None}
    for name, value in stated.items():
        if not isinstance(value, Mapping):
            raise ValueError(f"config field {name}={str(value)[:40]!r} must be an object")
    full = {name: value for name, value in stated.items() if value}
    if len(full) == 2 and full["rope_scaling"] != full["rope_parameters"]:
        raise ValueError(
            "config fields rope_scaling and rope_parameters differ: state one of them, with the"
            " rope_theta of rope_parameters in it"
        )
    if not stated:
        return "rope_scaling", family.rope_scaling
    return next(iter(full.items()), next(iter(stated.items())))


def _rope(
    hf: Mapping[str, Any], fields: Mapping[str, Any], theta: float, section: str
) -> RopeConfig:
    """Return the RoPE of one object of fields."""
    if any(isinstance(value, Mapping) for value in fields.values()):
        raise NotImplementedError(
            f"config field {section} differs between layer types; supported: one RoPE for all"
            " layers"
        )
    stated = optional(fields, "partial_rotary_factor", float, None)
    partial = optional(hf, "partial_rotary_factor", float, 1.0) if stated is None else stated
    if partial != 1 and hf["model_type"] != "phi3":
        raise NotImplementedError(
            f"config field {section}.partial_rotary_factor={partial} is not supported; supported:"
            " 1.0"
        )
    rope_type = fields.get("rope_type", fields.get("type", "default"))
    if hf["model_type"] == "phi3" and rope_type in ("su", "yarn"):  # as older files name it
        rope_type = "longrope"
    if rope_type == "default" and (factor := optional(fields, "factor", float, 1.0)) != 1:
        raise NotImplementedError(
            f"config field {section}.factor={factor} is of no rope_type; supported:"
            f" {', '.join(ROPE_TYPES)} with its rope_type"
        )
    scales_queries = hf["model_type"] == "ministral3" and rope_type == "yarn"
    if fields.get("llama_4_scaling_beta") and not scales_queries:
        raise NotImplementedError(
            f"config field {section}.llama_4_scaling_beta={fields['llama_4_scaling_beta']!r:.40} is"
            " not supported; supported: with model_type='ministral3' and rope_type='yarn'"
        )
    rope: dict[str, Any] = {
        "rope_type": rope_type,
        "theta": optional(fields, "rope_theta", float, optional(hf, "rope_theta", float, theta)),
        "partial_rotary_factor": partial,
    }
    if rope_type in ("linear", "dynamic", "llama3"):
        rope |= {"factor": required(fields, "factor", float)}
    if rope_type == "llama3":
        rope |= {"original_max_position_embeddings": _original_max_positions(hf, fields)}
        rope |= {
            name: required(fields, name, float) for name in ("low_freq_factor", "high_freq_factor")
        }
    if rope_type == "yarn":
        rope |= _yarn_fields(hf, fields)
    if rope_type == "longrope":
        rope |= _extended(hf, fields)
        for name in ("short_factor", "long_factor"):
            values = required(fields, name, list)
            rope[name] = tuple(typed(name, value, float) for value in values)
    return RopeConfig(**rope)


def _original_max_positions(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> int:
    """Return the context length before it was extended. As in transformers, the top-level field has
    priority."""
    inner = optional(
        fields,
        "original_max_position_embeddings",
        int,
        required(hf, "max_position_embeddings", int),
    )
    return optional(hf, "original_max_position_embeddings", int, inner)


def _extended(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that YaRN and LongRoPE share. A missing `factor` is the ratio of the two
    context lengths."""
    original = _original_max_positions(hf, fields)
    ratio = required(hf, "max_position_embeddings", int) / max(original, 1)
    return {
        "original_max_position_embeddings": original,
        "factor": optional(fields, "factor", float, ratio),
        "attention_factor": optional(fields, "attention_factor", float, None),
    }


def _yarn_fields(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    extended = _extended(hf, fields)
    times = optional(fields, "attn_factor", float, None)
    if extended["attention_factor"] is None and times is not None:
        # YaRN's own code, vLLM and llama.cpp multiply YaRN's factor by it; transformers ignores it
        extended["attention_factor"] = times * (1 + 0.1 * math.log(max(extended["factor"], 1.0)))
    return extended | {
        "beta_fast": optional(fields, "beta_fast", float, 32.0),
        "beta_slow": optional(fields, "beta_slow", float, 1.0),
        "mscale": optional(fields, "mscale", float, None),
        "mscale_all_dim": optional(fields, "mscale_all_dim", float, None),
        "truncate": optional(fields, "truncate", bool, True),
        "llama_4_scaling_beta": optional(fields, "llama_4_scaling_beta", float, None),
    }


def rope_to_hf(rope: RopeConfig, family: Family) -> dict[str, Any] | None:
    """Return the `rope_scaling` object with only the fields of its type, because readers warn about
    others, or None if a family's files without one mean the same."""
    if rope.rope_type == "default" and not family.rope_scaling:
        return None
    fields = {name: getattr(rope, name) for name in _ROPE_FIELDS[rope.rope_type]}
    return {"rope_type": rope.rope_type} | {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in fields.items()
        if value is not None
    }
