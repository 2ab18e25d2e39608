"""Hugging Face's names of tensors by which a file's header is read, without JAX."""

from __future__ import annotations

EMBED_NAME, HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"

KEEP, TRANSPOSE = False, True

# (Hugging Face name, path in the module tree, TRANSPOSE if torch stores [out, in]) of a layer's
# experts, by model_type
EXPERTS = {
    "mixtral": (
        ("model.layers.#.block_sparse_moe.gate.weight", "layers.#.mlp.router", TRANSPOSE),
        ("model.layers.#.block_sparse_moe.experts.*.w1.weight", "layers.#.mlp.gate", TRANSPOSE),
        ("model.layers.#.block_sparse_moe.experts.*.w3.weight", "layers.#.mlp.up", TRANSPOSE),
        ("model.layers.#.block_sparse_moe.experts.*.w2.weight", "layers.#.mlp.down", TRANSPOSE),
    ),
    "qwen3_moe": (
        ("model.layers.#.mlp.gate.weight", "layers.#.mlp.router", TRANSPOSE),
        ("model.layers.#.mlp.experts.*.gate_proj.weight", "layers.#.mlp.gate", TRANSPOSE),
        ("model.layers.#.mlp.experts.*.up_proj.weight", "layers.#.mlp.up", TRANSPOSE),
        ("model.layers.#.mlp.experts.*.down_proj.weight", "layers.#.mlp.down", TRANSPOSE),
    ),
    "gpt_oss": (  # gate_proj and up_proj are slices of its gate_up_proj (fused_tensors.py)
        ("model.layers.#.mlp.router.weight", "layers.#.mlp.router", TRANSPOSE),
        ("model.layers.#.mlp.router.bias", "layers.#.mlp.router_bias", KEEP),
        ("model.layers.#.mlp.experts.gate_proj", "layers.#.mlp.gate", KEEP),
        ("model.layers.#.mlp.experts.gate_proj_bias", "layers.#.mlp.gate_bias", KEEP),
        ("model.layers.#.mlp.experts.up_proj", "layers.#.mlp.up", KEEP),
        ("model.layers.#.mlp.experts.up_proj_bias", "layers.#.mlp.up_bias", KEEP),
        ("model.layers.#.mlp.experts.down_proj", "layers.#.mlp.down", KEEP),
        ("model.layers.#.mlp.experts.down_proj_bias", "layers.#.mlp.down_bias", KEEP),
    ),
}
