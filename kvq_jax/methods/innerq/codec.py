"""InnerQ's codec, and the same with the paper's storage. Equations and deviations: README.md beside
this file."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvq_jax.arrays import grouped_array, slot_array
from kvq_jax.arrays.grouped_array import GroupedArray, Scheme
from kvq_jax.arrays.packing import PlaneLayout
from kvq_jax.arrays.slot_array import SLOT_BITS, SlotArray
from kvq_jax.codecs.base import KernelJob
from kvq_jax.codecs.dots import dot_rows
from kvq_jax.codecs.grouped import GroupedCodec
from kvq_jax.codecs.kernel_readers import Reader
from kvq_jax.codecs.native_bodies import Body
from kvq_jax.types.array_types import ArraySpec, Axis, CachedRows, LayerInputs, Tree
from kvq_jax.types.rope import Rope

NORM_FLOOR = 1e-3
SCALE_BITS, MODE_BITS = 16, 1  # for a hybrid group in the paper's layout


@dataclasses.dataclass(frozen=True)
class InnerQCodec(GroupedCodec):
    """Groups over the inner dimension. With `normalize`, keys are divided by a norm of each channel
    of the prompt, and queries are multiplied by it."""

    hybrid_decode: bool = (
        True  # False: groups of generated tokens are symmetric (mode=hybrid_prefill)
    )
    normalize: bool = False

    def prompt_statistics(self, params: Tree, inputs: LayerInputs) -> Tree:
        """Return the norm of each channel, [B, K, 1, H] fp32; () without `normalize`.

            norm_h = max(1e-3, sqrt(max_t |k_th|))        over all valid, finite keys of the prompt (section 4.3)

        The norm is 1 for a row without a prompt.
        """
        if not self.normalize:
            return ()
        keys = self.rows(params, inputs).astype(jnp.float32)
        counted = inputs.valid[:, None, :, None]
        largest = jnp.max(
            jnp.where(counted & jnp.isfinite(keys), jnp.abs(keys), 0), axis=2, keepdims=True
        )
        norm = jnp.maximum(jnp.sqrt(largest), NORM_FLOOR)
        return jnp.where(jnp.any(counted, axis=2, keepdims=True), norm, 1.0)

    def statistics_spec(self, batch: int, heads: int) -> Tree:
        if not self.normalize:
            return ()
        norm = Axis("none", 1), Axis("channels", self.format.channels)
        return ArraySpec((Axis("batch", batch), Axis("kv_heads", heads), *norm), "float32")

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, *, prefill: bool) -> Tree:
        return self._encoded(
            rows.astype(jnp.float32) / stats if self.normalize else rows, self._scheme(prefill)
        )

    def kernel_job(self, stats: Tree, *, prefill: bool) -> KernelJob | None:
        return KernelJob(self.format, self._scheme(prefill), stats if self.normalize else None)

    def _scheme(self, prefill: bool) -> Scheme:
        return self.format.scheme if prefill or self.hybrid_decode else "sym"

    def dequantize(self, params: Tree, stats: Tree, body: Tree) -> CachedRows:
        rows = self._decoded(body)
        return rows * stats if self.normalize else rows

    def _encoded(self, rows: CachedRows, scheme: Scheme) -> GroupedArray | SlotArray:
        return grouped_array.quantize(rows, self.format, scheme)

    def _decoded(self, body: Tree) -> CachedRows:
        return grouped_array.dequantize(body)

    def query(self, params: Tree, stats: Tree, q: Float[Array, "B K R H"]) -> Tree:
        # q . (norm * k) = (q * norm) . k: the norm meets the query once, not every key
        return super().query(params, stats, q.astype(jnp.float32) * stats if self.normalize else q)

    def scores(
        self,
        params: Tree,
        stats: Tree,
        query: Tree,
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R C"]:
        return dot_rows(query, self._decoded(body))  # the query holds the norm already

    @property
    def normalizes_channels(self) -> bool:
        return self.normalize

    def paper_bytes(self, elements: int) -> int | None:
        """Return the bytes of the paper's hybrid groups; None for other schemes, whose layout is
        the one stored here.

        A group takes its codes at `bits` each, one 32-bit slot (signs, or an fp32 zero point), an
        fp16 scale and one bit for the mode.
        """
        if self.format.scheme != "hybrid":
            return None
        groups = elements // self.format.group_size
        return -(
            -(elements * self.format.bits + groups * (SLOT_BITS + SCALE_BITS + MODE_BITS)) // 8
        )


@dataclasses.dataclass(frozen=True)
class SlotCodec(InnerQCodec):
    """The same hybrid groups, stored as the paper stores them: signs or a zero point in one 32-bit
    slot (arrays/slot_array.py)."""

    def body(self, batch: int, heads: int, tokens: int) -> SlotArray:
        return slot_array.specs(self.format, batch, heads, tokens)

    def outlier_slots(self, heads: int) -> int:
        return 0

    def _encoded(self, rows: CachedRows, scheme: Scheme) -> SlotArray:
        return slot_array.quantize(rows, self.format, scheme)

    def _decoded(self, body: Tree) -> CachedRows:
        return slot_array.dequantize(body)

    def kernel_reader(self) -> Reader | str:
        return "storage=slot keeps signs and zero points in one word, which no kernel reads"

    def native_body(self) -> Body | str:
        return "storage=slot keeps signs and zero points in one word, which no kernel reads"

    def kernel_job(self, stats: Tree, *, prefill: bool) -> KernelJob | None:
        return None

    @property
    def code_layout(self) -> PlaneLayout:
        return slot_array.layout(self.format)

    def paper_bytes(self, elements: int) -> int | None:
        return None
