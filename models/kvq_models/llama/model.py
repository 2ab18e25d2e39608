"""Llama in Flax NNX, top to bottom: RMSNorm, Linear, MLP, Layer, Llama, and an exact forward pass
without a cache.

    h_0     = embed[token]
    x       = norm_1(h)
    q, k, v = heads(x Wq + bq), heads(x Wk + bk), heads(x Wv + bv)   Qwen3: RMSNorm of q, k per head
    h'      = h + attention(rope(q), rope(k), v) Wo
    h_{l+1} = h' + (silu(y Wg) * (y Wu)) Wd,   y = norm_2(h')
    logits  = norm(h_L) head

    OLMo 2, 3: norm_1 and norm_2 of what is added to h, not of x and y; RMSNorm of q, k over all
        heads
    Gemma 2, 3: norms of x and y and of what is added to h, with 1 + weight; gelu for silu; a factor
        of h_0 and of the scores; soft caps of scores and logits (2); RMSNorm of q, k per head (3)
    Mixtral, Qwen3-MoE, gpt-oss: a mixture of experts in place of the MLP (experts.py)
    SmolLM3: no rope in some layers; Gemma 3, OLMo 3: a rope of their own in windowed layers
    Granite: factors of h_0, of both sums that are added to h, of the scores and of the logits
    Windows, soft caps and sinks of attention: kvq_jax/layer/attention.py

A layer stops before attention and continues after it (`attention_inputs`, `finish`). The caller
computes attention, exactly or through a quantized cache. Modules are JAX pytrees with the config as
static metadata, so plain `jax.jit`, `jax.grad` and `jax.tree.map` work on them. Weights are stored
[in, out] in the model's dtype, or packed (packed_weights.py), and activations have that dtype.
Norms, rotations, softmax and logits are fp32.

Source: Touvron et al., LLaMA; Ainslie et al., GQA; names after Hugging Face's checkpoints.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvq_jax.layer.attention import PLAIN, Attention, of_layer
from kvq_jax.placement.placement import Placement
from kvq_jax.types.array_types import LayerInputs, PositionsBT, QueryBNTH, RowsBKTH, ValidBT
from kvq_jax.types.rope import Rope, rotate, without_rotation
from kvq_models.llama.activations import activated
from kvq_models.llama.causal_attention import causal_attention
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.experts import Experts
from kvq_models.llama.families import Activation
from kvq_models.llama.initial_weights import constant, normal
from kvq_models.llama.packed_weights import logits_of, products, rows_of
from kvq_models.llama.rope import Ropes, query_factor, ropes_for
from kvq_models.llama.whole_heads import of_whole_heads

HiddenBTD = Float[Array, "B T D"]


class RMSNorm(nnx.Module):
    """y = x / sqrt(mean(x^2) + eps) * scale over the last axis, with 1 + scale for scale if
    `unit_offset`, computed in fp32. The result has the dtype of x."""

    def __init__(
        self,
        width: int,
        *,
        eps: float,
        unit_offset: bool = False,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
    ):
        self.eps = eps
        self.unit_offset = unit_offset
        self.scale = constant(rngs, 0 if unit_offset else 1, width, dtype=dtype)

    def factor(self) -> Float[Array, " C"]:
        """Return the factor of each channel."""
        scale = self.scale[...]
        return scale.astype(jnp.float32) + 1 if self.unit_offset else scale

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        wide = x.astype(jnp.float32)
        normalized = wide * jax.lax.rsqrt(
            jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps
        )
        scale = jnp.expand_dims(self.factor().astype(jnp.float32), range(x.ndim - 1))
        return (normalized * scale).astype(x.dtype)


def normalized(norm: RMSNorm | None, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
    """Return norm(x), and x itself in a family without this norm."""
    return x if norm is None else norm(x)


class Linear(nnx.Module):
    """y = x kernel + bias, with kernel [in, out] and bias [out] or None."""

    def __init__(
        self,
        width_in: int,
        width_out: int,
        *,
        use_bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
    ):
        self.kernel = normal(rngs, width_in, width_out, dtype=dtype)
        self.bias = constant(rngs, 0, width_out, dtype=dtype) if use_bias else None

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... E"]:
        return self.biased(x @ self.kernel[...])

    def biased(self, y: Float[Array, "... E"]) -> Float[Array, "... E"]:
        return y if self.bias is None else y + jnp.expand_dims(self.bias[...], range(y.ndim - 1))


def projections(x: Float[Array, "... C"], linears: Sequence[Linear]) -> list[Float[Array, "... E"]]:
    """Return linear(x) for each, by one call for packed weights."""
    by_linear = products(x, [linear.kernel[...] for linear in linears])
    return [linear.biased(y) for linear, y in zip(linears, by_linear, strict=True)]


class MLP(nnx.Module):
    """(silu(y Wg) * (y Wu)) Wd, Shazeer's SwiGLU, or its GeGLU with gelu for silu."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs | None):
        options: dict[str, Any] = dict(use_bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.activation: Activation = config.activation
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, **options)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, **options)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, **options)

    def __call__(self, y_BTD: HiddenBTD, placement: Placement | None = None) -> HiddenBTD:
        del placement  # XLA splits the products
        gate, up = projections(y_BTD, (self.gate_proj, self.up_proj))
        return self.down_proj(activated(self.activation, gate) * up)


