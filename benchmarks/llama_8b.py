"""The dimensions of Llama 3.1 8B, for which pages give sizes and decode steps."""

from __future__ import annotations

from kvq_models import LlamaConfig
from kvq_models.llama.rope_config import RopeConfig

NAME = "Llama-3.1-8B"


def llama_config(layers: int = 32) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rope=RopeConfig(theta=500000.0),
    )
