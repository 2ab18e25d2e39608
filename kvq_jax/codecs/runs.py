"""The codec of rows that are stored as normalized channels, in runs of one width each
(arrays/run_array.py)."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvq_jax.arrays import run_array
from kvq_jax.arrays.reverse_water_filling import STEPS
from kvq_jax.arrays.run_array import RunArray, RunFormat
from kvq_jax.codecs import kernel_readers, native_bodies
from kvq_jax.codecs.kernel_readers import Reader
from kvq_jax.codecs.native_bodies import Body
from kvq_jax.codecs.one_side import OneSideCodec
from kvq_jax.types.array_types import CachedRows, Tree


@dataclasses.dataclass(frozen=True)
class RunsCodec(OneSideCodec):
    """Rows are stored as u, what `analysed` makes of them, without their last channels where these
    have no bits.

    read_by_kernels: the names of the parameters that kernels read after the body and the table of
    steps, in their order.
    """

    format: RunFormat
    read_by_kernels: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def analysed(self, params: Tree, rows: CachedRows) -> Float[Array, "B K T H"]:
        """Return rows as channels of variance 1, in the order of the runs."""

    def calibration_key(self) -> str:
        return (  # neither the order of channels nor their deviations depend on widths
            "weights=fisher"
        )

    def body(self, batch: int, heads: int, tokens: int) -> RunArray:
        return run_array.specs(self.format, batch, heads, tokens)

    def outlier_slots(self, heads: int) -> int:
        return 0

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, *, prefill: bool) -> RunArray:
        u = self.analysed(calibrated(params), rows.astype(jnp.float32))
        return run_array.quantize(u[..., : self.format.stored_channels], self.format)

    def kernel_reader(self) -> Reader | str:
        return kernel_readers.runs(
            self.format.layouts, self.format.channels, pre_rope=self.pre_rope
        )

    def native_body(self) -> Body | str:
        return native_bodies.runs(self.format.layouts, self.format.channels, pre_rope=self.pre_rope)

    def kernel_arrays(self, params: Tree, body: RunArray) -> list[Array]:
        parameters = [calibrated(params)[name] for name in self.read_by_kernels]
        return [*jax.tree.leaves(body), jnp.asarray(STEPS[1:], jnp.float32), *parameters]

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"widths": "".join(map(str, self.format.widths))}


def calibrated(params: Tree) -> Tree:
    """Return the parameters as they are. Raises ValueError where there are none."""
    if not params:
        raise ValueError(
            "waterfill needs calibrated channels: kvq.prepare_layer or kvq_models.prepare attaches"
            " them"
        )
    return params
