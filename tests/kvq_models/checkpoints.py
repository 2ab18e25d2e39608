"""Small random checkpoints for tests: every family and feature once, with weights whose loss would
show.

A fresh model has zero biases and unit norms, so a loader that forgets them still agrees. Here every
weight is random.
"""

import copy
import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvq_models.llama import hf_names
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama, abstract_llama

PROMPT = (  # of which the tokenizer of `model` knows the words
    "the key of the cat is seven, and the key of the dog is"
)
CHAT_TEMPLATE = (  # strips messages, as Llama 3's does
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STORIES = pathlib.Path(__file__).parents[2] / "../shared/data/models/stories260K-hf"

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN_ALL = YARN | {
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
    "beta_fast": 20.0,
    "beta_slow": 2.0,
    "truncate": False,
}


@dataclasses.dataclass(frozen=True)
class CheckpointCase:
    """A checkpoint to build: fields of config.json beside `SIZES`, RoPE fields, and how config.json
    spells those."""

    model_type: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    rope: dict[str, Any] = dataclasses.field(default_factory=lambda: {"rope_type": "default"})
    spelling: str = "rope_parameters"  # or the type key of `rope_scaling`: "rope_type", "type"


CASES = {
    "llama_mha": CheckpointCase("llama", {"num_key_value_heads": 4}),
    "llama_gqa4_tied": CheckpointCase(
        "llama", {"num_attention_heads": 8, "tie_word_embeddings": True}, spelling="type"
    ),
    "llama_gqa7": CheckpointCase(
        "llama", {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1}
    ),
    "llama_head_dim": CheckpointCase("llama", {"head_dim": 24}, spelling="rope_type"),
    "llama_attention_bias": CheckpointCase("llama", {"attention_bias": True}),
    "llama_mlp_bias": CheckpointCase("llama", {"mlp_bias": True}),
    "llama_linear": CheckpointCase(
        "llama", rope={"rope_type": "linear", "factor": 2.0}, spelling="type"
    ),
    "llama_dynamic": CheckpointCase("llama", rope={"rope_type": "dynamic", "factor": 2.0}),
    "llama_llama3": CheckpointCase("llama", {"head_dim": 32}, rope=LLAMA3, spelling="rope_type"),
    "llama_yarn": CheckpointCase("llama", {"head_dim": 32}, rope=YARN, spelling="type"),
    "llama_yarn_new": CheckpointCase("llama", {"head_dim": 32}, rope=YARN_ALL),
    "mistral": CheckpointCase("mistral", {"sliding_window": None}),
    "mistral_head_dim": CheckpointCase(
        "mistral", {"sliding_window": 64, "head_dim": 8}, spelling="rope_type"
    ),
    "qwen2": CheckpointCase("qwen2", {"use_sliding_window": False}, spelling="rope_type"),
    "qwen2_tied_gqa7": CheckpointCase(
        "qwen2",
        {
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": CheckpointCase("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3_attention_bias": CheckpointCase(
        "qwen3", {"head_dim": 16, "attention_bias": True}, spelling="rope_type"
    ),
    "mixtral": CheckpointCase(
        "mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}
    ),
    "qwen3_moe": CheckpointCase(
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "head_dim": 16,
        },
    ),
    "qwen3_moe_normalized": CheckpointCase(
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "head_dim": 24,
            "tie_word_embeddings": True,
        },
        spelling="rope_type",
    ),
    "granite": CheckpointCase(
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
        },
    ),
    "granite_biases": CheckpointCase("granite", {"attention_bias": True, "mlp_bias": True}),
    "granite_4": CheckpointCase(
        "granitemoehybrid",
        {
            "layer_types": ["attention", "attention"],
            "shared_intermediate_size": 80,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": CheckpointCase("smollm3", {"no_rope_layers": [0, 1], "pad_token_id": 3}),
    "olmo2": CheckpointCase("olmo2"),
    "olmo2_gqa4": CheckpointCase(
        "olmo2", {"num_attention_heads": 8, "attention_bias": True}, spelling="rope_type"
    ),
}
WINDOW = 8
ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 2e4, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 3.0],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0, 13.0],
    "original_max_position_embeddings": 4,
    "partial_rotary_factor": 0.75,
}
GEMMA = {"sliding_window": WINDOW, "head_dim": 24, "query_pre_attn_scalar": 40}
# families and features whose layers have windows of WINDOW tokens, or partial RoPE
CASES |= {
    "mistral_window": CheckpointCase("mistral", {"sliding_window": WINDOW}),
    "ministral3": CheckpointCase(
        "ministral3", {"head_dim": 24}, YARN_ALL | {"llama_4_scaling_beta": 0.5}
    ),
    "qwen2_window": CheckpointCase(
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "qwen3_moe_window": CheckpointCase(  # in all layers, whatever max_window_layers says
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "mixtral_window": CheckpointCase(
        "mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW}
    ),
    "gemma2": CheckpointCase(
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
        spelling="rope_type",
    ),
    "gemma3": CheckpointCase("gemma3_text", GEMMA | {"sliding_window_pattern": 2}, ROPES),
    "olmo3": CheckpointCase(
        "olmo3",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
        {
            "full_attention": YARN | {"rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "phi3": CheckpointCase("phi3", {"tie_word_embeddings": True}, spelling="type"),
    "phi3_partial": CheckpointCase(
        "phi3", {"original_max_position_embeddings": 4, "sliding_window": WINDOW}, LONGROPE
    ),
    "gpt_oss": CheckpointCase(
        "gpt_oss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "head_dim": 32,
            "swiglu_limit": 1.0,
        },
        YARN | {"truncate": False},
    ),
}


def build_checkpoint(directory: pathlib.Path, case: CheckpointCase) -> Any:
    """Save the case's random float32 checkpoint with transformers and return the torch model. Needs
    torch."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    rope = case.rope if "full_attention" in case.rope else {"rope_theta": 1e4} | case.rope
    config = AutoConfig.for_model(
        case.model_type, **(SIZES | case.fields), rope_parameters=copy.deepcopy(rope)
    )
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    randomize(model)
    model.save_pretrained(directory)
    _respell(directory / "config.json", case)
    return model


def randomize(model: Any) -> None:
    """Make every weight of a torch model random."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(name, noise))


def torch_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of a torch model."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(np.asarray(tokens, np.int64)), use_cache=False).logits.numpy()


def random_llama(config: LlamaConfig, *, seed: int = 0, dtype: Any = jnp.float32) -> Llama:
    """Return one of our models with every weight random. Needs no torch."""
    abstract = abstract_llama(config, dtype)
    generator = np.random.default_rng(seed)
    values = {}
    for path, weight in hf_names.weights(abstract).items():
        noise = generator.standard_normal(weight.leaf.shape, np.float32)
        values[path] = jnp.asarray(_scaled(weight.name, noise).astype(weight.leaf.dtype))
    return hf_names.replace_weights(abstract, values)


@functools.cache
def model(model_type: str = "llama", **fields: Any) -> Llama:
    """Return a random model that tests share, and leave as it is."""
    return random_llama(tiny_config(model_type, **fields))


def tiny_config(model_type: str = "llama", **fields: Any) -> LlamaConfig:
    """`SIZES` as a `LlamaConfig`, with fields of config.json changed."""
    implied = {"qwen3": {"head_dim": 16}, "mistral": {"sliding_window": None}}.get(model_type, {})
    return LlamaConfig.from_hf(SIZES | {"model_type": model_type} | implied | fields)


def save_with_tokenizer(directory: pathlib.Path, text: str, **fields: Any) -> pathlib.Path:
    """Save a random one-layer model, with a tokenizer that is trained on a text and the text itself
    in `text.txt`. Returns the directory."""
    from kvq_models import save_llama
    from laboratory.embedded_model.tokenizer import save_tokenizer, train_tokenizer

    sizes = {"vocab_size": 300, "num_hidden_layers": 1, "max_position_embeddings": 256} | fields
    save_llama(random_llama(tiny_config(**sizes)), directory)
    length = sizes["max_position_embeddings"]
    save_tokenizer(train_tokenizer([text], sizes["vocab_size"]), directory, length)
    (directory / "text.txt").write_text(text, encoding="utf-8")
    return directory


def random_tokens(shape: tuple[int, int], *, seed: int = 0) -> jax.Array:
    return jnp.asarray(
        np.random.default_rng(seed).integers(0, SIZES["vocab_size"], shape), jnp.int32
    )


def row_errors(got: Any, want: Any) -> np.ndarray:
    """Relative L2 error of each row of logits: |got - want| / |want| over the last axis."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)


def _scaled(name: str, noise: Any) -> Any:
    """Norm scales around one, everything else around zero and large enough to matter."""
    if "norm" in name:
        return 1.0 + noise * 0.3
    return noise * (0.5 if noise.ndim == 1 else 0.15)


def _respell(config_file: pathlib.Path, case: CheckpointCase) -> None:
    fields = json.loads(config_file.read_text())
    if case.spelling != "rope_parameters":
        rope = fields.pop("rope_parameters")
        fields["rope_theta"] = rope.pop("rope_theta")
        rope_type = rope.pop("rope_type")
        fields["rope_scaling"] = (
            None if rope_type == "default" else {case.spelling: rope_type} | rope
        )
    config_file.write_text(json.dumps(fields))
