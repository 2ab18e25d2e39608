"""Method parameters of one layer: arrays that a method needs beside the codes, calibrated on a text
or made from the layer's weights.

calibrated = calibrate_layer(spec, dims, layer, rows, gradients)                         once for a model; keep the arrays in a file
own = prepare_layer(spec, dims, layer, weights=weights, calibrated=calibrated)           for `begin(..., parameters=)`
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

from kvq_jax.cache.cache import CacheDims, dims_of, plans
from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.layer.plan import LayerPlan, by_side
from kvq_jax.types.array_types import ArraySpec, Axis, LayerWeights, ModelDims, Tree

Calibrated = Mapping[Side, Mapping[str, ArrayLike]]


def prepare_layer(
    spec: CacheSpec | str,
    dims: ModelDims,
    layer: int,
    *,
    weights: LayerWeights | None = None,
    calibrated: Calibrated | None = None,
) -> tuple[Tree, Tree]:
    """Return the parameters (keys, values) of one layer, each a tree of arrays, or () for a side
    that needs none.

    weights: the layer's projections, for methods that rebuild keys and values with them (XQuant) or
    subtract their bias (subtract_bias); arrays that are used unchanged are shared with the model.
    calibrated: what `calibrate_layer` returned, for methods that are calibrated on a text
    (KVQuant). Both may be given even if the method does not need them.

    Raises ValueError, in one line, where the spec does not fit the model, where weights or
    calibrated arrays are needed and not given, and where arrays have the wrong names or shapes.
    """
    spec, sizes = parse(spec), dims_of(dims)
    plan = parameter_plans(spec, sizes)[layer]
    made: tuple[Tree, Tree] = ((), ())
    if plan.k.learning.weights or plan.v.learning.weights:
        if weights is None:
            raise ValueError(
                f"{str(spec)!r} needs the weights of layer {layer}: give prepare_layer"
                " weights=kvq.LayerWeights(...)"
            )
        _check_weights(weights, sizes)
        made = plan.from_weights(weights)
    given = calibrated or {}
    sides: tuple[tuple[Side, Codec, Tree], ...] = (("k", plan.k, made[0]), ("v", plan.v, made[1]))
    k, v = (
        _with_calibrated(
            f"{str(spec)!r}, {side} of layer {layer}", codec, sizes, own, given.get(side)
        )
        for side, codec, own in sides
    )
    return k, k if plan.joint else v


def calibrate_layer(
    spec: CacheSpec | str,
    dims: ModelDims,
    layer: int,
    rows: Mapping[Side, ArrayLike],
    gradients: Mapping[Side, ArrayLike],
) -> dict[Side, dict[str, np.ndarray]]:
    """Return the calibrated parameters of one layer, {"k": {name: array}, "v": {...}}; sides that
    need none are left out.

    rows["k"], rows["v"] [B, K, T, H]: the keys and values that the method would cache for the
    tokens of a text. Keys are taken before RoPE where the method caches them so (KVQuant's
    default), else after it, and without their bias under subtract_bias. gradients: those of the
    model's mean loss with respect to these rows, which weight elements (KVQuant's Fisher
    information). Give ones if they are not known: then all elements weigh the same but for their
    scale. Leave out the first `sink` tokens, which a cache keeps in full precision. Computed in
    NumPy; the same rows give the same arrays.

    Raises ValueError, in one line, where a side's rows or gradients are missing, have the wrong
    shapes, or are refused by the method.
    """
    spec, sizes = parse(spec), dims_of(dims)
    plan, calibrated = parameter_plans(spec, sizes)[layer], {}
    sides: tuple[tuple[Side, Codec], ...] = (("k", plan.k), ("v", plan.v))
    for side, codec in sides:
        if not codec.learning.parameters(sizes.num_key_value_heads):
            continue
        if side not in rows or side not in gradients:
            raise ValueError(
                f"{str(spec)!r} is calibrated on {side} of layer {layer}: give rows[{side!r}] and"
                f" gradients[{side!r}]"
            )
        own, slopes = (
            _token_rows(given[side], sizes, f"{name}[{side!r}]")
            for name, given in (("rows", rows), ("gradients", gradients))
        )
        if own.shape != slopes.shape:
            raise ValueError(
                f"rows[{side!r}] and gradients[{side!r}] have {len(own)} and {len(slopes)} tokens"
            )
        calibrated[side] = codec.learning.calibrate(own, slopes)
    return calibrated


def missing_parameters(plan: LayerPlan, params: Tree) -> str:
    """Return the sides ("keys", "values", "keys and values") whose codec lacks parameters that it
    needs; "" where nothing is missing."""
    pair = by_side(params)
    lacking = [
        name
        for name, codec, own in zip(("keys", "values"), (plan.k, plan.v), pair, strict=True)
        if (codec.learning.weights and not own)
        or set(codec.learning.parameters(plan.heads)) - set(own)
    ]
    return " and ".join(lacking)


def parameter_axes(plan: LayerPlan, dims: CacheDims, params: Tree) -> Tree:
    """Describe the axes of a layer's parameters (keys, values): a tree of `ArraySpec`, without
    sides that have none.

    Their names tell which weights the model has. Raises ValueError where they are not those that
    the codecs describe.
    """
    described = []
    for codec, own in zip((plan.k, plan.v), by_side(params), strict=True):
        derived = codec.learning.derived(plan.heads)
        found = (
            {**(made or {}), **codec.learning.parameters(plan.heads), **more}
            for (_, made), more in itertools.product(
                described_from_weights(codec, dims), (derived, {})
            )
        )
        matching = [
            axes for axes in found if jax.tree.structure(axes) == jax.tree.structure(own or {})
        ]
        if not matching:
            raise ValueError(
                f"{type(codec).__name__} has parameters that it does not describe:"
                f" {jax.tree.structure(own)}"
            )
        described.append(matching[0] if own else ())
    return tuple(described)


def described_from_weights(
    codec: Codec, dims: CacheDims, dtype: str = "float32"
) -> Iterator[tuple[LayerWeights, Tree]]:
    """Yield the descriptions of each kind of weights that the codec takes (with biases or not, with
    QK-norm or not), and of the parameters that follow from them. Weights that are used unchanged
    are the same objects in both."""
    for bias, norm in itertools.product((False, True), repeat=2):
        weights = _described_weights(dims, dtype, bias, norm)
        try:
            yield weights, codec.learning.from_weights(weights)
        except ValueError:  # the codec needs a bias, or cannot have a norm
            continue


def _described_weights(dims: CacheDims, dtype: str, bias: bool, norm: bool) -> LayerWeights:
    model, out = (
        Axis("model", dims.hidden_size),
        Axis("kv_heads", dims.num_key_value_heads, each=dims.head_dim),
    )
    kernel, vector = ArraySpec((model, out), dtype), ArraySpec((out,), dtype)
    return LayerWeights(
        k_kernel=kernel,
        v_kernel=kernel,
        input_norm=ArraySpec((model,), dtype),
        norm_eps=ArraySpec((), "float32"),
        k_bias=vector if bias else None,
        v_bias=vector if bias else None,
        k_norm=ArraySpec((Axis("channels", dims.head_dim),), dtype) if norm else None,
    )


def parameter_plans(spec: CacheSpec, dims: CacheDims) -> tuple[LayerPlan, ...]:
    """Return the plans of a spec's smallest cache, for questions that do not depend on the
    capacity.

    Raises ValueError where the spec does not fit the model.
    """
    return plans(spec, dims, spec.sink + spec.recent + spec.block, "float32")


def _with_calibrated(
    where: str, codec: Codec, dims: CacheDims, own: Tree, calibrated: Mapping[str, ArrayLike] | None
) -> Tree:
    """Return a side's parameters: those made from weights, `own`, its calibrated ones and what
    follows from these."""
    declared = codec.learning.parameters(dims.num_key_value_heads)
    if not declared:
        return own
    if calibrated is None:
        raise ValueError(
            f"{where} needs {', '.join(declared)}: give prepare_layer"
            " calibrated=kvq.calibrate_layer(...)"
        )
    shapes = {name: jnp.shape(array) for name, array in calibrated.items()}
    wanted = {name: struct.shape for name, struct in declared.items()}
    if shapes != wanted:
        raise ValueError(f"{where} needs calibrated arrays of shapes {wanted}, got {shapes}")
    arrays = {
        name: jnp.asarray(calibrated[name], struct.dtype) for name, struct in declared.items()
    }
    return (own or {}) | arrays | codec.learning.derive(arrays)


def _check_weights(weights: LayerWeights, dims: CacheDims) -> None:
    shape = (dims.hidden_size, dims.num_key_value_heads * dims.head_dim)
    for name in ("k_kernel", "v_kernel"):
        if getattr(weights, name).shape != shape:
            raise ValueError(
                f"{name} must be [D, K * H] = {list(shape)}, got"
                f" {list(getattr(weights, name).shape)}"
            )


def _token_rows(rows: ArrayLike, dims: CacheDims, name: str) -> Float[np.ndarray, "tokens K H"]:
    """Return the rows of all tokens of all sequences, in order, fp32."""
    shape = np.shape(rows)
    if len(shape) != 4 or (shape[1], shape[3]) != (dims.num_key_value_heads, dims.head_dim):
        raise ValueError(
            f"{name} must be [B, {dims.num_key_value_heads}, T, {dims.head_dim}], got shape"
            f" {list(shape)}"
        )
    return np.moveaxis(np.asarray(rows, np.float32), 1, 2).reshape(-1, shape[1], shape[3])
