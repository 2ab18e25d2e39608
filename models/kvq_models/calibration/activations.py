"""The keys and values of one sample, the gradients of its loss with respect to them, and the second
moments of its queries.

    k_l' = k_l + dk_l,  v_l' = v_l + dv_l         k before RoPE; the perturbations dk, dv are zero
    rows       k_l, v_l                           of every layer, from the exact forward pass
    gradients  d loss / d dk_l,  d loss / d dv_l  loss = -sum_t log p(y_t | x_<=t)
    moments    E q q^T for each KV head           q after RoPE, of all query heads that read it
    last       q of the last LAST_QUERIES tokens

The backward pass goes layer by layer and recomputes each layer from its input. Besides the weights
and the layers' inputs, only one layer's activations exist at a time. Equal layers are compiled
once. The sum of the losses is differentiated rather than their mean: float16 gradients of the mean
would be of the order of 1e-7, at the end of that format's range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from kvq_jax.codecs.codec import side_rows
from kvq_jax.types.array_types import PositionsBT, QueryBNTH, RowsBKTH, ValidBT
from kvq_jax.types.rope import rotate
from kvq_models.llama.model import HiddenBTD, Layer, Llama, causal_attention
from kvq_models.llama.rope import Ropes, ropes_for

LOSS_CHUNK = 256  # tokens whose logits exist at a time, at most
LOSS_LOGITS = 1 << 24  # logits that exist at a time, at most; a gradient takes 16 bytes for each
LAST_QUERIES = 64  # tokens at the end of a sample whose queries are recorded one by one

RowsTKH = Shaped[np.ndarray, "T K H"]


class Recorded(NamedTuple):
    """One array of one side of one layer: "rows" or "gradients" of "k" or "v", [T, K, H] in the
    model's dtype, or "moments" [K, H, H] fp32 or "last" [W, N, H] of "q"."""

    layer: int
    side: Literal["k", "v", "q"]
    what: str
    array: RowsTKH | Float[np.ndarray, "K H H"] | Shaped[np.ndarray, "W N H"]


class _Scene(NamedTuple):
    """The inputs that every layer of one sample shares."""

    positions: PositionsBT
    valid: ValidBT
    rope: Ropes


def perturbed_layer(
    layer: Layer, hidden_BTD: HiddenBTD, dk_BKTH: RowsBKTH, dv_BKTH: RowsBKTH, scene: _Scene
) -> tuple[HiddenBTD, tuple[RowsBKTH, RowsBKTH], QueryBNTH]:
    """Run `layer_forward` with perturbations added to the keys before RoPE and to the values.
    Return the output, the unperturbed keys and values, and the queries."""
    inputs = layer.attention_inputs(hidden_BTD, scene.positions, scene.valid, scene.rope)
    k_BKTH, v_BKTH = side_rows(inputs, "k", pre_rope=True), inputs.v
    k_rot_BKTH = rotate(k_BKTH + dk_BKTH, scene.positions, layer.rope(scene.rope))
    attention_BNTH = causal_attention(
        inputs.q_rot,
        k_rot_BKTH,
        v_BKTH + dv_BKTH,
        scene.valid,
        layer.attention,
        layer.sink_logits(),
    )
    return layer.finish(hidden_BTD, attention_BNTH), (k_BKTH, v_BKTH), inputs.q_rot


@jax.jit
def _forward(
    layer: Layer, hidden_BTD: HiddenBTD, zeros_BKTH: RowsBKTH, scene: _Scene
) -> tuple[HiddenBTD, tuple[Array, Array], tuple[Array, Array]]:
    """Return a layer's output, its keys and values, and the moments of its queries and the last of
    them."""
    hidden_BTD, rows, q_BNTH = perturbed_layer(layer, hidden_BTD, zeros_BKTH, zeros_BKTH, scene)
    _, heads, _, width = zeros_BKTH.shape
    q = q_BNTH.astype(jnp.float32).reshape(heads, -1, width)  # the query heads of a KV head
    moments = jnp.einsum("krh,kre->khe", q, q, precision=lax.Precision.HIGHEST) / q.shape[1]
    last_WNH = jnp.swapaxes(q_BNTH[0, :, -LAST_QUERIES:], 0, 1)
    return hidden_BTD, _by_token(rows), (moments, last_WNH)


