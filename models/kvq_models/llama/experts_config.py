"""The experts of a model's MLPs, read from and written to config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvq_models.llama.config_fields import check_positive, fields_named, optional, required

# config.json's name of the number of experts, by model_type. transformers writes both families
# under the first name, published files have these.
NAMES = {
    "mixtral": "num_local_experts",
    "qwen3_moe": "num_experts",
    "gpt_oss": "num_local_experts",
}
COUNTS = ("num_local_experts", "num_experts")
MAX_EXPERTS = 1024  # twice llama.cpp's; weights are checked expert by expert


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of every MLP.

    count: the number of experts.
    per_token: how many of them compute each token.
    intermediate_size: of each expert.
    normalized: the weights of a token's experts are divided by their sum.
    biased: the router and the experts' projections have biases (gpt-oss).
    swiglu_limit, swiglu_alpha: the inner activation is (u + 1) g sigmoid(alpha g), with the gate g
        at most the limit, and u within it (gpt-oss). None: silu(g) u.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool = True
    biased: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0

    def __post_init__(self) -> None:
        for name in ("count", "per_token", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"config field experts.{name}={getattr(self, name)} must be at least 1"
                )
        for name in ("swiglu_limit", "swiglu_alpha"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.count > MAX_EXPERTS:
            raise ValueError(
                f"config field experts.count={self.count} must be at most {MAX_EXPERTS}"
            )
        if self.per_token > self.count:
            raise ValueError(
                f"config field experts.per_token={self.per_token} must be at most the"
                f" {self.count} experts"
            )


def experts_from_hf(hf: Mapping[str, Any]) -> ExpertsConfig | None:
    """Return the experts of a config.json, or None for a family without any.

    Raises NotImplementedError for a model whose layers are not all alike.
    """
    model_type = hf["model_type"]
    if model_type not in NAMES:
        return None
    activation: dict[str, Any] = {}
    if model_type == "gpt_oss":
        activation = {
            "biased": True,
            "swiglu_limit": optional(hf, "swiglu_limit", float, 7.0),
            "swiglu_alpha": optional(hf, "swiglu_alpha", float, 1.702),
        }
    if model_type in ("mixtral", "gpt_oss"):
        width, normalized = "intermediate_size", True
    else:
        width = "moe_intermediate_size"
        normalized = optional(hf, "norm_topk_prob", bool, False)
        if (step := optional(hf, "decoder_sparse_step", int, 1)) != 1:
            raise NotImplementedError(
                f"config field decoder_sparse_step={step} is not supported; supported: 1 (experts"
                " in every layer)"
            )
        if dense := optional(hf, "mlp_only_layers", list, []):
            raise NotImplementedError(
                f"config field mlp_only_layers={str(dense)[:40]} is not supported; supported: []"
                " (experts in every layer)"
            )
    counts = {name: required(hf, name, int) for name in COUNTS if hf.get(name) is not None}
    if len(set(counts.values())) != 1:
        named = " and ".join(f"{name}={hf.get(name)}" for name in COUNTS)
        raise ValueError(f"config fields {named}: one number of experts is needed")
    per_token = required(hf, "num_experts_per_tok", int)
    size, (count_name, count) = required(hf, width, int), counts.popitem()
    names = {"count": count_name, "per_token": "num_experts_per_tok", "intermediate_size": width}
    with fields_named({f"experts.{name}": stated for name, stated in names.items()}):
        return ExpertsConfig(count, per_token, size, normalized, **activation)


def experts_to_hf(experts: ExpertsConfig | None, model_type: str) -> dict[str, Any]:
    """Return the fields of config.json that `experts_from_hf` reads."""
    if experts is None:
        return {}
    fields: dict[str, Any] = {"num_experts_per_tok": experts.per_token}
    if model_type in NAMES:
        fields[NAMES[model_type]] = experts.count
    if experts.biased:
        fields |= {"swiglu_limit": experts.swiglu_limit, "swiglu_alpha": experts.swiglu_alpha}
    if model_type == "qwen3_moe":
        fields |= {
            "moe_intermediate_size": experts.intermediate_size,
            "norm_topk_prob": experts.normalized,
        }
    return fields
