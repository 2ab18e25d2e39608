"""GGUF files for tests, written with the gguf library as llama.cpp's converter writes them."""

import functools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np

from kvq_models.llama import fused_tensors, hf_names
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama
from kvq_models.llama.rope_config import rotary_dim

SWAPPED = ("llama", "mistral3", "granite", "smollm3")  # architectures whose RoPE rotates neighbours
TOKENS = ["<|end|>", *(chr(c) for c in range(33, 96)), *"Ġthe", "th", "the", "Ġthe", "12"]


def swapped(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Return a projection [heads * H, ...] with the rows of each head in GGUF's order, from halves
    to pairs (2i, 2i + 1)."""
    rows = tensor.shape[0] // heads
    return (
        tensor.reshape(heads, 2, rows // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )


@functools.cache
def _names(architecture: str) -> gguf.TensorNameMap:
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(arch, 1)


def gguf_name(name: str, architecture: str = "llama") -> str:
    """Return the name that the gguf library gives to a Hugging Face tensor. That of experts has no
    number."""
    layer = re.search(r"layers\.(\d+)", name)
    first = re.sub(r"layers\.\d+", "layers.0", name).replace(".*.", ".")
    known = _names(architecture).get_name(first, (".weight", ".bias"))
    assert known is not None, name
    return known if layer is None else known.replace("blk.0.", f"blk.{layer[1]}.")


def family_fields(config: LlamaConfig, architecture: str) -> dict[str, Any]:
    """Return the fields that llama.cpp's converter adds for a family."""
    fields: dict[str, Any] = {}
    if architecture == "granite":
        fields |= {
            "attention.scale": config.attention_multiplier,
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
        }
    if config.sliding_window is not None:
        fields["attention.sliding_window"] = config.sliding_window
    if architecture == "gemma2":
        fields |= {
            "attn_logit_softcapping": config.attention_soft_cap,
            "final_logit_softcapping": config.logits_soft_cap,
        }
    rope = config.rope
    if rope.rope_type == "yarn":
        fields |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope.factor}
    if rope.rope_type in ("yarn", "longrope"):
        fields["rope.scaling.original_context_length"] = rope.original_max_position_embeddings
    if rope.mscale_all_dim is not None:
        fields["rope.scaling.yarn_log_multiplier"] = rope.mscale_all_dim
    if rope.llama_4_scaling_beta is not None:
        fields["attention.temperature_scale"] = rope.llama_4_scaling_beta
    if architecture == "qwen3vl":
        fields |= {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 1}
    if architecture == "phi3":
        fields["rope.dimension_count"] = rotary_dim(rope, config.head_dim)
        fields["rope.scaling.attn_factor"] = rope.attention_factor
    if config.experts is not None:
        fields |= {
            "expert_count": config.experts.count,
            "expert_used_count": config.experts.per_token,
        }
        if architecture in ("qwen3moe", "gpt-oss"):
            fields["expert_feed_forward_length"] = config.experts.intermediate_size
    return fields


def _tensors(
    llama: Llama, architecture: str, stacked_experts: bool
) -> Iterator[tuple[str, np.ndarray]]:
    config = llama.config
    tensors = {
        weight.name: np.array(
            np.swapaxes(weight.leaf, -1, -2) if weight.transpose else weight.leaf, np.float32
        )
        for weight in hf_names.weights(llama).values()
    }
    if architecture == "phi3":
        tensors = fused_tensors.joined(config, tensors)
        factors = zip(
            ("short", "long"), (config.rope.short_factor, config.rope.long_factor), strict=True
        )
        for name, values in factors:
            if values:
                yield f"rope_factors_{name}.weight", np.array(values, np.float32)
    for hf_name, tensor in tensors.items():
        if architecture in SWAPPED and ".q_proj." in hf_name:
            tensor = swapped(tensor, config.num_attention_heads)
        if architecture in SWAPPED and ".k_proj." in hf_name:
            tensor = swapped(tensor, config.num_key_value_heads)
        if config.unit_offset_norms and "norm" in hf_name:
            tensor = tensor + 1
        if architecture == "gpt-oss" and ".experts." in hf_name:
            stem, bias, _ = hf_name.partition("_bias")
            tensor = tensor if bias else np.swapaxes(tensor, -1, -2)
            yield gguf_name(stem, architecture) + (".bias" if bias else ".weight"), tensor
            continue
        name = gguf_name(hf_name, architecture)
        if hf_name.endswith("sinks"):
            yield f"{name}.weight", tensor
            continue
        if "*" not in hf_name or stacked_experts:
            yield name, tensor
            continue
        for i, expert in enumerate(tensor):
            yield re.sub("_exps", f".{i}", name), expert


def write_gguf(
    llama: Llama,
    path: pathlib.Path,
    *,
    architecture: str = "llama",
    kind: str = "F32",
    fields: dict[str, Any] | None = None,
    rope_factors: np.ndarray | None = None,
    tokenizer: dict[str, Any] | None = None,
    general: dict[str, Any] | None = None,
    alignment: int | None = None,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
    stacked_experts: bool = True,
) -> pathlib.Path:
    """Write a model. kind: of its matrices. Norms and biases are float32. fields, general: metadata
    under the architecture's keys and under `general`, added or changed (None: left out)."""
    config, writer = llama.config, gguf.GGUFWriter(path, architecture, endianess=endianess)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in (general or {}).items():
        _add(writer, f"general.{key}", value)
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
        "vocab_size": config.vocab_size,
    }
    sizes |= family_fields(config, architecture)
    for key, value in (sizes | (fields or {})).items():
        if value is not None:
            _add(writer, f"{architecture}.{key}", value)
    for key, value in ({"bos_token_id": 1, "eos_token_id": 2} | (tokenizer or {})).items():
        _add(writer, f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}", value)
    for name, tensor in _tensors(llama, architecture, stacked_experts):
        is_matrix = tensor.ndim > 1 and not name.endswith(".bias")
        stored = gguf.GGMLQuantizationType[kind if is_matrix else "F32"]
        writer.add_tensor(name, gguf.quantize(tensor, stored), raw_dtype=stored)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(**fields: Any) -> dict[str, Any]:
    """Return a byte-level BPE tokenizer's metadata."""
    merges = ["t h", "th e", "Ġ the", "1 2"]
    kinds = [3, *[1] * (len(TOKENS) - 1)]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "token_type": kinds,
        "merges": merges,
        "bos_token_id": 0,
        "eos_token_id": 0,
    } | fields


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def split_gguf(path: pathlib.Path, parts: int) -> list[pathlib.Path]:
    """Write a GGUF file's fields and tensors as llama.cpp's gguf-split does."""
    reader = gguf.GGUFReader(path)
    names = [path.with_name(f"p-{i + 1:05}-of-{parts:05}.gguf") for i in range(parts)]
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(name, "llama")
        for key, field in reader.fields.items():
            if number == 0 and not key.startswith(("GGUF.", "general.architecture")):
                kind = field.types[0]
                inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(key, field.contents(), kind, inner)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::parts]:
            writer.add_tensor(tensor.name, np.asarray(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return names
