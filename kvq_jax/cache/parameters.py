"""Method parameters of one layer: what a method needs beside the codes, fitted to a calibration text or made from the layer's weights.

calibrated = calibrate_layer(spec, dims, layer, rows, gradients)                         arrays, once for a model; keep them in a file
own = prepare_layer(spec, dims, layer, weights=weights, calibrated=calibrated)           what `begin(..., parameters=)` takes
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

from kvq_jax.array_types import LayerWeights, ModelDims, RowsBKTH, Tree
from kvq_jax.cache.cache import CacheDims, dims_of, plans
from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.codecs.base import Codec, Side
from kvq_jax.layer.plan import LayerPlan, by_side

Calibrated = Mapping[Side, Mapping[str, ArrayLike]]


def prepare_layer(
    spec: CacheSpec | str,
    dims: ModelDims,
    layer: int,
    *,
    weights: LayerWeights | None = None,
    calibrated: Calibrated | None = None,
) -> tuple[Tree, Tree]:
    """Return the parameters (keys, values) of one layer, each a tree of arrays, or () for a side that needs none.

    weights: the layer's projections, for methods that rebuild keys and values from them (XQuant) or know their bias (subtract_bias); arrays
    that are used as they are are shared with the model. calibrated: what `calibrate_layer` returned, for methods that are fitted to a text
    (KVQuant). Either may be given where nothing needs it.

    Raises ValueError, in one line, where the spec does not fit the model, needs one that is not given, or gets arrays of other names or
    shapes.
    """
    spec, sizes = parse(spec), dims_of(dims)
    plan = parameter_plans(spec, sizes)[layer]
    made: tuple[Tree, Tree] = ((), ())
    if plan.k.takes_weights or plan.v.takes_weights:
        if weights is None:
            raise ValueError(f"{str(spec)!r} needs the weights of layer {layer}: give prepare_layer weights=kvq.LayerWeights(...)")
        _check_weights(weights, sizes)
        made = plan.from_weights(weights)
    given = calibrated or {}
    sides: tuple[tuple[Side, Codec, Tree], ...] = (("k", plan.k, made[0]), ("v", plan.v, made[1]))
    k, v = (_with_calibrated(f"{str(spec)!r}, {side} of layer {layer}", codec, sizes, own, given.get(side)) for side, codec, own in sides)
    return k, k if plan.joint else v


def calibrate_layer(
    spec: CacheSpec | str, dims: ModelDims, layer: int, rows: Mapping[Side, RowsBKTH], gradients: Mapping[Side, RowsBKTH]
) -> dict[Side, dict[str, np.ndarray]]:
    """Return the calibrated parameters of one layer, {"k": {name: array}, "v": {...}}; sides that need none are left out.

    rows["k"], rows["v"] [B, K, T, H]: what the method caches of the tokens of a text: keys before RoPE where it caches those (KVQuant's
    default), else after it, without their bias under subtract_bias; values. gradients: those of the model's mean loss with respect to
    these rows, which weigh elements (KVQuant's Fisher information); ones where they are not known: then elements count alike but for their
    scale. Leave out the first `sink` tokens, which a cache keeps exact. Computed in NumPy; the same rows give the same arrays.

    Raises ValueError, in one line, where a side's rows or gradients are missing, have other shapes, or are refused by the method.
    """
    spec, sizes = parse(spec), dims_of(dims)
    plan, found = parameter_plans(spec, sizes)[layer], {}
    sides: tuple[tuple[Side, Codec], ...] = (("k", plan.k), ("v", plan.v))
    for side, codec in sides:
        if not codec.parameters(sizes.num_key_value_heads):
            continue
        if side not in rows or side not in gradients:
            raise ValueError(f"{str(spec)!r} is calibrated on {side} of layer {layer}: give rows[{side!r}] and gradients[{side!r}]")
        own, slopes = (_token_rows(given[side], sizes, f"{name}[{side!r}]") for name, given in (("rows", rows), ("gradients", gradients)))
        if own.shape != slopes.shape:
            raise ValueError(f"rows[{side!r}] and gradients[{side!r}] are of {len(own)} and {len(slopes)} tokens")
        found[side] = codec.calibrate(own, slopes)
    return found


def missing_parameters(plan: LayerPlan, params: Tree) -> str:
    """Return the sides ("keys", "values", "keys and values") whose codec needs parameters that are not there; "" where all are."""
    pair = by_side(params)
    lacking = [
        name
        for name, codec, own in zip(("keys", "values"), (plan.k, plan.v), pair, strict=True)
        if (codec.takes_weights and not own) or set(codec.parameters(plan.heads)) - set(own)
    ]
    return " and ".join(lacking)


def parameter_plans(spec: CacheSpec, dims: CacheDims) -> tuple[LayerPlan, ...]:
    """Return plans of the smallest cache of a spec, for what does not depend on the capacity. ValueError where the spec does not fit."""
    return plans(spec, dims, spec.sink + spec.recent + spec.block, "float32")


def _with_calibrated(where: str, codec: Codec, dims: CacheDims, own: Tree, calibrated: Mapping[str, ArrayLike] | None) -> Tree:
    """Return a side's parameters from weights with its calibrated ones beside them."""
    declared = codec.parameters(dims.num_key_value_heads)
    if not declared:
        return own
    if calibrated is None:
        raise ValueError(f"{where} needs {', '.join(declared)}: give prepare_layer calibrated=kvq.calibrate_layer(...)")
    shapes = {name: jnp.shape(array) for name, array in calibrated.items()}
    wanted = {name: struct.shape for name, struct in declared.items()}
    if shapes != wanted:
        raise ValueError(f"{where} needs calibrated arrays of shapes {wanted}, got {shapes}")
    return (own or {}) | {name: jnp.asarray(calibrated[name], struct.dtype) for name, struct in declared.items()}


def _check_weights(weights: LayerWeights, dims: CacheDims) -> None:
    shape = (dims.hidden_size, dims.num_key_value_heads * dims.head_dim)
    for name in ("k_kernel", "v_kernel"):
        if getattr(weights, name).shape != shape:
            raise ValueError(f"{name} must be [D, K * H] = {list(shape)}, got {list(getattr(weights, name).shape)}")


def _token_rows(rows: RowsBKTH, dims: CacheDims, name: str) -> Float[np.ndarray, "tokens K H"]:
    """Return the rows of all tokens of all sequences, fp32."""
    shape = np.shape(rows)
    if len(shape) != 4 or (shape[1], shape[3]) != (dims.num_key_value_heads, dims.head_dim):
        raise ValueError(f"{name} must be [B, {dims.num_key_value_heads}, T, {dims.head_dim}], got shape {list(shape)}")
    return np.moveaxis(np.asarray(rows, np.float32), 1, 2).reshape(-1, shape[1], shape[3])
