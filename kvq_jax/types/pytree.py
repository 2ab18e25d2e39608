"""Register frozen dataclasses as pytrees. The runtime type checker sees their construction, but not
their rebuilding from leaves."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def pytree(cls: type[T]) -> type[T]:
    """Register a frozen dataclass as a pytree. Fields with metadata static=True are part of its
    structure.

    Unlike `jax.tree_util.register_dataclass`, rebuilding a tree does not call the constructor: the
    leaves that `jax.vmap`, `jax.tree.map` or `jax.eval_shape` insert do not always have the
    annotated types.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # a decorated class
    static = tuple(field.name for field in fields if field.metadata.get("static"))
    data = tuple(field.name for field in fields if field.name not in static)
    keys = tuple(map(jax.tree_util.GetAttrKey, data))
    leaves_of, structure_of = _getter(data), _getter(static)

    def flatten(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return leaves_of(node), structure_of(node)

    def flatten_with_keys(node: Any) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        return tuple(zip(keys, leaves_of(node), strict=True)), structure_of(node)

    def unflatten(structure: tuple[Any, ...], leaves: Any) -> T:
        return _build(cls, (*zip(data, leaves, strict=True), *zip(static, structure, strict=True)))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


def describe(cls: type[T], **fields: Any) -> T:
    """Return an instance of a pytree class that holds descriptions (shapes, dtypes, axes) in place
    of arrays.

    Raise TypeError if a field is missing or unknown.
    """
    differing = {field.name for field in dataclasses.fields(cls)} ^ set(fields)  # type: ignore[arg-type]  # a pytree class
    if differing:
        raise TypeError(
            f"{cls.__name__}: missing or unknown fields: {', '.join(sorted(differing))}"
        )
    return _build(cls, tuple(fields.items()))


def _build(cls: type[T], fields: tuple[tuple[str, Any], ...]) -> T:
    node = object.__new__(cls)
    node.__dict__.update(fields)
    return node


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function from an object to the tuple of these attributes."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda node: tuple(getattr(node, name) for name in names)
