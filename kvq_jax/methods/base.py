"""A method: a frozen, hashable set of options that makes a codec for each side of each layer.

A method is a frozen dataclass whose options are fields declared with `option(...)`. The spec
grammar, `kvq methods` and error messages all read these declarations. Nothing else describes an
option.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.codecs.rotating import rotated
from kvq_jax.types.array_types import ModelDims

# options of every cache, which no method may name
CACHE_OPTIONS = ("sink", "recent", "block", "skip_layers", "subtract_bias")


@dataclasses.dataclass(frozen=True)
class PerLayer:
    """An integer that differs by layer. The first range that contains a layer gives its value,
    `default` the value of all others.

    Written 4@0-2/2: 4 in layers 0 to 2, else 2.
    """

    ranges: tuple[tuple[int, int, int], ...]  # (value, first layer, last layer)
    default: int

    def at(self, layer: int) -> int:
        """Return the value of one layer."""
        return next(
            (value for value, first, last in self.ranges if first <= layer <= last), self.default
        )

    def values(self) -> tuple[int, ...]:
        """Return every value that some layer may have, the default last."""
        return (*(value for value, _, _ in self.ranges), self.default)


def per_layer(values: Sequence[int]) -> int | PerLayer:
    """Return the option that has these values in layers 0, 1, ...: the most frequent one is the
    default."""
    default = max(values, key=lambda value: (values.count(value), -values.index(value)))
    starts = [at for at in range(len(values)) if at == 0 or values[at] != values[at - 1]]
    runs = zip(starts, [*(start - 1 for start in starts[1:]), len(values) - 1], strict=True)
    ranges = tuple((values[first], first, last) for first, last in runs if values[first] != default)
    return PerLayer(ranges, default) if ranges else default


def at_layer(value: int | PerLayer, layer: int) -> int:
    """Return the value of one layer, for an option that may be the same in all of them."""
    return value.at(layer) if isinstance(value, PerLayer) else value


def head_dim_at(dims: ModelDims, layer: int) -> int:
    """Return the head dim of one layer, which `CacheDims.layer_heads` may set."""
    heads = getattr(dims, "layer_heads", ())
    return heads[layer].head_dim if heads else dims.head_dim


def option(
    default: Any, help: str, *, choices: tuple[Any, ...] = (), per_layer: bool = False
) -> Any:
    """Declare an option of a method.

    Args:
        default: the default value. Its type is the option's.
        help: shown by `kvq methods`.
        choices: the allowed values, any if empty.
        per_layer: True if the value may differ by layer (`PerLayer`).
    """
    return dataclasses.field(
        default=default, metadata={"help": help, "choices": choices, "per_layer": per_layer}
    )


def scale_dtype_option(of: str = "scales and zero points") -> Any:
    """Declare the dtype of what a method stores beside its codes."""
    return option("float16", f"dtype of {of}", choices=("float16", "bfloat16", "float32"))


def shared_option(help: str, *, wrap: Callable[[Codec, Any], Codec]) -> dict[str, Any]:
    """Return the metadata of an option of every method that does not decline it.

    wrap: (codec, value) -> the codec with the option's effect. It is called for every value.
    """
    return {"help": help, "choices": (), "per_layer": False, "wrap": wrap}


@dataclasses.dataclass(frozen=True)
class Windows:
    """Sizes in tokens: the sink and the recent window, which stay in full precision, and the block
    that is quantized at once."""

    sink: int
    recent: int
    block: int


@dataclasses.dataclass(frozen=True)
class Method(abc.ABC):
    """A quantization method: it makes the codec for each side of each layer.

    A subclass lives in `kvq_jax/methods/<name>/` and has a line in the registry. `name` is the name
    that a spec writes. `kvq methods` shows `summary` and `source`. The other class variables are
    facts about the method that hold for all of its options. A `shared_option` below is an option of
    every method that does not decline it.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    exact: ClassVar[bool] = False  # keys and values are not quantized
    reads_queries: ClassVar[bool] = False
    keys_only: ClassVar[bool] = False  # values stay in full precision
    declines: ClassVar[frozenset[str]] = frozenset()  # shared options that it does not take
    # by option: the options that it overrides if it is not 0
    replaces: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # named options, as a spec writes them: `name:preset=...` stands for them
    presets: ClassVar[Mapping[str, str]] = {}

    rotate: bool = dataclasses.field(
        default=False,
        kw_only=True,
        metadata=shared_option(
            "quantize keys and values rotated by a Hadamard matrix, which spreads large channels"
            " over all",
            wrap=lambda codec, rotate: rotated(codec) if rotate else codec,
        ),
    )

    def options(self) -> tuple[dataclasses.Field[Any], ...]:
        """Return the fields that a spec may set, the shared ones last."""
        fields = (field for field in dataclasses.fields(self) if "help" in field.metadata)
        taken = (field for field in fields if field.name not in self.declines)
        return tuple(sorted(taken, key=lambda field: "wrap" in field.metadata))

    @abc.abstractmethod
    def windows(self) -> Windows:
        """Return the default window sizes, the closest to the paper's that the one ageing rule
        (layer/regions.py) allows."""

    def carries_from(self) -> int | None:
        """Return the layer at which a cross-layer method starts its accumulator, or None if layers
        are independent."""
        return None

    def fitted(
        self, calibrated: Mapping[Side, Sequence[Mapping[str, np.ndarray]]], dims: ModelDims
    ) -> Method:
        """Return the method with the options that a calibration decides, if the spec leaves them
        open. By default there are none.

        calibrated: the parameters of every layer, for the sides that this method serves. Empty for
            layers that have none.
        """
        return self

    def predicted_divergence(
        self, calibrated: Mapping[Side, Sequence[Mapping[str, np.ndarray]]], dims: ModelDims
    ) -> float | None:
        """Return the KL divergence in nats per token that a calibration predicts.

        It is to second order in the errors of rows, with gradients of the sum of the losses. None
        for methods whose calibration does not predict it. calibrated: as in `fitted`.
        """
        return None

    def resolved(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        """Return the codec for one side of one layer, with the shared options."""
        codec = self.codec(side, layer, dims, block, dtype)
        for field in dataclasses.fields(self):
            if wrap := field.metadata.get("wrap"):
                codec = wrap(codec, getattr(self, field.name))
        return codec

    @abc.abstractmethod
    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        """Return the method's own codec for one side of one layer.

        Args:
            side: "k" or "v".
            layer: the layer's index.
            dims: the model's dimensions.
            block: tokens that are quantized at once.
            dtype: the dtype of rows in full precision.

        Raises ValueError, in one line, if the options do not fit the model or the block.
        """
