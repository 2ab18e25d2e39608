"""InnerQ's codec, and the same codec with the paper's storage. Equations and deviations: README.md
beside this file."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvq_jax.arrays import grouped_array, slot_array
from kvq_jax.arrays.grouped_array import GroupedArray, Scheme
from kvq_jax.arrays.slot_array import SLOT_BITS, SlotArray
from kvq_jax.codecs.codec import TokensAt
from kvq_jax.codecs.dots import dot_rows
from kvq_jax.codecs.facts import Facts, PaperCount
from kvq_jax.codecs.grouped import GroupedCodec
from kvq_jax.codecs.kernels import KernelJob, Kernels, unserved
from kvq_jax.codecs.prompt_statistics import Statistics
from kvq_jax.types.array_types import ArraySpec, Axis, CachedRows, LayerInputs, Tree
from kvq_jax.types.rope import Rope

NORM_FLOOR = 1e-3
SCALE_BITS, MODE_BITS = 16, 1  # for a hybrid group in the paper's layout


@dataclasses.dataclass(frozen=True)
class InnerQCodec(GroupedCodec):
    """Groups over the inner dimension. With `normalize`, keys are divided by a norm of each channel
    of the prompt, and queries are multiplied by it.

    hybrid_decode: False if groups of generated tokens are symmetric (mode=hybrid_prefill).
    """

    hybrid_decode: bool = True
    normalize: bool = False

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> Tree:
        normalized = rows.astype(jnp.float32) / stats if self.normalize else rows
        return self._encoded(normalized, self._scheme(at.prefill))

    def dequantize(self, params: Tree, stats: Tree, body: Tree) -> CachedRows:
        rows = self._decoded(body)
        return rows * stats if self.normalize else rows

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
    def statistics(self) -> Statistics:
        if not self.normalize:
            return Statistics()
        return Statistics(self._norm_spec, self._norm, widens=True)

    @property
    def facts(self) -> Facts:
        facts = super().facts
        stored_as_in_paper = self.format.scheme != "hybrid"
        paper = facts.paper if stored_as_in_paper else PaperCount(facts.paper.bits, self._bytes)
        return dataclasses.replace(facts, normalizes_channels=self.normalize, paper=paper)

    @property
    def kernels(self) -> Kernels:
        return dataclasses.replace(super().kernels, writer=self._kernel_job)

    def _norm(self, params: Tree, inputs: LayerInputs) -> Float[Array, "B K 1 H"]:
        """Return the norm of each channel, fp32.

            norm_h = max(1e-3, sqrt(max_t |k_th|))   over the valid, finite keys of the first tokens

        The norm is at least 1 for a row without a prompt. Source: section 4.3.
        """
        keys = self.rows(params, inputs).astype(jnp.float32)
        counted = inputs.valid[:, None, :, None]
        largest = jnp.max(
            jnp.where(counted & jnp.isfinite(keys), jnp.abs(keys), 0), axis=2, keepdims=True
        )
        return jnp.maximum(jnp.sqrt(largest), NORM_FLOOR)

    def _norm_spec(self, batch: int, heads: int) -> ArraySpec:
        norm = Axis("none", 1), Axis("channels", self.format.channels)
        return ArraySpec((Axis("batch", batch), Axis("kv_heads", heads), *norm), "float32")

    def _kernel_job(self, params: Tree, stats: Tree, prefill: bool) -> KernelJob:
        return KernelJob(self.format, self._scheme(prefill), stats if self.normalize else None)

    def _scheme(self, prefill: bool) -> Scheme:
        return self.format.scheme if prefill or self.hybrid_decode else "sym"

    def _encoded(self, rows: CachedRows, scheme: Scheme) -> GroupedArray | SlotArray:
        return grouped_array.quantize(rows, self.format, scheme)

    def _decoded(self, body: Tree) -> CachedRows:
        return grouped_array.dequantize(body)

    def _bytes(self, elements: int) -> int:
        """Return the bytes of the paper's hybrid groups: codes of `bits` bits, one 32-bit slot
        (signs, or an fp32 zero point), an fp16 scale and one bit for the mode."""
        groups = elements // self.format.group_size
        beside_codes = groups * (SLOT_BITS + SCALE_BITS + MODE_BITS)
        return -(-(elements * self.format.bits + beside_codes) // 8)


@dataclasses.dataclass(frozen=True)
class SlotCodec(InnerQCodec):
    """The same hybrid groups, stored as the paper stores them: signs or a zero point in one 32-bit
    slot (arrays/slot_array.py)."""

    def body(self, batch: int, heads: int, tokens: int) -> SlotArray:
        return slot_array.specs(self.format, batch, heads, tokens)

    @property
    def facts(self) -> Facts:
        facts = super().facts
        return dataclasses.replace(
            facts,
            code_layout=slot_array.layout(self.format),
            paper=dataclasses.replace(facts.paper, bytes=None),
        )

    @property
    def kernels(self) -> Kernels:
        return unserved(
            "storage=slot keeps signs and zero points in one word, which no kernel reads"
        )

    def _encoded(self, rows: CachedRows, scheme: Scheme) -> SlotArray:
        return slot_array.quantize(rows, self.format, scheme)

    def _decoded(self, body: Tree) -> CachedRows:
        return slot_array.dequantize(body)
