"""A method: a frozen, hashable set of options that makes a codec for each side of each layer.

A method is a frozen dataclass whose options are fields declared with `option(...)`. The spec grammar, `kvq methods` and error messages all
read these declarations; nothing else describes an option.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from kvq_jax.array_types import ModelDims
from kvq_jax.codecs.base import Codec, Side


@dataclasses.dataclass(frozen=True)
class PerLayer:
    """An integer that differs by layer: the first range that holds a layer gives its value, `default` every other. Written 4@0-2/2."""

    ranges: tuple[tuple[int, int, int], ...]  # (value, first layer, last layer)
    default: int

    def at(self, layer: int) -> int:
        return next((value for value, first, last in self.ranges if first <= layer <= last), self.default)

    def values(self) -> tuple[int, ...]:
        return (*(value for value, _, _ in self.ranges), self.default)


def at_layer(value: int | PerLayer, layer: int) -> int:
    return value.at(layer) if isinstance(value, PerLayer) else value


def option(default: Any, help: str, *, choices: tuple[Any, ...] = (), per_layer: bool = False) -> Any:
    """Declare an option of a method: its default (whose type is the option's type), a help line, the allowed values (any if empty)."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "per_layer": per_layer})


@dataclasses.dataclass(frozen=True)
class Windows:
    """Sizes of the exact regions and of a block, in tokens."""

    sink: int
    recent: int
    block: int


@dataclasses.dataclass(frozen=True)
class Method(abc.ABC):
    """Makes the codec of each side of each layer. A subclass lives in `kvq_jax/methods/<name>/` and has a line in the registry.

    name: as a spec writes it. summary, source: for `kvq methods`. The other class variables are facts about the method that hold whatever
    its options are.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    exact: ClassVar[bool] = False  # keys and values stay as they are
    has_prompt_statistics: ClassVar[bool] = False
    reads_queries: ClassVar[bool] = False
    keys_only: ClassVar[bool] = False  # values stay exact
    replaces: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # options that do nothing beside an option that is not 0
    presets: ClassVar[Mapping[str, str]] = {}  # named options, as a spec writes them: `name:preset=...` stands for them

    def options(self) -> tuple[dataclasses.Field[Any], ...]:
        """Return the fields that a spec may set."""
        return tuple(field for field in dataclasses.fields(self) if "help" in field.metadata)

    @abc.abstractmethod
    def windows(self) -> Windows:
        """Return the default window sizes: those closest to the paper under the project's one ageing rule."""

    def carries_from(self) -> int | None:
        """Return the layer from which on every layer builds on the one below it; None where layers are independent."""
        return None

    @abc.abstractmethod
    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        """Return the codec of one side of one layer for a block of so many tokens and exact rows of `dtype`.

        Raises ValueError, in one line, where the options do not fit the model or the block."""
