"""Hugging Face's names of tensors by which a file's header is read, without JAX."""

from __future__ import annotations

EMBED_NAME, HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"

# (Hugging Face name, path in the module tree) of a layer's experts, by model_type
EXPERTS = {
    "mixtral": (
        ("model.layers.#.block_sparse_moe.gate.weight", "layers.#.mlp.router"),
        ("model.layers.#.block_sparse_moe.experts.*.w1.weight", "layers.#.mlp.gate"),
        ("model.layers.#.block_sparse_moe.experts.*.w3.weight", "layers.#.mlp.up"),
        ("model.layers.#.block_sparse_moe.experts.*.w2.weight", "layers.#.mlp.down"),
    ),
    "qwen3_moe": (
        ("model.layers.#.mlp.gate.weight", "layers.#.mlp.router"),
        ("model.layers.#.mlp.experts.*.gate_proj.weight", "layers.#.mlp.gate"),
        ("model.layers.#.mlp.experts.*.up_proj.weight", "layers.#.mlp.up"),
        ("model.layers.#.mlp.experts.*.down_proj.weight", "layers.#.mlp.down"),
    ),
}
