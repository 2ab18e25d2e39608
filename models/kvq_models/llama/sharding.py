"""Weights on a mesh of devices: one rule from the names of their axes (weight_axes.py), Megatron's
layout.

    columns   q, k, v, gate, up, head, embed    each device computes its share of heads, MLP
                                                channels or the vocabulary
    rows      o, down                           and adds its share of the output: one all-reduce
                                                of [B, T, D] each
    experts   their gate, up and down           each device computes the tokens that chose its
                                                experts (experts.py): one all-reduce, too

All mesh axes except the batch axis split weights, so n devices hold 1 / n of them each. A weight
whose axis does not divide is replicated, and experts whose number does not divide are split within
each, as an MLP is. Source: Shoeybi et al., Megatron-LM, section 3.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from kvq_jax.placement.placement import AnyMesh, Placement
from kvq_jax.types.array_types import ArraySpec
from kvq_models.llama import hf_names
from kvq_models.llama.model import HiddenBTD, Llama
from kvq_models.llama.packed_weights import is_packed
from kvq_models.llama.weight_axes import split_by

# axes along which weights are split: of several that divide, the first of an array
SPLIT = ("heads", "kv_heads", "experts", "mlp", "vocab")
ROWS = "rows"  # the mesh axis of a batch, if a mesh is given without a placement


def placement_of(mesh: AnyMesh | Placement) -> Placement:
    """Return a placement. A mesh is placed by its axes' names: "rows", and any others for heads and
    tokens."""
    if isinstance(mesh, Placement):
        return mesh
    names = [name for name in mesh.axis_names if name != ROWS]
    if len(names) > 2:
        raise ValueError(
            f"the mesh has axes {mesh.axis_names}: give a kvq_jax.Placement, which says what each"
            " of them splits"
        )
    named = {way: way for way in ("rows", "heads", "tokens") if way in mesh.axis_names}
    others = [name for name in names if name not in named]
    free = [way for way in ("heads", "tokens") if way not in named]
    return Placement(mesh, **named, **dict(zip(free, others, strict=False)))


def partition(spec: ArraySpec, placement: Placement) -> PartitionSpec:
    """Return the sharding of a weight."""
    at = next(
        (
            i
            for i, axis in enumerate(spec.axes)
            if axis.name in SPLIT and split_by(axis.size, placement)
        ),
        None,
    )
    return PartitionSpec(
        *(split_by(axis.size, placement) if i == at else None for i, axis in enumerate(spec.axes))
    )


def weight_shardings(llama: Llama, placement: Placement) -> dict[str, NamedSharding]:
    """Return the sharding of every weight of a model (abstract or not) by path."""
    return {
        path: NamedSharding(placement.mesh, partition(weight.spec, placement))
        for path, weight in hf_names.weights(llama).items()
    }


def shard_nbytes(llama: Llama, placement: Placement) -> int:
    """Return the bytes of weights that each device holds. The count is exact, and an abstract model
    is enough."""
    return sum(shard_nbytes_of(llama, placement).values())


def shard_nbytes_of(llama: Llama, placement: Placement) -> dict[str, int]:
    """Return the bytes of each weight that each device holds, by path."""
    leaves = {path: weight.leaf for path, weight in hf_names.weights(llama).items()}
    shapes = {
        path: sharding.shard_shape(leaves[path].shape)
        for path, sharding in weight_shardings(llama, placement).items()
    }
    return {path: math.prod(shape) * leaves[path].dtype.itemsize for path, shape in shapes.items()}


def shard_llama(llama: Llama, mesh: AnyMesh | Placement) -> Llama:
    """Return the model with its weights on a mesh.

    Args:
        llama: the model. Parameters of cache methods go to every device.
        mesh: a mesh, or a placement that says which of its axes split rows, heads and tokens.
    """
    placement = placement_of(mesh)
    if any(map(is_packed, jax.tree.leaves(llama, is_leaf=is_packed))):
        raise ValueError("packed weights are for one device: load the model with weights='dense'")
    shardings = weight_shardings(llama, placement)
    weights = hf_names.weights(llama).items()
    moved = hf_names.replace_weights(
        llama, {path: jax.device_put(weight.leaf, shardings[path]) for path, weight in weights}
    )
    moved.cache_parameters = nnx.data(jax.device_put(llama.cache_parameters, placement.everywhere))
    return moved


def embedded(llama: Llama, tokens: Int[Array, "B T"], placement: Placement | None) -> HiddenBTD:
    """Return `llama.embed_tokens(tokens)`. If the embedding is split, each device looks up the rows
    that it holds, and the results are added.

    Otherwise XLA reads a single token by a slice, for which it gathers the whole embedding.
    """
    if placement is None:
        return llama.embed_tokens(tokens)
    axes = partition(hf_names.weights(llama)["embed"].spec, placement)[0]
    if axes is None:
        return llama.embed_tokens(tokens)

    def local_rows(embed: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> HiddenBTD:
        local = tokens - jax.lax.axis_index(axes) * embed.shape[0]
        is_local = ((local >= 0) & (local < embed.shape[0]))[..., None]
        return jax.lax.psum(
            jnp.where(is_local, embed[jnp.where(is_local[..., 0], local, 0)], 0), axes
        )

    rows = placement.along("batch", "none")
    specs = PartitionSpec(axes, None), rows
    looked_up = jax.shard_map(
        local_rows,
        mesh=placement.mesh,
        in_specs=specs,
        out_specs=placement.along("batch", "none", "model"),
        check_vma=False,
    )
    inside = (tokens >= 0) & (tokens < llama.config.vocab_size)
    return llama.scaled(jnp.where(inside[..., None], looked_up(llama.embed[...], tokens), jnp.nan))


def mesh_of_weights(llama: Llama) -> Mesh | None:
    """Return the mesh of a model's weights, or None on one device."""
    sharding = getattr(llama.embed.get_value(), "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None
