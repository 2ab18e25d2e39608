"""A method: a frozen, hashable set of options that makes a codec for each side of each layer.

A method is a frozen dataclass whose options are fields declared with `option(...)`. The spec grammar, `kvq methods` and error messages all
read these declarations; nothing else describes an option.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from kvq_jax.codecs.base import Codec, Side
from kvq_jax.types.array_types import ModelDims


@dataclasses.dataclass(frozen=True)
class PerLayer:
    """An integer that differs by layer: the first range that contains a layer gives its value, `default` that of all others.

    Written 4@0-2/2: 4 in layers 0 to 2, else 2.
    """

    ranges: tuple[tuple[int, int, int], ...]  # (value, first layer, last layer)
    default: int

    def at(self, layer: int) -> int:
        """Return the value of one layer."""
        return next((value for value, first, last in self.ranges if first <= layer <= last), self.default)

    def values(self) -> tuple[int, ...]:
        """Return every value that some layer may have, the default last."""
        return (*(value for value, _, _ in self.ranges), self.default)


def at_layer(value: int | PerLayer, layer: int) -> int:
    """Return the value of one layer, for an option that may be the same in all of them."""
    return value.at(layer) if isinstance(value, PerLayer) else value


def option(default: Any, help: str, *, choices: tuple[Any, ...] = (), per_layer: bool = False) -> Any:
    """Declare an option of a method. Its type is that of `default`; `choices` are the allowed values (any if empty).

    per_layer: its value may differ by layer (`PerLayer`).
    """
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "per_layer": per_layer})


@dataclasses.dataclass(frozen=True)
class Windows:
    """Sizes in tokens: the sink and the recent window, which stay in full precision, and the block that is quantized at once."""

    sink: int
    recent: int
    block: int


@dataclasses.dataclass(frozen=True)
class Method(abc.ABC):
    """A quantization method: it makes the codec for each side of each layer.

    A subclass lives in `kvq_jax/methods/<name>/` and has a line in the registry. name: as a spec writes it. summary, source: shown by
    `kvq methods`. The other class variables are facts about the method that hold for all of its options.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    exact: ClassVar[bool] = False  # keys and values are not quantized
    reads_queries: ClassVar[bool] = False
    keys_only: ClassVar[bool] = False  # values stay in full precision
    replaces: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # by option: the options that it overrides where it is not 0
    presets: ClassVar[Mapping[str, str]] = {}  # named options, as a spec writes them: `name:preset=...` stands for them

    def options(self) -> tuple[dataclasses.Field[Any], ...]:
        """Return the fields that a spec may set."""
        return tuple(field for field in dataclasses.fields(self) if "help" in field.metadata)

    @abc.abstractmethod
    def windows(self) -> Windows:
        """Return the default window sizes: those closest to the paper's that the one ageing rule (layer/regions.py) allows."""

    def carries_from(self) -> int | None:
        """Return the layer at which a cross-layer method starts its accumulator; None where layers are independent."""
        return None

    @abc.abstractmethod
    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        """Return the codec for one side of one layer.

        block: tokens that are quantized at once. dtype: that of rows in full precision. Raises ValueError, in one line, where the options
        do not fit the model or the block.
        """
