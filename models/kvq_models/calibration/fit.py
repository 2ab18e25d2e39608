"""`calibrate`: from a model and a text to the parameters of a cache.

    1. draw samples of the text                                    (samples.py)
    2. run the model over each; every layer's rows and gradients
       go to disk                                                  (activations.py, store.py)
    3. fit one side of one layer at a time                         (codecs/learning.py)

Memory holds the weights and either one sample or the rows and gradients of one side of one layer.
You can interrupt both loops: the next call with the same work directory continues, and gives the
same bytes as an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from kvq_jax.cache.cache import dims_of
from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.codecs.codec import Codec
from kvq_jax.codecs.learning import LayerTrace
from kvq_jax.types.array_types import Integers
from kvq_jax.types.rope import Rope, rotate
from kvq_models.calibration import samples as text_samples
from kvq_models.calibration.activations import record
from kvq_models.calibration.file import Calibration, Origin, resolved
from kvq_models.calibration.fingerprint import partial_fingerprint
from kvq_models.calibration.needs import Need, needs
from kvq_models.calibration.progress import Progress, silent
from kvq_models.calibration.store import Identity, Store
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.layer_weights import layer_weights
from kvq_models.llama.model import Layer, Llama
from kvq_models.llama.packed_loading import dense_llama
from kvq_models.llama.rope import ropes_for
from kvq_models.llama.weights_needed import check_weights


def calibrate(
    llama: Llama,
    token_ids: Integers,
    spec: CacheSpec | str,
    *,
    samples: int = 16,
    length: int = 2048,
    seed: int = 0,
    work: str | os.PathLike[str],
    text: str = "",
    progress: Progress | None = None,
) -> Calibration:
    """Fit the parameters that `spec` needs for this model to `samples` random windows of a text.

    Args:
        llama: the model.
        token_ids: the text's tokens, [n] integers.
        spec: the cache to calibrate. The result's spec is the `resolved` one.
        samples: number of windows.
        length: tokens per window. The first `spec.sink` tokens of each are left out of the fit,
            since a cache keeps them in full precision.
        seed: of the random windows.
        work: a directory for the recorded rows, of the size that `Store` documents. It belongs to
            one model, text, seed, sample count, length and dtype. Other specs may reuse it and then
            skip the recording.
        text: the text's name, for the file.
        progress: wraps the two loops, as tqdm would.

    The same arguments give the same bytes on the same machine.

    Raises ValueError, in one line, if the spec needs no calibration or does not fit the model, the
    text is too short, the work directory belongs to another run, is damaged or in use by another
    process, or rows are not finite or refused by the method (the line then names layer and side).
    Raises OSError if the disk lacks space.
    """
    spec, progress = parse(spec), progress or silent
    check_request(spec, llama.config, token_ids, samples, length)
    llama = dense_llama(llama)
    dtype = llama.embed[...].dtype.name
    identity = Identity(
        partial_fingerprint(llama), text_samples.sha256(token_ids), samples, length, seed, dtype
    )
    windows = text_samples.draw(token_ids, samples, length, seed, llama.config.bos_token_id)
    needed = needs(spec, llama.config)
    ropes = ropes_for(llama.config, length)
    tensors: dict[str, np.ndarray] = {}
    with Store(Path(work), identity, dims_of(llama.config)) as store:
        for index in progress(range(len(store.losses), samples), "running samples"):
            with store.sample() as writer:
                writer.loss = record(llama, windows[index], writer)
        for name in progress(list(needed), "fitting"):
            need = needed[name]
            layer = llama.layers[need.layer]
            bias, turn = subtracted_bias(need.codec, layer), layer.rope(ropes)
            tensors |= {
                f"{name}.{parameter}": array
                for parameter, array in _fitted(store, need, spec.sink, turn, bias, layer).items()
            }
    origin = Origin(
        text, identity.tokens_sha256, samples, length, seed, dtype, float(np.mean(store.losses))
    )
    keys = {name: need.options for name, need in needed.items()}
    calibration = Calibration(
        str(spec), dims_of(llama.config), identity.model_fingerprint, keys, origin, tensors
    )
    return dataclasses.replace(calibration, spec=str(resolved(spec, calibration)))


def check_request(
    spec: CacheSpec, config: LlamaConfig, token_ids: Integers, samples: int, length: int
) -> None:
    """Raise ValueError, in one line, for everything that can be refused without the weights."""
    if not needs(spec, config):
        raise ValueError(f"{str(spec)!r} needs no calibration: it can be used as it is")
    check_weights(spec, config)
    text_samples.check(token_ids, samples, length, config)
    if length <= spec.sink:
        raise ValueError(
            f"a length of {length} leaves no token to calibrate with: {str(spec)!r} keeps the first"
            f" {spec.sink} of a sample in full precision; give a greater length"
        )


def subtracted_bias(codec: Codec, layer: Layer) -> Float[Array, "K H"] | None:
    """Return the bias that is subtracted from keys before they are cached, fp32, or None."""
    learning = codec.learning
    if learning.bias is None:
        return None
    weights = layer_weights(layer)
    assert weights is not None, "check_weights has refused such models"
    return learning.bias(learning.from_weights(weights), layer.config.head_dim)


def _fitted(
    store: Store, need: Need, sink: int, rope: Rope, bias: Float[Array, "K H"] | None, layer: Layer
) -> dict[str, np.ndarray]:
    """Return the parameters of one side of one layer, kept by an earlier call or fitted now."""
    options = f"{need.options} without the first {sink} tokens"
    kept = store.fitted(need.layer, need.side, options)
    if kept is not None and _agree(kept, need):
        return kept
    try:
        learning = need.codec.learning
        if learning.fit_to_layer:
            if bias is not None:
                raise ValueError("this method takes no subtract_bias: leave it out")
            trace = _trace(store, need.layer, sink, rope, layer)
            keys = store.fitted(need.layer, "k", options)
            parameters = learning.fit_to_layer(dataclasses.replace(trace, fitted_keys=keys))
        else:
            moments = store.query_moments(need.layer) if learning.fit_to_queries else None
            parameters = learning.calibrate(*_rows(store, need, sink, rope, bias), moments)
    except ValueError as error:
        raise ValueError(f"layer {need.layer}, {need.side}: {error}") from error
    assert _agree(parameters, need), (
        f"{type(need.codec).__name__} does not fit the parameters that it declares"
    )
    store.keep(need.layer, need.side, options, parameters)
    return parameters


def _agree(parameters: dict[str, np.ndarray], need: Need) -> bool:
    declared = {name: (spec.shape, spec.struct.dtype) for name, spec in need.parameters.items()}
    return {name: (array.shape, array.dtype) for name, array in parameters.items()} == declared


def _rows(
    store: Store, need: Need, sink: int, rope: Rope, bias: Float[Array, "K H"] | None
) -> tuple[Float[np.ndarray, "tokens K H"], Float[np.ndarray, "tokens K H"]]:
    """Return the rows that the codec caches, without each sample's first tokens, and the gradient
    of the mean loss with respect to them, both fp32.

    Recorded keys are before RoPE and include their bias. Keys after it are k_rot = a R k, with the
    rotation R and the attention factor a, so the gradient with respect to them is R g / a. A bias
    changes no gradient.
    """
    recorded = store.read(need.layer, need.side)
    samples, length, heads, head_dim = recorded[0].shape
    rows, gradients = (
        np.empty((samples, length - sink, heads, head_dim), np.float32) for _ in recorded
    )
    rotates = need.side == "k" and not need.codec.learning.before_rope
    for index in range(samples):
        row, gradient = (jnp.asarray(array[index]) for array in recorded)
        gradient = gradient.astype(jnp.float32) / length
        if bias is not None:
            row = row.astype(jnp.float32) - bias[None]
        if rotates:
            # R g / a, of rows that `rotate` multiplies by a
            inverted = dataclasses.replace(rope, attention_factor=1 / rope.attention_factor)
            row, gradient = _rotated(row, rope), _rotated(gradient, inverted)
        rows[index], gradients[index] = row[sink:].astype(jnp.float32), gradient[sink:]
    return rows.reshape(-1, heads, head_dim), gradients.reshape(-1, heads, head_dim)


def _trace(store: Store, index: int, sink: int, rope: Rope, layer: Layer) -> LayerTrace:
    """Return what the samples recorded of a layer, whole sequences."""
    keys = [_rotated(jnp.asarray(sample), rope) for sample in store.read(index, "k")[0]]
    scale = layer.attention.scale
    return LayerTrace(
        keys=np.stack(keys).astype(np.float32),
        values=store.read(index, "v")[0].astype(np.float32),
        queries=store.last_queries(index).astype(np.float32),
        moments=store.query_moments(index),
        output=np.asarray(layer.o_proj.kernel[...], np.float32),
        scale=layer.config.head_dim**-0.5 if scale is None else scale,
        sink=sink,
    )


@jax.jit
def _rotated(rows_TKH: Shaped[Array, "T K H"], rope: Rope) -> Shaped[Array, "T K H"]:
    positions_BT = jnp.arange(rows_TKH.shape[0], dtype=jnp.int32)[None]
    return jnp.swapaxes(rotate(jnp.swapaxes(rows_TKH, 0, 1)[None], positions_BT, rope)[0], 0, 1)
