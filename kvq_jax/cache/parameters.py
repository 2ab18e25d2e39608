"""Make the method parameters of one layer: arrays that a method needs besides the codes, calibrated
on a text or derived from the layer's weights.

    # once for a model: keep the arrays in a file
    calibrated = calibrate_layer(spec, dims, layer, rows, gradients)
    # for begin(..., parameters=)
    parameters = prepare_layer(spec, dims, layer, weights=weights, calibrated=calibrated)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Float

from kvq_jax.cache.cache import Cache, CacheDims, dims_of, plans
from kvq_jax.cache.dims import check_layer
from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.codecs.learning import QueryMoments
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
    """Return the method parameters of one layer.

    Arguments that the method does not need are ignored.

    Args:
        spec: the cache, or its text.
        dims: the model's config, or its `CacheDims`.
        layer: the number of the layer.
        weights: the layer's projections, for methods that rebuild keys and values with them
            (XQuant) or subtract their bias (subtract_bias). Arrays that are used unchanged are
            shared with the model.
        calibrated: the result of `kvq.parameters.calibrate`, for methods that are calibrated on
            a text (KVQuant), or {"k": {"scale": [K]}, "v": {"scale": [K]}}, for fp8 with the scales
            of a checkpoint (`CacheDims.kv_scales`).

    Returns:
        The parameters (keys, values), each a tree of arrays, or () for a side that needs none.

    Raises:
        ValueError: in one line, if the spec does not fit the model, if the model has no such layer,
            if weights or calibrated arrays that the method needs are missing, or if arrays have the
            wrong names or shapes.
    """
    spec, sizes = parse(spec), dims_of(dims)
    check_layer(layer, sizes)
    if not isinstance(calibrated, Mapping | None):
        raise ValueError(
            "calibrated must be what kvq.parameters.calibrate returns for one layer, got"
            f" {type(calibrated).__name__}"
        )
    plan, sizes = parameter_plans(spec, sizes)[layer], sizes.at(layer)
    from_weights: tuple[Tree, Tree] = ((), ())
    if plan.k.learning.weights or plan.v.learning.weights:
        if weights is None:
            raise ValueError(
                f"{str(spec)!r} needs the weights of layer {layer}: give"
                " kvq.parameters.prepare weights=kvq.types.LayerWeights(...)"
            )
        _check_weights(weights, sizes)
        from_weights = plan.from_weights(weights)

    def with_calibrated(side: Side, codec: Codec, side_params: Tree) -> Tree:
        owner = f"{str(spec)!r}, {side} of layer {layer}"
        arrays = (calibrated or {}).get(side)
        if not isinstance(arrays, Mapping | None):
            raise ValueError(
                f"calibrated[{side!r}] must be arrays by name, got {type(arrays).__name__}"
            )
        params = _with_calibrated(owner, codec, sizes, side_params, arrays)
        for name, array in (arrays or {}).items() if codec.learning.brought else ():
            _check_scales(f"calibrated[{side!r}][{name!r}]", array)
        return params

    k = with_calibrated("k", plan.k, from_weights[0])
    v = with_calibrated("v", plan.v, from_weights[1])
    return k, k if plan.joint else v


def calibrate_layer(
    spec: CacheSpec | str,
    dims: ModelDims,
    layer: int,
    rows: Mapping[Side, ArrayLike],
    gradients: Mapping[Side, ArrayLike],
    queries: ArrayLike | None = None,
) -> dict[Side, dict[str, np.ndarray]]:
    """Return the parameters of one layer that the method learns from the tokens of a text.

    Leave out the first `sink` tokens, which a cache keeps in full precision. Computed in NumPy: the
    same rows give the same arrays.

    Args:
        spec: the cache, or its text.
        dims: the model's config, or its `CacheDims`.
        layer: the number of the layer.
        rows: "k" and "v" [B, K, T, H], the keys and values that the method would cache. Keys come
            before RoPE if the method caches them before RoPE (KVQuant's default), else after it,
            and without their bias under subtract_bias.
        gradients: "k" and "v" [B, K, T, H], the gradients of the model's mean loss with respect to
            `rows`, which weight elements (KVQuant's Fisher information). Pass ones if they are not
            known: then all elements weigh the same but for their scale.
        queries: [B, N, T, H] after RoPE, for methods that are fitted to them (Block-GTQ).

    Returns:
        {"k": {name: array}, "v": {...}}, without sides that need no parameters.

    Raises:
        ValueError: in one line, if the model has no such layer, or if a side's rows or gradients
            are missing, have the wrong shapes, or the method refuses them.
    """
    spec, sizes = parse(spec), dims_of(dims)
    check_layer(layer, sizes)
    for name, given in (("rows", rows), ("gradients", gradients)):
        if not isinstance(given, Mapping | None):
            raise ValueError(
                f"{name} must be arrays by side, 'k' and 'v', got {type(given).__name__}"
            )
    plan, sizes, calibrated = parameter_plans(spec, sizes)[layer], sizes.at(layer), {}
    moments = None if queries is None else _query_moments(queries, sizes)
    sides: tuple[tuple[Side, Codec], ...] = (("k", plan.k), ("v", plan.v))
    for side, codec in sides:
        learning = codec.learning
        if learning.brought or not learning.parameters(sizes.num_key_value_heads):
            continue
        if learning.fit_to_layer:
            raise ValueError(
                f"{str(spec)!r} is fitted to whole sequences: kvq_models.calibrate does so"
            )
        if learning.fit_to_queries and moments is None:
            raise ValueError(
                f"{str(spec)!r} is fitted to the queries of layer {layer}: give queries="
            )
        if side not in (rows or ()) or side not in (gradients or ()):
            raise ValueError(
                f"{str(spec)!r} is calibrated on {side} of layer {layer}: give rows[{side!r}] and"
                f" gradients[{side!r}]"
            )
        tokens = _token_rows(rows[side], sizes, f"rows[{side!r}]")
        slopes = _token_rows(gradients[side], sizes, f"gradients[{side!r}]")
        if tokens.shape != slopes.shape:
            raise ValueError(
                f"rows[{side!r}] and gradients[{side!r}] have {len(tokens)} and {len(slopes)}"
                " tokens"
            )
        calibrated[side] = learning.calibrate(tokens, slopes, moments)
    return calibrated


def parameters_by_layer(cache: Cache, parameters: Sequence[Tree]) -> tuple[Tree, ...]:
    """Return the parameters of each layer, `()` for all if none are given. Raise ValueError if they
    are not a sequence, or are those of another number of layers."""
    if not isinstance(parameters, Sequence):
        raise ValueError(
            "parameters must be a sequence with an entry for each layer, got"
            f" {type(parameters).__name__}"
        )
    by_layer = tuple(parameters) or ((),) * len(cache.layers)
    if len(by_layer) != len(cache.layers):
        raise ValueError(
            f"parameters must have an entry for each of the {len(cache.layers)} layers, got"
            f" {len(by_layer)}"
        )
    return by_layer


def missing_parameters(plan: LayerPlan, params: Tree) -> str:
    """Return the sides ("keys", "values", "keys and values") whose codec lacks parameters that it
    needs, "" if nothing is missing."""

    def lacks(codec: Codec, side_params: Tree) -> bool:
        if codec.learning.weights and not side_params:
            return True
        return not set(codec.learning.carried(plan.heads)) <= set(side_params)

    sides = zip(("keys", "values"), (plan.k, plan.v), by_side(params), strict=True)
    return " and ".join(name for name, codec, side_params in sides if lacks(codec, side_params))


def misshapen_parameter(plan: LayerPlan, params: Tree) -> str:
    """Return a sentence about the first array whose shape is not the one that its codec declares,
    such as that of another spec, "" if there is none."""
    sides = zip(("keys", "values"), (plan.k, plan.v), by_side(params), strict=True)
    for side, codec, side_params in sides:
        for name, described in codec.learning.carried(plan.heads).items():
            # kvq_models counts leaves with integers in their place
            given = getattr(side_params[name], "shape", described.shape)
            if given != described.shape:
                return f"{name} of {side} must be {list(described.shape)}, got {list(given)}"
    return ""


def parameter_axes(plan: LayerPlan, dims: CacheDims, params: Tree) -> Tree:
    """Describe the axes of a layer's parameters (keys, values): a tree of `ArraySpec`, without
    sides that have none.

    The names of the parameters say which weights the model has. Raise ValueError if the codecs do
    not describe these parameters.
    """
    described = []
    for codec, side_params in zip((plan.k, plan.v), by_side(params), strict=True):
        kinds = described_from_weights(codec, plan, dims.hidden_size)
        derived = codec.learning.derived(plan.heads), {}
        candidates = (
            {**(from_weights or {}), **codec.learning.carried(plan.heads), **more}
            for (_, from_weights), more in itertools.product(kinds, derived)
        )
        structure = jax.tree.structure(side_params or {})
        matching = [axes for axes in candidates if jax.tree.structure(axes) == structure]
        if not matching:
            raise ValueError(
                f"{type(codec).__name__} has parameters that it does not describe:"
                f" {jax.tree.structure(side_params)}"
            )
        described.append(matching[0] if side_params else ())
    return tuple(described)


def described_from_weights(
    codec: Codec, plan: LayerPlan, hidden_size: int, dtype: str = "float32"
) -> Iterator[tuple[LayerWeights, Tree]]:
    """Yield the descriptions of each kind of weights that the codec takes (with or without biases
    and QK-norm), and of the parameters that follow from them. Weights that are used unchanged are
    the same objects in both."""
    for bias, norm in itertools.product((False, True), repeat=2):
        weights = _described_weights(plan, hidden_size, dtype, bias, norm)
        try:
            yield weights, codec.learning.from_weights(weights)
        except ValueError:  # the codec needs a bias, or cannot have a norm
            continue


def _described_weights(
    plan: LayerPlan, hidden_size: int, dtype: str, bias: bool, norm: bool
) -> LayerWeights:
    model = Axis("model", hidden_size)
    out = Axis("kv_heads", plan.heads, each=plan.head_dim)
    kernel, vector = ArraySpec((model, out), dtype), ArraySpec((out,), dtype)
    return LayerWeights(
        k_kernel=kernel,
        v_kernel=kernel,
        input_norm=ArraySpec((model,), dtype),
        norm_eps=ArraySpec((), "float32"),
        k_bias=vector if bias else None,
        v_bias=vector if bias else None,
        k_norm=ArraySpec((Axis("channels", plan.head_dim),), dtype) if norm else None,
    )


def parameter_plans(spec: CacheSpec, dims: CacheDims) -> tuple[LayerPlan, ...]:
    """Return the plans of a spec's smallest cache, for questions that do not depend on the
    capacity.

    Raise ValueError if the spec does not fit the model.
    """
    return plans(spec, dims, spec.sink + spec.recent + spec.block, "float32")


def _with_calibrated(
    owner: str,
    codec: Codec,
    dims: CacheDims,
    from_weights: Tree,
    calibrated: Mapping[str, ArrayLike] | None,
) -> Tree:
    """Return a side's parameters: the ones from weights, the calibrated ones, and the ones derived
    from these. `owner` names the side in errors."""
    declared = codec.learning.parameters(dims.num_key_value_heads)
    if not declared:
        return from_weights
    if calibrated is None:
        raise ValueError(
            f"{owner} needs {', '.join(declared)}: give kvq.parameters.prepare"
            " calibrated=kvq.parameters.calibrate(...)"
        )
    shapes = {name: jnp.shape(array) for name, array in calibrated.items()}
    wanted = {name: struct.shape for name, struct in declared.items()}
    if shapes != wanted:
        raise ValueError(f"{owner} needs calibrated arrays of shapes {wanted}, got {shapes}")
    arrays = {
        name: jnp.asarray(calibrated[name], struct.dtype) for name, struct in declared.items()
    }
    return (from_weights or {}) | codec.learning.carry(arrays)


def _check_scales(name: str, scales: ArrayLike) -> None:
    """Raise ValueError if a known scale of a checkpoint is not positive and finite: codes are rows
    divided by it."""
    if isinstance(scales, Tracer):
        return
    host = np.asarray(scales, np.float32)
    wrong = host[~(np.isfinite(host) & (host > 0))]
    if wrong.size:
        raise ValueError(f"{name} must be positive and finite, got {wrong[0]}")


def _check_weights(weights: LayerWeights, dims: CacheDims) -> None:
    """Raise ValueError if a weight is not of this layer: a bias of one head would be broadcast."""
    width, heads = dims.hidden_size, dims.num_key_value_heads * dims.head_dim
    wanted = {
        "k_kernel": ("[D, K * H]", [width, heads]),
        "v_kernel": ("[D, K * H]", [width, heads]),
        "input_norm": ("[D]", [width]),
        "k_bias": ("[K * H]", [heads]),
        "v_bias": ("[K * H]", [heads]),
        "k_norm": ("[H]", [dims.head_dim]),
    }
    for name, (axes, shape) in wanted.items():
        array = getattr(weights, name, None)
        if array is None and name in ("k_bias", "v_bias", "k_norm"):
            continue
        given = list(getattr(array, "shape", ())) or type(array).__name__
        if given != shape:
            raise ValueError(f"{name} must be {axes} = {shape}, got {given}")


def _token_rows(rows: ArrayLike, dims: CacheDims, name: str) -> Float[np.ndarray, "tokens K H"]:
    """Return the rows of all tokens of all sequences, in order, fp32."""
    shape = np.shape(rows)
    if len(shape) != 4 or (shape[1], shape[3]) != (dims.num_key_value_heads, dims.head_dim):
        raise ValueError(
            f"{name} must be [B, {dims.num_key_value_heads}, T, {dims.head_dim}], got shape"
            f" {list(shape)}"
        )
    return np.moveaxis(np.asarray(rows, np.float32), 1, 2).reshape(-1, shape[1], shape[3])


def _query_moments(queries: ArrayLike, dims: CacheDims) -> QueryMoments:
    """Return E q q^T over all tokens of all sequences and the query heads of each KV head."""
    shape, heads = np.shape(queries), dims.num_key_value_heads
    if len(shape) != 4 or (shape[1], shape[3]) != (dims.num_attention_heads, dims.head_dim):
        raise ValueError(
            f"queries must be [B, {dims.num_attention_heads}, T, {dims.head_dim}], got shape"
            f" {list(shape)}"
        )
    q = np.asarray(queries, np.float32)
    if not q.size or not np.isfinite(q).all():
        raise ValueError(f"queries must be finite, of at least one token, got shape {list(shape)}")
    q = q.reshape(shape[0], heads, -1, shape[3])
    q = np.moveaxis(q, 1, 0).reshape(heads, -1, shape[3])
    return np.swapaxes(q, 1, 2) @ q / q.shape[1]
