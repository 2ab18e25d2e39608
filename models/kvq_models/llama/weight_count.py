"""The number of weights of a model, from its configuration alone and without Flax."""

from __future__ import annotations

from kvq_models.llama.config import LlamaConfig


def weight_count(config: LlamaConfig) -> int:
    """Return the number of weights, those of norms and biases included: exact, and that of
    `abstract_llama`."""
    embedding = config.vocab_size * config.hidden_size
    head = 0 if config.tie_word_embeddings else embedding
    of_layer = _attention(config) + _norms(config) + _mlp(config)
    return embedding + head + config.hidden_size + config.num_hidden_layers * of_layer


def _linear(width_in: int, width_out: int, bias: bool) -> int:
    return (width_in + bias) * width_out


def _widths(config: LlamaConfig) -> tuple[int, int]:
    """Return the channels of all query heads and of all KV heads."""
    heads = config.num_attention_heads, config.num_key_value_heads
    return heads[0] * config.head_dim, heads[1] * config.head_dim


def _attention(config: LlamaConfig) -> int:
    hidden, (queries, keys) = config.hidden_size, _widths(config)
    sinks = config.num_attention_heads if config.attention_sinks else 0
    projections = sum(_linear(hidden, width, config.qkv_bias) for width in (queries, keys, keys))
    return projections + _linear(queries, hidden, config.o_bias) + sinks


def _norms(config: LlamaConfig) -> int:
    of_heads = _widths(config) if config.joint_qk_norm else (config.head_dim, config.head_dim)
    of_hidden = 2 * config.hidden_size * (config.norms_inputs + config.norms_outputs)
    return of_hidden + (sum(of_heads) if config.qk_norm else 0)


def _mlp(config: LlamaConfig) -> int:
    hidden, experts = config.hidden_size, config.experts
    inner = config.intermediate_size if experts is None else experts.intermediate_size
    bias = config.mlp_bias if experts is None else experts.biased
    projections = 2 * _linear(hidden, inner, bias) + _linear(inner, hidden, bias)
    if experts is None:
        return projections
    return _linear(hidden, experts.count, bias) + experts.count * projections