class Layer(nnx.Module):
    """One decoder layer without its attention.

    rotated: False in a layer without RoPE. attention: of the layer.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        rotated: bool = True,
        attention: Attention = PLAIN,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
    ):
        width_q = config.num_attention_heads * config.head_dim
        width_kv = config.num_key_value_heads * config.head_dim
        norm = _norm(config, dtype, rngs)
        self.config = config
        self.rotated = rotated
        self.attention = attention
        self.sinks = (
            constant(rngs, 0, config.num_attention_heads, dtype=dtype) if attention.sinks else None
        )
        self.input_norm = norm(config.hidden_size) if config.norms_inputs else None
        self.attention_output_norm = norm(config.hidden_size) if config.norms_outputs else None
        options: dict[str, Any] = dict(use_bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.q_proj = Linear(config.hidden_size, width_q, **options)
        self.k_proj = Linear(config.hidden_size, width_kv, **options)
        self.v_proj = Linear(config.hidden_size, width_kv, **options)
        joint = config.joint_qk_norm
        self.q_norm = norm(width_q if joint else config.head_dim) if config.qk_norm else None
        self.k_norm = norm(width_kv if joint else config.head_dim) if config.qk_norm else None
        self.o_proj = Linear(
            width_q, config.hidden_size, use_bias=config.o_bias, dtype=dtype, rngs=rngs
        )
        self.mlp_norm = norm(config.hidden_size) if config.norms_inputs else None
        self.mlp_output_norm = norm(config.hidden_size) if config.norms_outputs else None
        self.mlp = (
            MLP(config, dtype=dtype, rngs=rngs)
            if config.experts is None
            else Experts(config.experts, config.hidden_size, dtype=dtype, rngs=rngs)
        )

    def rope(self, ropes: Ropes) -> Rope:
        """Return the layer's rotation, of those of the model."""
        rope = ropes.full if self.attention.window is None else ropes.windowed
        return rope if self.rotated else without_rotation(rope)

    def sink_logits(self) -> Float[Array, " N"] | None:
        """Return the learned logit of each head, or None in a layer without."""
        return None if self.sinks is None else self.sinks[...]

    def keys(self, x_BTD: HiddenBTD) -> RowsBKTH:
        """Return the keys before RoPE, from the normalized input."""
        return self._key_heads(self.k_proj(x_BTD))

    def _query_heads(self, projected_BTC: Float[Array, "B T C"]) -> QueryBNTH:
        q_BNTH = self._normalized_heads(projected_BTC, self.config.num_attention_heads, self.q_norm)
        factor = self.config.attention_multiplier
        # attention scales scores by 1 / sqrt(H), whatever the model
        return q_BNTH if factor is None else _times(factor * self.config.head_dim**0.5, q_BNTH)

    def _key_heads(self, projected_BTC: Float[Array, "B T C"]) -> RowsBKTH:
        return self._normalized_heads(projected_BTC, self.config.num_key_value_heads, self.k_norm)

    def _normalized_heads(
        self, projected_BTC: Float[Array, "B T C"], heads: int, norm: RMSNorm | None
    ) -> Float[Array, "B heads T H"]:
        if self.config.joint_qk_norm:
            return split_heads(normalized(norm, projected_BTC), heads)
        return normalized(norm, split_heads(projected_BTC, heads))

    def attention_inputs(
        self,
        hidden_BTD: HiddenBTD,
        positions_BT: PositionsBT,
        valid_BT: ValidBT,
        ropes: Ropes,
        placement: Placement | None = None,
    ) -> LayerInputs:
        """Return everything that attention and a cache method may need of T tokens. `x` is the
        normalized input.

        placement (static): of the cache; each shard gets the heads that it holds.
        """
        rope = self.rope(ropes)
        x_BTD = normalized(self.input_norm, hidden_BTD)
        q_BTC, k_BTC, v_BTC = of_whole_heads(
            projections(x_BTD, (self.q_proj, self.k_proj, self.v_proj)), placement
        )
        q_BNTH, k_BKTH = self._query_heads(q_BTC), self._key_heads(k_BTC)
        if (factor_B1T1 := query_factor(self.config.rope, positions_BT)) is not None:
            q_BNTH = (q_BNTH.astype(jnp.float32) * factor_B1T1).astype(q_BNTH.dtype)
        return LayerInputs(
            x=x_BTD,
            q_pre=q_BNTH,
            q_rot=rotate(q_BNTH, positions_BT, rope),
            k_pre=k_BKTH,
            k_rot=rotate(k_BKTH, positions_BT, rope),
            v=split_heads(v_BTC, self.config.num_key_value_heads),
            positions=positions_BT,
            valid=valid_BT,
            rope=rope,
            residual=hidden_BTD,
            sinks=self.sink_logits(),
        )

    def finish(
        self,
        hidden_BTD: HiddenBTD,
        attention_BNTH: Float[Array, "#B N T H"],
        placement: Placement | None = None,
    ) -> HiddenBTD:
        """Add the output projection and the MLP to the residual stream. Attention may have any
        float dtype, and one row for all rows. placement (static): as in `attention_inputs`."""
        factor = self.config.residual_multiplier
        attended_BTD = self.o_proj(merge_heads(attention_BNTH).astype(hidden_BTD.dtype))
        attended_BTD = normalized(self.attention_output_norm, attended_BTD)
        hidden_BTD = hidden_BTD + _times(factor, attended_BTD)
        computed_BTD = self.mlp(normalized(self.mlp_norm, hidden_BTD), placement)
        return hidden_BTD + _times(factor, normalized(self.mlp_output_norm, computed_BTD))


