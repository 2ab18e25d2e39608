"""Method parameters: arrays that a cache method needs besides the codes, calibrated on a text or
computed from the weights.

The model carries them together with the options they were made for, as static text.
`parameters_for` refuses a cache that needs others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from kvq_jax.cache.cache import CacheDims, dims_of
from kvq_jax.cache.parameters import parameter_plans, prepare_layer
from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.methods.base import Method
from kvq_jax.placement.processes import fetched
from kvq_jax.types.array_types import Tree
from kvq_models.calibration.file import Calibration, Given, check_calibration
from kvq_models.calibration.fingerprint import partial_fingerprint
from kvq_models.calibration.needs import needs
from kvq_models.calibration.progress import Progress
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.layer_weights import layer_weights
from kvq_models.llama.model import Llama
from kvq_models.llama.sharding import mesh_of_weights

# (k, v) of every layer: the options that its parameters depend on, "" if it needs none
Purpose = tuple[tuple[str, str], ...]


class CacheParameters(tuple[tuple[Tree, Tree], ...]):
    """Parameters (k, v) of every layer: a tree of arrays, or () for a side that needs none. A
    pytree node; `made_for` is static."""

    made_for: Purpose | None

    def __new__(
        cls, layers: Iterable[tuple[Tree, Tree]], made_for: Purpose | None = None
    ) -> CacheParameters:
        made = super().__new__(cls, layers)
        made.made_for = made_for
        return made


jax.tree_util.register_pytree_with_keys(
    CacheParameters,
    lambda node: (
        [(jax.tree_util.SequenceKey(i), layer) for i, layer in enumerate(node)],
        node.made_for,
    ),
    lambda made_for, layers: CacheParameters(layers, made_for),
)


def prepare(
    llama: Llama,
    spec: CacheSpec | str,
    calibration: Given | None = None,
    progress: Progress | None = None,
) -> Llama:
    """Return the model with the parameters of `spec` in its `cache_parameters`.

    Args:
        llama: the model. The result shares its weights. Methods without parameters return it
            unchanged.
        spec: the cache to prepare for.
        calibration: a calibration or its file, for methods that need one.
        progress: wraps the loop over layers whose weights are factored (seconds per layer for large
            models), as tqdm would.

    Raises FileNotFoundError if the calibration's file is missing. Raises ValueError, in one line,
    if the spec does not fit the model (or subtracts a bias that its keys do not have), needs a
    calibration that is missing (the line says how to make one), takes none, or if the calibration
    does not fit this model and spec (`kvq_models.load_calibration`).
    """
    spec = parse(spec)
    checked = check_calibration(
        spec, llama.config, calibration, None if calibration is None else partial_fingerprint(llama)
    )
    parameters = _parameters(llama, spec, checked, progress)
    if not parameters and not jax.tree.leaves(llama.cache_parameters):
        return llama
    mesh = mesh_of_weights(llama)
    if mesh is not None:  # every device rebuilds its part, without a collective
        parameters = jax.device_put(parameters, NamedSharding(mesh, PartitionSpec()))
    prepared = jax.tree.map(lambda leaf: leaf, llama)
    prepared.cache_parameters = nnx.data(parameters)
    return prepared


def parameters_for(llama: Llama, spec: CacheSpec) -> tuple[Tree, ...]:
    """Return the model's parameters for each layer of a cache of `spec`: a pair (k, v), or () if
    the model carries none.

    Raises ValueError, naming the first side whose parameters were made for other options than the
    cache needs. Parameters that the cache does not need are allowed, and so are parameters that
    were put into the model by hand, whose options are unknown.
    """
    carried = llama.cache_parameters
    needed = [asked for layer in _purpose(spec, dims_of(llama.config)) for asked in layer if asked]
    if needed and not carried:
        raise ValueError(
            f"the model carries no parameters, and the cache {str(spec)!r} needs those for"
            f" {needed[0]!r}: prepare makes them"
        )
    made_for = getattr(carried, "made_for", None)
    if made_for is not None:
        for layer, (made, needed) in enumerate(
            zip(made_for, _purpose(spec, dims_of(llama.config)), strict=True)
        ):
            for side, method, asked in zip(("keys", "values"), made, needed, strict=True):
                if asked not in ("", method):
                    raise ValueError(
                        f"the model's parameters for {side} of layer {layer} were made for"
                        f" {method or 'no method'!r}, and the cache {str(spec)!r} needs those for"
                        f" {asked!r}: prepare(llama, {str(spec)!r}) makes them"
                    )
    return carried or ((),) * len(llama.layers)


def _parameters(
    llama: Llama, spec: CacheSpec, calibration: Calibration | None, progress: Progress | None
) -> CacheParameters | tuple[()]:
    """Return the parameters of every layer, or () if no side of any layer needs any."""
    calibrated: dict[int, dict[Side, dict[str, np.ndarray]]] = {}
    if calibration is not None:
        for name, need in needs(spec, llama.config).items():
            arrays = {
                parameter: calibration.tensors[f"{name}.{parameter}"]
                for parameter in need.parameters
            }
            calibrated.setdefault(need.layer, {})[need.side] = arrays
    dims = dims_of(llama.config)
    for layer, brought in enumerate(_brought(spec, llama.config)):
        calibrated.setdefault(layer, {}).update(brought)
    layers: list[tuple[Tree, Tree]] = [((), ())] * len(llama.layers)
    needed = [i for i, sides in enumerate(_purpose(spec, dims)) if any(sides)]
    for layer in progress(needed, "preparing layers") if progress else needed:
        weights = layer_weights(llama.layers[layer])
        if jax.process_count() > 1:  # each makes all parameters, from whole weights
            weights = jax.tree.map(lambda leaf: jnp.asarray(fetched(leaf)), weights)
        layers[layer] = prepare_layer(
            spec, dims, layer, weights=weights, calibrated=calibrated.get(layer)
        )
    return CacheParameters(layers, _purpose(spec, dims)) if needed else ()


def _brought(spec: CacheSpec, config: LlamaConfig) -> Iterator[dict[Side, dict[str, np.ndarray]]]:
    """Yield the parameters of each layer that the model's checkpoint brings. Raise ValueError if
    its files lack them."""
    sides: tuple[Side, Side] = ("k", "v")
    for layer, plan in enumerate(parameter_plans(spec, dims_of(config))):
        scales = {}
        for index, (side, codec) in enumerate(zip(sides, (plan.k, plan.v), strict=True)):
            if codec.learning.brought:
                if config.kv_scales is None:
                    raise ValueError(
                        f"{str(spec)!r} takes its scales from the checkpoint, whose kv_cache_scheme"
                        " promises them, and the files lack them: scale=head takes them from the"
                        " prompt"
                    )
                scales[side] = {"scale": np.asarray(config.kv_scales[layer][index], np.float32)}
        yield scales


@functools.lru_cache(256)  # callers choose the specs
def _purpose(spec: CacheSpec, dims: CacheDims) -> Purpose:
    """Return the options that the parameters of a cache of `spec` depend on."""

    def side(method: Method, codec: Codec) -> str:
        learning = codec.learning
        needed = learning.parameters(dims.num_key_value_heads) or learning.weights
        return f"{method.name}:{learning.key}" if needed else ""

    return tuple(
        (side(spec.k, plan.k), side(spec.v, plan.v)) for plan in parameter_plans(spec, dims)
    )
