"""Check whether a cache's method allows a placement, by the axes of its arrays, and choose one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from kvq_jax.layer.plan import LayerPlan
from kvq_jax.placement.placement import WAYS, AnyMesh, Placement
from kvq_jax.types.array_types import ArraySpec


def refused(plan: LayerPlan, placement: Placement, query_heads: int) -> str | None:
    """Return, in one line, why a layer of this plan cannot have a placement, or None if it can."""
    rows, heads = placement.size("rows"), placement.size("heads")
    if rows > 1 and any("rows" in codec.facts.couples for codec in plan.codecs):
        return (
            f"rows={rows}: with these options, rows of a batch depend on each other; split heads or"
            " tokens"
        )
    if heads > 1 and (plan.heads % heads or query_heads % heads):
        return (
            f"{plan.heads} KV heads do not divide into {heads} parts: heads can be"
            f" {_divisors(plan.heads)}; tokens can be any number"
        )
    return unsplittable(plan, heads)


def unsplittable(plan: LayerPlan, heads: int) -> str | None:
    """Return, in one line, why the KV heads of a layer cannot be split into `heads` parts, or None
    if they can.

    They can be split if every array has an axis of KV heads and no two parts share an entry of it.
    """
    if heads == 1:
        return None
    for name, codec in zip(plan.names, plan.codecs, strict=True):
        if codec.facts.row_axes(plan.heads, plan.head_dim)[0].name != "kv_heads":
            return (
                f"{name}: {type(codec).__name__} caches rows that all heads share: split tokens,"
                " not heads"
            )
        if "heads" in codec.facts.couples:
            return (
                f"{name}: with these options, heads depend on each other: split tokens, not heads"
            )
        whole, part = (
            jax.tree.leaves((codec.body(1, k, plan.regions.block), codec.statistics.spec(1, k)))
            for k in (plan.heads, plan.heads // heads)
        )
        if not all(_is_share(*pair, heads) for pair in zip(whole, part, strict=True)):
            return (
                f"{name}: {type(codec).__name__} stores arrays that heads share: {heads} parts are"
                " too many; split tokens instead"
            )
    return None


def _is_share(whole: ArraySpec, part: ArraySpec, heads: int) -> bool:
    """Return True if `part`, described for 1 / heads of the KV heads, is that share of `whole`, and
    no entry is cut."""
    if "kv_heads" not in whole.names or whole.names != part.names:
        return False
    axis = whole["kv_heads"]
    at = whole.axis("kv_heads")
    expected = tuple(size // heads if i == at else size for i, size in enumerate(whole.shape))
    return axis.count // heads % axis.per == 0 and axis.size % heads == 0 and part.shape == expected


def placed(plan: LayerPlan, placement: Placement | None, query_heads: int) -> LayerPlan:
    """Return a layer's plan with its body dealt out as the placement asks. Raise ValueError, in one
    line, if the method does not allow it."""
    check_kind(placement)
    if placement is None:
        return plan
    reason = refused(plan, placement, query_heads)
    if reason:
        raise ValueError(f"placement {placement}: {reason}")
    return plan.dealt(placement.size("tokens"), placement.tokens)


def check_kind(placement: Placement | None) -> None:
    """Raise ValueError, in one line, for what is not a placement, such as a mesh."""
    if not isinstance(placement, Placement | None):
        raise ValueError(
            f"placement must be a kvq.Placement(mesh, ...) or None, got {type(placement).__name__}"
        )


def check_rows(placement: Placement | None, batch: int) -> None:
    """Raise ValueError, in one line, if a placement cannot split `batch` rows."""
    check_kind(placement)
    rows = 1 if placement is None else placement.size("rows")
    if batch % rows:
        raise ValueError(
            f"placement {placement}: {batch} rows do not divide into {rows} parts; give a batch of"
            f" {rows}, {2 * rows}, ..."
        )


def choose(plans: Sequence[LayerPlan], devices: int | Sequence[Any] | None = None) -> Placement:
    """Return the placement of one sequence over some devices: heads up to gcd(K, devices), if the
    method allows it, and tokens for the rest.

    Splitting heads costs nothing. Splitting tokens costs two small collectives in each layer.
    devices: the devices to use (default: all), or only their number, which gives an abstract mesh.
    """
    available = jax.devices() if devices is None else devices
    number = available if isinstance(available, int) else len(available)
    if number < 1:
        raise ValueError(f"a placement needs at least one device, got {number}")
    maximum = math.gcd(plans[0].heads, number)
    heads = next(
        h
        for h in range(maximum, 0, -1)
        if maximum % h == 0 and not any(unsplittable(plan, h) for plan in plans)
    )
    mesh = mesh_of({"heads": heads, "tokens": number // heads}, available)
    return Placement(mesh, heads="heads", tokens="tokens")


def mesh_of(sizes: dict[str, int], devices: int | Sequence[Any]) -> AnyMesh:
    """Return a mesh of these sizes over the first of these devices, or an abstract one."""
    types = (AxisType.Auto,) * len(sizes)
    if isinstance(devices, int):
        return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
    mesh: Mesh = jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=types,
        devices=list(devices)[: math.prod(sizes.values())],
    )
    return mesh


def parse(text: str, devices: int | Sequence[Any] | None = None) -> Placement:
    """Return the placement that a text such as "heads=4,tokens=2" describes, on a mesh of its own.

    Raise ValueError, in one line, if the text cannot be read or asks for more devices than there
    are.
    """
    available = jax.devices() if devices is None else devices
    number = available if isinstance(available, int) else len(available)
    sizes: dict[str, int] = {}
    for part in text.split(","):
        way, _, size = part.partition("=")
        if way not in WAYS or way in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"mesh {text!r}: write rows=R,heads=H,tokens=T, each once or not at all, with"
                " numbers of at least 1"
            )
        sizes[way] = int(size)
    wanted = math.prod(sizes.values())
    if wanted > number:
        hint = ""
        if not isinstance(available, int) and available[0].platform == "cpu":
            hint = (
                f" (XLA_FLAGS=--xla_force_host_platform_device_count={wanted} makes virtual ones"
                " of a CPU)"
            )
        raise ValueError(f"mesh {text!r} needs {wanted} devices, and there are {number}{hint}")
    return Placement(mesh_of(sizes, available), **{way: way for way in sizes})


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