class Llama(nnx.Module):
    """The whole decoder.

        config            static
        embed             Param [V, D]
        layers            nnx.List of `Layer`
        norm, head        final RMSNorm; Linear [D, V], or None if the head is tied to `embed`
        cache_parameters  arrays that a cache method needs besides the codes: a pair (k, v) per
                          layer, or () for methods without parameters

    Args:
        config: sizes and options.
        dtype: of all weights.
        rngs: initializes weights from N(0, 0.02^2). Use `load_llama` for trained ones. None makes
            a ShapeDtypeStruct of each weight.
    """

    def __init__(
        self, config: LlamaConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs | None
    ):
        self.config = dataclasses.replace(config, dtype=jnp.dtype(dtype).name)
        self.embed = normal(rngs, config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List(
            [
                Layer(
                    config,
                    rotated=i not in config.unrotated_layers,
                    attention=of_layer(config.attention, i),
                    dtype=dtype,
                    rngs=rngs,
                )
                for i in range(config.num_hidden_layers)
            ]
        )
        self.norm = _norm(config, dtype, rngs)(config.hidden_size)
        tied = config.tie_word_embeddings
        self.head = (
            None
            if tied
            else Linear(
                config.hidden_size, config.vocab_size, use_bias=False, dtype=dtype, rngs=rngs
            )
        )
        self.cache_parameters: Any = nnx.data(())

    def embed_tokens(self, tokens_BT: Int[Array, "B T"]) -> HiddenBTD:
        """Return rows of the embedding. A token id outside the vocabulary gives NaN rather than
        another token's row."""
        return self.scaled(rows_of(self.embed[...], tokens_BT))

    def scaled(self, rows_BTD: HiddenBTD) -> HiddenBTD:
        """Return the first layer's input from rows of the embedding."""
        factor = self.config.embedding_multiplier
        # in the rows' dtype, to which Gemma rounds its factor; Granite's has few bits
        return rows_BTD if factor == 1 else rows_BTD * factor

    def logits(self, hidden_BTD: HiddenBTD) -> Float[Array, "B T V"]:
        """Return the fp32 logits of the last layer's output."""
        x_BTD = self.norm(hidden_BTD)
        matrix = self.embed[...] if self.head is None else self.head.kernel[...]
        logits_BTV = logits_of(x_BTD, matrix, tied=self.head is None)
        logits_BTV = _times(1 / self.config.logits_scaling, logits_BTV)
        cap = self.config.logits_soft_cap
        return logits_BTV if cap is None else cap * jnp.tanh(logits_BTV / cap)


def abstract_llama(config: LlamaConfig, dtype: DTypeLike = jnp.float32) -> Llama:
    """Return the model's tree with a ShapeDtypeStruct for each weight, to count bytes and load
    checkpoints without allocation."""
    return Llama(config, dtype=dtype, rngs=None)


def _times(factor: float, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return factor * x in x's dtype, and x itself if the factor is 1, as in most families. The
    factor is not rounded to bfloat16, which would move every product the same way."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def _norm(config: LlamaConfig, dtype: DTypeLike, rngs: nnx.Rngs | None) -> Callable[[int], RMSNorm]:
    return functools.partial(
        RMSNorm,
        eps=config.rms_norm_eps,
        unit_offset=config.unit_offset_norms,
        dtype=dtype,
        rngs=rngs,
    )


def split_heads(rows_BTC: Float[Array, "B T C"], heads: int) -> Float[Array, "B heads T H"]:
    batch, length, width = rows_BTC.shape
    return rows_BTC.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def merge_heads(rows_BNTH: QueryBNTH) -> Float[Array, "B T C"]:
    batch, heads, length, head_dim = rows_BNTH.shape
    return rows_BNTH.transpose(0, 2, 1, 3).reshape(batch, length, heads * head_dim)


def layer_forward(
    layer: Layer, hidden_BTD: HiddenBTD, positions_BT: PositionsBT, valid_BT: ValidBT, ropes: Ropes
) -> HiddenBTD:
    """Run one layer with exact causal attention."""
    inputs = layer.attention_inputs(hidden_BTD, positions_BT, valid_BT, ropes)
    attended_BNTH = causal_attention(
        inputs.q_rot, inputs.k_rot, inputs.v, valid_BT, layer.attention, layer.sink_logits()
    )
    return layer.finish(hidden_BTD, attended_BNTH)


def forward(
    llama: Llama,
    tokens_BT: Int[Array, "B T"],
    valid_BT: ValidBT | None = None,
    *,
    remat: bool = False,
) -> Float[Array, "B T V"]:
    """Return fp32 logits [B, T, V], exact and without a cache, for training and parity.

    Args:
        llama: the model.
        tokens_BT: [B, T] integers, right-padded.
        valid_BT: [B, T] bool, True for real tokens (default: all).
        remat: recompute each layer in the backward pass instead of keeping its activations.
    """
    valid_BT = jnp.ones(tokens_BT.shape, bool) if valid_BT is None else valid_BT
    positions_BT = jnp.broadcast_to(
        jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None], tokens_BT.shape
    )
    ropes = ropes_for(llama.config, capacity=tokens_BT.shape[1])
    step = jax.checkpoint(layer_forward) if remat else layer_forward
    hidden_BTD = llama.embed_tokens(tokens_BT)
    for layer in llama.layers:
        hidden_BTD = step(layer, hidden_BTD, positions_BT, valid_BT, ropes)
    return llama.logits(hidden_BTD)
