"""The models whose sizes the protocol's pages give: one whose query heads share KV heads, and one
in which each has its own, as XQuant's headline assumes."""

from __future__ import annotations

import functools

import kvq_jax as kvq
from benchmarks import llama_8b
from kvq_jax.cache.size import COMPARED_BATCHES
from kvq_models import LlamaConfig

CONTEXT = 32768  # tokens of the large model's cache
MULTI_HEAD = "Llama-2-7B"


def like(config: LlamaConfig) -> str:
    """Return the name of the large model that shares KV heads if this one does, or of the other."""
    shared = config.num_key_value_heads < config.num_attention_heads
    return llama_8b.NAME if shared else MULTI_HEAD


@functools.cache
def sizes(spec: str, model: str) -> tuple[kvq.size.Size, ...]:
    """Return the sizes of a cache for a large model, for each of COMPARED_BATCHES."""
    config = _config(model)
    return tuple(kvq.size.of(spec, config, batch, CONTEXT) for batch in COMPARED_BATCHES)


def _config(model: str) -> LlamaConfig:
    if model == llama_8b.NAME:
        return llama_8b.llama_config()
    if model != MULTI_HEAD:
        raise ValueError(f"no large model {model!r}: {llama_8b.NAME} or {MULTI_HEAD}")
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=CONTEXT,  # published with 4,096: its cache is counted beyond them
    )
