"""Quantized caches in bonsai's Qwen 3, run by its own `forward`.

    model, cache = with_cache(model, "kivi:bits=4", batch_size, token_len, generate_steps)
    logits, cache = modeling.forward(model, cache, tokens, pad_id)

bonsai keeps a list with an NNX module for each layer. Here a module holds a `kvq.cache.LayerCache`.
Prompts are padded on the left, as bonsai's own script pads them. bonsai takes every token that has
the padding's id for padding, also inside a prompt: other tokens do not see it. A cache here is
causal and takes no mask: from a row's first other token on, such tokens are read, at bonsai's
positions. A call with one token is a step, also if it is the whole prompt: a method with statistics
of the prompt then keeps its neutral ones.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false
# the host need not be installed where types are checked

from __future__ import annotations

import jax.numpy as jnp
from bonsai.models.qwen3 import modeling
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

import kvq_jax as kvq
from kvq_hosts.served import check_served, left_padded_lengths


class QuantizedLayer(nnx.Module):
    """The cache of one layer.

    Attributes:
        plan: the layer's plan.
        kept: the layer's `kvq.cache.LayerCache`.
        cur_ind: the tokens of all steps, padding included, from which bonsai counts positions.
    """

    def __init__(self, plan: kvq.cache.CachePlan, batch_size: int):
        self.plan = plan
        self.kept = nnx.Cache(plan.init(batch_size))
        self.cur_ind = nnx.Variable(jnp.zeros((), jnp.int32))


def with_cache(
    model: modeling.Qwen3,
    spec: kvq.cache.CacheSpec | str,
    batch_size: int,
    token_len: int,
    generate_steps: int,
    dtype: DTypeLike = jnp.bfloat16,
) -> tuple[modeling.Qwen3, list[QuantizedLayer]]:
    """Return a model with the same weights and an empty quantized cache for it. The arguments after
    `spec` are those of bonsai's `init_cache`.

    Args:
        model: a Qwen3 of bonsai.
        spec: the cache, or its text.
        batch_size: B.
        token_len: the tokens of a prompt, padding included.
        generate_steps: the tokens that are generated after it.
        dtype: of tokens in full precision.

    Raises:
        NotImplementedError: for other models, and for one that is sharded.
        ValueError: if the spec does not fit the model, or its method needs parameters.
    """
    if type(model) is not modeling.Qwen3:
        raise NotImplementedError(f"{type(model).__name__} has no adapter: Qwen3 has one")
    config = model.config
    if config.shd_cfg != modeling.ShardConfig.no_sharding():
        raise NotImplementedError("a sharded Qwen3 has no adapter: use ShardConfig.no_sharding()")
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    dims = kvq.CacheDims(config.num_layers, *heads, config.emb_dim)
    capacity = token_len + generate_steps
    plans = [
        kvq.layer_plan(spec, dims, layer=i, capacity=capacity, dtype=dtype)
        for i in range(config.num_layers)
    ]
    check_served(plans, "bonsai")
    model = nnx.clone(model)
    for layer in model.layers:
        object.__setattr__(layer.attn, "__class__", _Attention)
    return model, [QuantizedLayer(plan, batch_size) for plan in plans]


class _Attention(modeling.Attention):
    def __call__(
        self, x: Float[Array, "B T D"], cache: QuantizedLayer, segment_ids: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        tokens = x.shape[1]
        positions = modeling.compute_positions_from_segment_ids(segment_ids) + cache.cur_ind[...]
        rotation = modeling._generate_pos_embeddings(positions, self.head_dim)
        q, k = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x))
        out, after = cache.plan.attend(
            cache.kept.get_value(),
            modeling.apply_rope(q, *rotation),
            modeling.apply_rope(k, *rotation),
            self.v_proj(x),
            lengths=left_padded_lengths(segment_ids != 0) if tokens > 1 else None,
            prefill=tokens > 1,
            padding="left",
        )
        cache.kept.set_value(after)
        cache.cur_ind.set_value(cache.cur_ind[...] + tokens)
        return self.o_proj(out)
