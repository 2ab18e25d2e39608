"""The codec of rows that are stored as normalized channels, in runs of channels of one width
(arrays/run_array.py)."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from kvq_jax.arrays import run_array
from kvq_jax.arrays.reverse_water_filling import STEPS
from kvq_jax.arrays.run_array import RunArray, RunFormat
from kvq_jax.codecs import kernel_readers, native_bodies
from kvq_jax.codecs.codec import TokensAt
from kvq_jax.codecs.facts import Facts
from kvq_jax.codecs.fitting import Rows
from kvq_jax.codecs.kernels import Kernels, table_of
from kvq_jax.codecs.learning import Learning, required
from kvq_jax.codecs.one_side import OneSideCodec
from kvq_jax.types.array_types import ArraySpec, CachedRows, Tree

FISHER = "weights=fisher"  # errors are weighed by the loss's Fisher information


@dataclasses.dataclass(frozen=True)
class RunsCodec(OneSideCodec):
    """Rows stored as the normalized channels u that `analysed` returns. The last channels are left
    out if they have no bits.

    fitted_with: the options that the calibrated arrays depend on, as text.
    unbiased: True if a token's scale makes errors orthogonal to the row.
    """

    format: RunFormat
    fitted_with: ClassVar[str] = FISHER
    unbiased: ClassVar[bool] = False

    @abc.abstractmethod
    def analysed(self, params: Tree, rows: CachedRows) -> Float[Array, "B K T H"]:
        """Return rows as channels of variance 1, in the order of the runs."""

    @abc.abstractmethod
    def parameters(self, heads: int) -> dict[str, ArraySpec]:
        """Describe the calibrated arrays."""

    @abc.abstractmethod
    def calibrate(self, rows: Rows, gradients: Rows) -> dict[str, Shaped[np.ndarray, "..."]]:
        """Fit these arrays."""

    def body(self, batch: int, heads: int, tokens: int) -> RunArray:
        return run_array.specs(self.format, batch, heads, tokens)

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> RunArray:
        u = self.analysed(params, rows.astype(jnp.float32))
        stored = u[..., : self.format.stored_channels]
        return run_array.quantize(stored, self.format, unbiased=self.unbiased)

    @property
    def facts(self) -> Facts:
        return dataclasses.replace(super().facts, requantizes="drifts")

    @property
    def learning(self) -> Learning:
        # Neither the order of the channels nor their deviations depend on widths.
        return Learning(
            self.parameters, self.calibrate, before_rope=self.pre_rope, key=self.fitted_with
        )

    @property
    def kernels(self) -> Kernels:
        layouts, channels = self.format.layouts, self.format.channels
        return Kernels(
            functools.partial(kernel_readers.runs, layouts, channels, pre_rope=self.pre_rope),
            functools.partial(native_bodies.runs, layouts, channels, pre_rope=self.pre_rope),
            self._kernel_arrays,
        )

    def _kernel_arrays(self, params: Tree, body: RunArray) -> list[Array]:
        parameters = self._kernel_parameters(calibrated(params))
        return [*jax.tree.leaves(body), table_of(STEPS[1:]), *parameters]

    def _kernel_parameters(self, params: Tree) -> list[Array]:
        """Return the arrays that kernels read after the body and the table of steps."""
        return []

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"widths": "".join(map(str, self.format.widths))}


def calibrated(params: Tree) -> Tree:
    """Return the parameters. Raise ValueError if there are none."""
    return required(params, "runs of channels need a calibration")
