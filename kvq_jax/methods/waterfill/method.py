"""Waterfill's options. Equations and measurements: README.md beside this file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from kvq_jax.arrays.reverse_water_filling import allocate, expected_error, layer_widths
from kvq_jax.arrays.run_array import RunFormat
from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.methods.base import Method, PerLayer, Windows, at_layer, head_dim_at, option, per_layer
from kvq_jax.methods.waterfill.codec import EigenKeyCodec, KeyCodec, RotatedValueCodec, ValueCodec
from kvq_jax.methods.waterfill.widths import (
    Parameters,
    Widths,
    chunk_energies,
    parted,
    read,
    template,
    template_chunks,
    widths_by_layer,
    written,
)
from kvq_jax.types.array_types import ModelDims


@dataclasses.dataclass(frozen=True)
class Waterfill(Method):
    """Channels in a calibrated order, with more bits for those that matter more, and one 8-bit
    scale for each token and head."""

    name: ClassVar[str] = "waterfill"
    summary: ClassVar[str] = (
        "bits shared out over calibrated channels: keys before RoPE, values in an eigenbasis (needs"
        " kvq calibrate)"
    )
    source: ClassVar[str] = "this project; reverse water-filling (Cover and Thomas, section 10.3.3)"
    presets: ClassVar[Mapping[str, str]] = {"rotated": "key_basis=eigen,value_basis=rotation"}

    bits: float = option(
        2.5,
        "stored bits of an element, scales included: layers without their own widths take a"
        " template's",
    )
    k_widths: int | PerLayer = option(
        0,
        "bits of the chunks of a head's sorted key channels, a digit for each, such as 43322110 (0:"
        " by bits)",
        per_layer=True,
    )
    v_widths: int | PerLayer = option(0, "the same for values", per_layer=True)
    key_basis: str = option(
        "pairs",
        "channels of keys: RoPE pairs, which all kernels read, or an eigenbasis, as values have; a"
        " layer's keys and values then share their bits out together",
        choices=("pairs", "eigen"),
    )

    value_basis: str = option(
        "eigen",
        "channels of values: an eigenbasis, or a fixed rotation, with equal widths, no mean and"
        " nothing calibrated; keys and values then have a budget each",
        choices=("eigen", "rotation"),
    )

    def windows(self) -> Windows:
        return Windows(sink=32, recent=96, block=32)

    def fitted(
        self, calibrated: Mapping[Side, Sequence[Mapping[str, np.ndarray]]], dims: ModelDims
    ) -> Method:
        """Return the method with widths for each layer. Each side of each layer shares out the same
        number of bits of an element by its own energies, or with an eigenbasis of keys, each layer
        does."""
        calibrated = {side: calibrated[side] for side in calibrated if self._is_calibrated(side)}
        if self.k_widths or self.v_widths or not calibrated:
            return self

        def share(
            head_dim: int, layers: list[Sequence[Parameters]], profiles: int
        ) -> list[list[Widths]]:
            count = template_chunks(head_dim)
            budgets = [sum(template(self.bits, head_dim)[side == "v"]) for side in calibrated]
            chunks = [
                [chunk_energies(parameters["energies"], count) for parameters in sides]
                for sides in layers
            ]
            if self.key_basis == "eigen":  # energies of both sides are of one channel each
                chunks, budgets = [[np.concatenate(sides)] for sides in chunks], [sum(budgets)]
            chosen = layer_widths(chunks, budgets, profiles)
            return [parted(sum(widths, ()), count) for widths in chosen]

        layers = list(zip(*calibrated.values(), strict=True))
        filled = widths_by_layer(layers, dims, share)
        if not filled:
            return self
        sides = zip(calibrated, zip(*filled, strict=True), strict=True)
        return dataclasses.replace(
            self,
            **{
                f"{side}_widths": per_layer([written(one) for one in widths])
                for side, widths in sides
            },
        )

    def predicted_divergence(
        self, calibrated: Mapping[Side, Sequence[Mapping[str, np.ndarray]]], dims: ModelDims
    ) -> float | None:
        """Return 1/2 sum E g_i^2 E (x_i - x^_i)^2 over all channels, for errors of independent
        normal channels and no token in a window. None for values in a rotation, which have no
        energies."""
        if self.value_basis == "rotation":
            return None
        total = 0.0
        for side, layers in calibrated.items():
            for layer, parameters in enumerate(layers):
                if parameters:
                    widths = self.widths(side, layer, dims)
                    energies = chunk_energies(parameters["energies"], len(widths))
                    pairs = side == "k" and self.key_basis == "pairs"
                    channels = 2 if pairs else 1  # of an energy
                    total += channels * expected_error(energies, widths) / 2
        return total

    def widths(self, side: Side, layer: int, dims: ModelDims) -> tuple[int, ...]:
        """Return the widths of the chunks of one side of one layer: its own, or the template's."""
        name, head_dim = f"{side}_widths", head_dim_at(dims, layer)
        number = at_layer(getattr(self, name), layer)
        if number:
            return read(name, number, head_dim)
        chunks = template(self.bits, head_dim)[side == "v"]
        if self._is_calibrated(side):
            return chunks
        return tuple(map(int, allocate(np.ones(len(chunks)), sum(chunks))))

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        format = RunFormat(dims.head_dim, block, self.widths(side, layer, dims))
        if side == "k" and self.key_basis == "pairs":
            return KeyCodec(format)
        if not self._is_calibrated(side):
            return RotatedValueCodec(format)
        return (EigenKeyCodec if side == "k" else ValueCodec)(format)

    def _is_calibrated(self, side: Side) -> bool:
        return side == "k" or self.value_basis == "eigen"
