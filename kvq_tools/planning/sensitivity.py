"""The cost of one side of one layer, read through the cache while everything else is exact: KL to
the full-precision model.

The model runs once over windows of a text, and every layer's input is kept. A measurement then
begins at its layer: that layer prefills a prompt into a real cache and decodes the tokens after it,
as generation does. The layers above attend exactly, to the exact keys and values of the prompt and
to the changed ones of the new tokens. So a measurement costs half a forward pass of the new tokens
on average, and equals `measure_rows` with a cache that keeps every other layer in full precision.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvq_jax as kvq
from kvq_jax.cache.cache import init_cache
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.cache.step import begin, finish, through_layer
from kvq_jax.types.array_types import LayerInputs, QueryBNTH, RowsBKTH
from kvq_models.inference.layers import attention_inputs, embed, finish_layer, head
from kvq_models.inference.method_parameters import parameters_for
from kvq_models.llama.model import HiddenBTD, Layer, Llama
from kvq_models.llama.rope import ropes_for
from kvq_tools.evaluation.compare import compare
from kvq_tools.evaluation.defaults import STEP
from kvq_tools.evaluation.forward import chunked_attention

# most logits that exist at a time, besides those of the full-precision model
MAX_LOGITS = 1 << 24


class Sensitivity:
    """The full-precision model on windows [B, T]. `kl(spec, layer)` is the cost of a cache in one
    layer.

    The first `prompt` tokens of a window are prefilled, and T - prompt must be a multiple of
    `step`. Memory: the inputs of every layer, the prompt's keys and values, and the full-precision
    logits of the tokens after it.
    """

    def __init__(
        self, llama: Llama, windows: Int[np.ndarray, "B T"], prompt: int, step: int = STEP
    ):
        if prompt < 1 or windows.shape[1] <= prompt or (windows.shape[1] - prompt) % step:
            raise ValueError(
                f"windows of {windows.shape[1]} tokens must be a prompt ({prompt=}) and whole steps"
                f" of {step}"
            )
        self.llama, self.prompt, self.step = llama, prompt, step
        self.tokens = jnp.asarray(windows, jnp.int32)
        batch, length = self.tokens.shape
        self.rope = ropes_for(llama.config, length)
        self.positions = jnp.arange(length, dtype=jnp.int32)[None].repeat(batch, 0)
        self.valid = jnp.ones((batch, length), bool)
        hidden = embed(llama, self.tokens)
        self.hidden = list[HiddenBTD]()
        self.prompts = list[tuple[RowsBKTH, RowsBKTH]]()
        for layer in llama.layers:
            self.hidden.append(hidden)
            inputs = attention_inputs(layer, hidden, self.positions, self.valid, self.rope)
            self.prompts.append((inputs.k_rot[:, :, :prompt], inputs.v[:, :, :prompt]))
            hidden = finish_layer(layer, hidden, _exact(layer, inputs))
        self.exact = head(llama, hidden[:, prompt:-1])

    def kl(self, llama: Llama, spec: CacheSpec, layer: int) -> Float[np.ndarray, " B"]:
        """Return each window's mean KL in nats per token after the prompt if only this layer is
        read through a cache of `spec`.

        llama: the model, prepared for the cache (`kvq_models.prepare`).
        """
        hidden, prompt = self._through(llama, spec, layer), self.prompt
        positions, valid = self.positions[:, prompt:], self.valid[:, prompt:]
        for above in range(layer + 1, len(self.llama.layers)):
            layer_above = self.llama.layers[above]
            inputs = attention_inputs(layer_above, hidden, positions, valid, self.rope)
            attended = _exact(layer_above, inputs, self.prompts[above])
            hidden = finish_layer(layer_above, hidden, attended)
        return self._divergence(hidden[:, :-1])

    def _divergence(self, hidden: HiddenBTD) -> Float[np.ndarray, " B"]:
        """Return each window's mean KL of predictions from the last layer's output for the tokens
        after the prompt but the last."""
        batch, length = hidden.shape[:2]
        size = max(1, MAX_LOGITS // (batch * self.llama.config.vocab_size))
        following = self.tokens[:, self.prompt + 1 :]
        total = np.zeros(batch)
        for at in range(0, length, size):
            chunk = (slice(None), slice(at, at + size))
            logits = head(self.llama, hidden[chunk])
            total += np.asarray(_sum_of_kl(logits, self.exact[chunk], following[chunk]))
        return total / length

    def _through(self, llama: Llama, spec: CacheSpec, layer: int) -> HiddenBTD:
        """Return the layer's output for the tokens after the prompt, read through the cache step by
        step."""
        batch, length = self.tokens.shape
        measured, parameters = llama.layers[layer], parameters_for(llama, spec)
        cache = init_cache(spec, llama.config, batch, length, llama.embed[...].dtype)
        outputs = []
        for start, stop in (
            (0, self.prompt),
            *((at, at + self.step) for at in range(self.prompt, length, self.step)),
        ):
            step = dataclasses.replace(
                begin(cache, stop - start, prefill=not start, parameters=parameters), layer=layer
            )
            hidden = self.hidden[layer][:, start:stop]
            inputs = attention_inputs(measured, hidden, step.positions, step.valid, self.rope)
            # attention inside a prompt is exact: only what the cache keeps of it counts
            attention, step = through_layer(step, inputs, attend=start > 0)
            # other layers are not read: they have no tokens
            cache = finish(dataclasses.replace(step, layer=len(llama.layers)))
            if start:
                outputs.append(finish_layer(measured, hidden, attention))
        return jnp.concatenate(outputs, axis=1)


def one_side(spec: CacheSpec, side: str, windows: CacheSpec) -> CacheSpec:
    """Return the cache with the windows of `windows` and the other side in full precision."""
    dense = kvq.parse("dense").k
    changed = {"k": spec.k, "v": dense} if side == "k" else {"k": dense, "v": spec.v}
    return dataclasses.replace(windows, **changed)


def _exact(
    layer: Layer,
    inputs: LayerInputs,
    prompt: tuple[Float[Array, "B K P H"], Float[Array, "B K P H"]] | None = None,
) -> QueryBNTH:
    """Return the exact attention of new tokens to the keys and values of a prompt, if there is one,
    and to each other."""
    keys, values = inputs.k_rot, inputs.v
    if prompt is not None:
        keys = jnp.concatenate((prompt[0], keys), axis=2)
        values = jnp.concatenate((prompt[1], values), axis=2)
    return chunked_attention(inputs.q_rot, keys, values, layer.attention, layer.sink_logits())


@jax.jit
def _sum_of_kl(
    logits: Float[Array, "B T V"], exact: Float[Array, "B T V"], following: Int[Array, "B T"]
) -> Float[Array, " B"]:
    return compare(logits, exact, following).kl.sum(axis=1)
