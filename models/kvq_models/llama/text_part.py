"""The language model of a checkpoint that reads images, too: its fields of config.json, and its
tensors under the names that a checkpoint of it alone would have."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvq_models.llama.config_fields import QUANTIZATION, optional
from kvq_models.llama.families import FAMILIES
from kvq_models.llama.stored_tensor import StoredTensor


class TextPart(NamedTuple):
    """The language model of one kind of checkpoint.

    Args:
        architecture: of the whole checkpoint.
        text_types: the model_type of the language model alone, by the one in text_config.
        defaults: of fields that text_config may leave out, and that families have no default for.
    """

    architecture: str
    text_types: Mapping[str, str]
    defaults: Mapping[str, Any] = {}


# The smaller Gemma 3 with images state what differs from Gemma3TextConfig, and nothing else.
_GEMMA3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
}
# In files of before text_config, the fields of the language model are those of the checkpoint.
PARTS = {
    "gemma3": TextPart("Gemma3ForConditionalGeneration", {"gemma3_text": "gemma3_text"}, _GEMMA3),
    "mistral3": TextPart(
        "Mistral3ForConditionalGeneration", {"mistral": "mistral", "ministral3": "ministral3"}
    ),
    "qwen2_vl": TextPart(
        "Qwen2VLForConditionalGeneration", {"qwen2_vl_text": "qwen2", "qwen2_vl": "qwen2"}
    ),
    "qwen2_5_vl": TextPart(
        "Qwen2_5_VLForConditionalGeneration", {"qwen2_5_vl_text": "qwen2", "qwen2_5_vl": "qwen2"}
    ),
    "qwen3_vl": TextPart("Qwen3VLForConditionalGeneration", {"qwen3_vl_text": "qwen3"}),
}
_OF_THE_CHECKPOINT = (
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
    *QUANTIZATION,
)
_OF_IMAGES = re.compile(r"(model\.)?(vision_tower|visual|multi_modal_projector)\.")
_HEAD = re.compile(r"(model\.)?language_model\.(?=lm_head\.)")
_DECODER = re.compile(r"(model\.)?language_model\.(model\.)?")


def _part_of(hf: Mapping[str, Any]) -> TextPart | None:
    """Return the part of a checkpoint that its config.json says, or None if it reads texts
    alone."""
    model_type = hf.get("model_type")
    return PARTS.get(model_type) if isinstance(model_type, str) else None


def text_fields(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a config.json that the language model alone would have: `hf` itself if
    it describes nothing else.

    Raises NotImplementedError for another architecture or language model than the table has, and
    ValueError for a malformed field.
    """
    part = _part_of(hf)
    if part is None:
        return hf
    if (stated := hf.get("architectures") or [part.architecture]) != [part.architecture]:
        raise NotImplementedError(
            f"config field architectures={str(stated)[:80]} is not supported for"
            f" model_type={hf['model_type']!r}; supported: {part.architecture}"
        )
    text = hf if hf.get("text_config") is None else optional(hf, "text_config", dict, {})
    kind = optional(text, "model_type", str, next(iter(part.text_types)))
    if kind not in part.text_types:
        raise NotImplementedError(
            f"config field text_config.model_type={kind!r} is not supported; supported:"
            f" {', '.join(part.text_types)}"
        )
    model_type = part.text_types[kind]
    fields = {**part.defaults, **text}
    fields |= {name: hf[name] for name in _OF_THE_CHECKPOINT if hf.get(name) is not None}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(fields.get(name), Mapping):
            fields[name] = _one_position(fields[name])
    return fields | {
        "model_type": model_type,
        "architectures": [FAMILIES[model_type].architecture],
    }


def _one_position(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a RoPE without the sections whose channels rotate by a token's time, height and width:
    the three are one number in a text."""
    return {
        name: "default" if name in ("type", "rope_type") and value == "mrope" else value
        for name, value in rope.items()
        if name not in ("mrope_section", "mrope_interleaved")
    }


def without_images(
    hf: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint except those that read images."""
    if _part_of(hf) is None:
        return {**tensors}
    return {name: one for name, one in tensors.items() if not _OF_IMAGES.match(name)}


def text_tensors(
    hf: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return tensors by the names that a checkpoint of the language model alone would have."""
    if _part_of(hf) is None:
        return {**tensors}
    return {
        _DECODER.sub("model.", _HEAD.sub("", name)): dataclasses.replace(
            tensor, stored_as=tensor.stored_as or name
        )
        for name, tensor in tensors.items()
    }
