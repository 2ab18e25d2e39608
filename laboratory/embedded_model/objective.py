"""The training loss of a `Llama`, written for the speed of its backward pass on a CPU.

    loss = sum_t w_t * -log p(y_t | x_<=t) / sum_t w_t

It is the same function of the weights as `kvq_models.llama.model.forward` for a Llama without
biases and QK-norm, with a tied head; a test compares them. Two things differ: causal attention
skips blocks of keys that no query may see, and the gradients of the products are laid out so that
XLA does not compute activations a second time in transposed order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from kvq_jax.types.array_types import PositionsBT, QueryBNTH, RowsBKTH
from kvq_jax.types.rope import Rope, rotate
from kvq_models.llama.model import HiddenBTD, Layer, Llama, merge_heads, split_heads
from kvq_models.llama.rope import rope_for

QUERY_BLOCK = 256


@jax.custom_vjp
def project(x_BTC: Float[Array, "B T C"], kernel_CE: Float[Array, "C E"]) -> Float[Array, "B T E"]:
    """Return x kernel. The kernel's gradient is x^T g: XLA then transposes x, not the cotangent g,
    which it would compute twice."""
    return x_BTC @ kernel_CE


def _project_forward(
    x_BTC: jax.Array, kernel_CE: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x_BTC @ kernel_CE, (x_BTC, kernel_CE)


def _project_backward(
    saved: tuple[jax.Array, jax.Array], cotangent_BTE: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x_BTC, kernel_CE = saved
    tokens = (0, 1)
    return cotangent_BTE @ kernel_CE.T, jax.lax.dot_general(
        x_BTC, cotangent_BTE, ((tokens, tokens), ((), ()))
    )


project.defvjp(_project_forward, _project_backward)


def block_causal_attention(q_BNTH: QueryBNTH, k_BKTH: RowsBKTH, v_BKTH: RowsBKTH) -> QueryBNTH:
    """Attend causally and exactly; a block of QUERY_BLOCK queries reads only the keys up to its
    end, saving up to half of the products."""
    batch, heads, length, head_dim = q_BNTH.shape
    kv_heads = k_BKTH.shape[1]
    q_BKGTH = q_BNTH.reshape(batch, kv_heads, heads // kv_heads, length, head_dim)
    k_BKHT = k_BKTH.swapaxes(2, 3) * head_dim**-0.5
    outputs = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        block_BKRH = q_BKGTH[:, :, :, start:end].reshape(batch, kv_heads, -1, head_dim)
        scores_BKRS = jnp.einsum("bkrh,bkhs->bkrs", block_BKRH, k_BKHT[..., :end])
        visible_TS = jnp.arange(start, end)[:, None] >= jnp.arange(end)[None]
        visible_RS = jnp.tile(visible_TS, (heads // kv_heads, 1))
        weights_BKRS = jax.nn.softmax(
            jnp.where(visible_RS[None, None], scores_BKRS, jnp.finfo(jnp.float32).min), axis=-1
        )
        out_BKRH = jnp.einsum("bkrs,bksh->bkrh", weights_BKRS, v_BKTH[:, :, :end])
        outputs.append(out_BKRH.reshape(batch, heads, end - start, head_dim))
    return jnp.concatenate(outputs, axis=2)


def training_layer(
    layer: Layer, hidden_BTD: HiddenBTD, positions_BT: PositionsBT, rope: Rope
) -> HiddenBTD:
    """Apply one decoder layer with exact causal attention."""
    config, mlp = layer.config, layer.mlp
    x_BTD = layer.input_norm(hidden_BTD)
    q_BNTH = rotate(
        split_heads(project(x_BTD, layer.q_proj.kernel[...]), config.num_attention_heads),
        positions_BT,
        rope,
    )
    k_BKTH = rotate(
        split_heads(project(x_BTD, layer.k_proj.kernel[...]), config.num_key_value_heads),
        positions_BT,
        rope,
    )
    v_BKTH = split_heads(project(x_BTD, layer.v_proj.kernel[...]), config.num_key_value_heads)
    attention_BTC = merge_heads(block_causal_attention(q_BNTH, k_BKTH, v_BKTH))
    hidden_BTD = hidden_BTD + project(attention_BTC, layer.o_proj.kernel[...])
    y_BTD = layer.mlp_norm(hidden_BTD)
    gated = jax.nn.silu(project(y_BTD, mlp.gate_proj.kernel[...])) * project(
        y_BTD, mlp.up_proj.kernel[...]
    )
    return hidden_BTD + project(gated, mlp.down_proj.kernel[...])


def training_logits(llama: Llama, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Return the logits of `kvq_models.llama.model.forward` for rows without padding and a tied
    head."""
    positions_BT = jnp.broadcast_to(
        jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None], tokens_BT.shape
    )
    rope = rope_for(llama.config, capacity=tokens_BT.shape[1])
    hidden_BTD = llama.embed_tokens(tokens_BT)
    for layer in llama.layers:
        hidden_BTD = training_layer(layer, hidden_BTD, positions_BT, rope)
    return project(llama.norm(hidden_BTD), llama.embed[...].T)


def token_losses(llama: Llama, rows_BT: Int[Array, "B T1"]) -> Float[Array, "B T"]:
    """Return -log p, in nats, of every token of rows [B, T + 1] but the first."""
    return optax.softmax_cross_entropy_with_integer_labels(
        training_logits(llama, rows_BT[:, :-1]), rows_BT[:, 1:]
    )


def weighted_loss(
    llama: Llama, rows_BT: Int[Array, "B T1"], weights_BT: Float[Array, "B T"]
) -> Float[Array, ""]:
    return jnp.sum(token_losses(llama, rows_BT) * weights_BT) / jnp.sum(weights_BT)
