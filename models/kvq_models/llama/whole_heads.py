"""Convert the split of weights on a mesh to the split of a cache: queries, keys and values of whole
heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from kvq_jax.placement.placement import Placement
from kvq_models.llama.weight_axes import split_by

Rows = Float[Array, "B T _"]  # as wide as all heads together


def of_whole_heads(projected: Sequence[Rows], placement: Placement | None) -> tuple[Rows, ...]:
    """Return the outputs of q_proj, k_proj and v_proj, split as a cache's placement splits heads.

    Weights are split further, along the axes of tokens too and within heads if need be. The results
    of these shards are gathered here. Otherwise XLA gathers while heads are rotated, in many
    collectives.
    """
    whole = list(projected)
    if placement is None:
        return tuple(whole)
    for among in gathered_together(
        [rows.shape[2] for rows in projected], projected[0].dtype.itemsize, placement
    ):
        split_specs = tuple(
            PartitionSpec(placement.rows, None, split_by(projected[i].shape[2], placement))
            for i in among
        )
        heads = (placement.along("batch", "none", "heads"),) * len(among)
        gather = jax.shard_map(
            _gather(placement.tokens),
            mesh=placement.mesh,
            in_specs=split_specs,
            out_specs=heads,
            check_vma=False,
        )
        for i, rows in zip(among, gather(*(projected[i] for i in among)), strict=True):
            whole[i] = rows
    return tuple(whole)


def gathered_together(
    widths: Sequence[int], itemsize: int, placement: Placement
) -> list[list[int]]:
    """Assign the queries, keys and values of these widths to collectives.

    Each collective gathers as many as fit: it moves at most the bytes of the queries in fp32, which
    is what merging partial attention moves.
    """
    if placement.size("tokens") == 1:
        return []
    maximum = 4 * widths[0] * placement.size("heads") // itemsize
    groups: list[list[int]] = []
    for i, width in enumerate(widths):
        if not split_by(width, placement):
            continue
        if groups and sum(widths[j] for j in groups[-1]) + width <= maximum:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _gather(axis: str | None) -> Callable[..., tuple[Rows, ...]]:
    """Return the function that every shard runs."""

    def gather(*shards: Rows) -> tuple[Rows, ...]:
        # [B, T, shards, width of a shard's result]
        parts = lax.all_gather(jnp.concatenate(shards, axis=2), axis, axis=2)
        ends = np.cumsum([rows.shape[2] for rows in shards])
        return tuple(
            part.reshape(*part.shape[:2], -1) for part in jnp.split(parts, ends[:-1], axis=3)
        )

    return gather