@jax.jit
def _backward(
    layer: Layer,
    hidden_BTD: HiddenBTD,
    zeros_BKTH: RowsBKTH,
    scene: _Scene,
    cotangent_BTD: HiddenBTD,
) -> tuple[HiddenBTD, tuple[Array, Array]]:
    """Return the gradients with respect to a layer's input and its two perturbations, given the
    gradient with respect to its output."""
    _, pull = jax.vjp(
        lambda h, dk, dv: perturbed_layer(layer, h, dk, dv, scene)[0],
        hidden_BTD,
        zeros_BKTH,
        zeros_BKTH,
    )
    cotangent_BTD, *gradients = pull(cotangent_BTD)
    return cotangent_BTD, _by_token(tuple(gradients))


def _by_token(pair: tuple[Array, ...]) -> Any:
    """Transpose both arrays of a pair from [1, K, T, H] to [T, K, H]."""
    return tuple(jnp.swapaxes(rows_BKTH[0], 0, 1) for rows_BKTH in pair)


@jax.jit
def _loss(
    llama: Llama, hidden_BTD: HiddenBTD, labels_BT: Int[Array, "B T"]
) -> tuple[Float[Array, ""], HiddenBTD]:
    """Return the summed loss of a chunk of tokens and its gradient with respect to the last layer's
    output."""

    def total(hidden_BTD: HiddenBTD) -> Float[Array, ""]:
        logprobs_BTV = jax.nn.log_softmax(llama.logits(hidden_BTD), axis=-1)
        return -jnp.sum(jnp.take_along_axis(logprobs_BTV, labels_BT[..., None], axis=-1))

    return jax.value_and_grad(total)(hidden_BTD)


def gradient_of_the_loss(
    llama: Llama, hidden_BTD: HiddenBTD, labels_BT: Int[Array, "B T"]
) -> tuple[float, HiddenBTD]:
    """Return the summed loss of the predicted tokens in nats, and its gradient with respect to the
    last layer's output."""
    size = max(1, min(LOSS_CHUNK, LOSS_LOGITS // llama.config.vocab_size))
    chunks = [slice(at, at + size) for at in range(0, labels_BT.shape[1], size)]
    losses, cotangents = zip(
        *(_loss(llama, hidden_BTD[:, chunk], labels_BT[:, chunk]) for chunk in chunks), strict=True
    )
    return float(sum(losses)), jnp.concatenate(cotangents, axis=1)


def record(
    llama: Llama, window: Int[np.ndarray, " tokens"], write: Callable[[Recorded], None]
) -> float:
    """Run one sample, pass every layer's rows and gradients to `write`, and return the mean loss in
    nats per token.

    Args:
        window: [T + 1] token ids. The first T are the inputs, at positions 0 to T - 1.
        write: receives the rows, the queries' moments and the last queries of every layer, then
            the gradients of the sum of the T losses.

    Raises ValueError, naming the first layer and side with rows or gradients that are not finite.
    Discard what was written before.
    """
    tokens_BT = jnp.asarray(window[None], jnp.int32)
    length = tokens_BT.shape[1] - 1
    scene = _Scene(
        jnp.arange(length, dtype=jnp.int32)[None],
        jnp.ones((1, length), bool),
        ropes_for(llama.config, length),
    )
    hidden_BTD = llama.embed_tokens(tokens_BT[:, :-1])
    zeros_BKTH = jnp.zeros(
        (1, llama.config.num_key_value_heads, length, llama.config.head_dim), hidden_BTD.dtype
    )

    inputs = []
    for index, layer in enumerate(llama.layers):
        inputs.append(hidden_BTD)
        hidden_BTD, rows, (moments, last_WNH) = _forward(layer, hidden_BTD, zeros_BKTH, scene)
        for recorded in _sides(index, "rows", rows):
            write(recorded)
        write(Recorded(index, "q", "moments", np.asarray(moments)))
        write(Recorded(index, "q", "last", np.asarray(last_WNH)))

    loss, cotangent_BTD = gradient_of_the_loss(llama, hidden_BTD, tokens_BT[:, 1:])
    for index, layer in reversed(list(enumerate(llama.layers))):
        cotangent_BTD, gradients = _backward(layer, inputs.pop(), zeros_BKTH, scene, cotangent_BTD)
        for recorded in _sides(index, "gradients", gradients):
            write(recorded)
    return loss / length


def _sides(layer: int, what: str, pair: tuple[Array, Array]) -> Iterator[Recorded]:
    for side, array in zip(("k", "v"), pair, strict=True):
        if not bool(jnp.isfinite(array).all()):
            kind = {"k": "keys", "v": "values"}[side]
            subject = kind if what == "rows" else f"gradients in the {kind}"
            raise ValueError(
                f"layer {layer}, {side}: the {subject} of a sample are not finite in"
                f" {array.dtype.name}"
            )
        yield Recorded(layer, side, what, np.asarray(array))
