"""InnerQ's options and its key codec. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvq_jax.array_types import ArraySpec, Axis, CachedRows, LayerInputs, ModelDims, Tree
from kvq_jax.arrays import grouped_array
from kvq_jax.arrays.grouped_array import GroupedArray, GroupFormat, Scheme, resolve_group
from kvq_jax.codecs.base import Codec, KernelJob, Side
from kvq_jax.codecs.dots import dot_rows
from kvq_jax.codecs.grouped import GroupedCodec
from kvq_jax.methods.base import Method, PerLayer, Windows, at_layer, option
from kvq_jax.rope import Rope

BITS = (1, 2, 3, 4, 8)
NORM_FLOOR = 1e-3
SLOT_BITS, SCALE_BITS, MODE_BITS = 32, 16, 1  # for a hybrid group in the paper's layout
Mode = Literal["sym", "asym", "hybrid", "hybrid_prefill"]


@dataclasses.dataclass(frozen=True)
class InnerQCodec(GroupedCodec):
    """Groups over the inner dimension. With `normalize`, keys are divided by a norm of each channel of the prompt, and queries are
    multiplied by it."""

    hybrid_decode: bool = True  # False: groups of generated tokens are symmetric (mode=hybrid_prefill)
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
        largest = jnp.max(jnp.where(counted & jnp.isfinite(keys), jnp.abs(keys), 0), axis=2, keepdims=True)
        norm = jnp.maximum(jnp.sqrt(largest), NORM_FLOOR)
        return jnp.where(jnp.any(counted, axis=2, keepdims=True), norm, 1.0)

    def statistics_spec(self, batch: int, heads: int) -> Tree:
        if not self.normalize:
            return ()
        norm = Axis("none", 1), Axis("channels", self.format.channels)
        return ArraySpec((Axis("batch", batch), Axis("kv_heads", heads), *norm), "float32")

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, *, prefill: bool) -> GroupedArray:
        scaled = rows.astype(jnp.float32) / stats if self.normalize else rows
        return grouped_array.quantize(scaled, self.format, self._scheme(prefill))

    def kernel_job(self, stats: Tree, *, prefill: bool) -> KernelJob | None:
        return KernelJob(self.format, self._scheme(prefill), stats if self.normalize else None)

    def _scheme(self, prefill: bool) -> Scheme:
        return self.format.scheme if prefill or self.hybrid_decode else "sym"

    def dequantize(self, params: Tree, stats: Tree, body: GroupedArray) -> CachedRows:
        rows = grouped_array.dequantize(body)
        return rows * stats if self.normalize else rows

    def query(self, params: Tree, stats: Tree, q: Float[Array, "B K R H"]) -> Tree:
        # q . (norm * k) = (q * norm) . k: the norm meets the query once, not every key
        return super().query(params, stats, q.astype(jnp.float32) * stats if self.normalize else q)

    def scores(
        self, params: Tree, stats: Tree, query: Tree, body: GroupedArray, positions: Int[Array, "#B C"], rope: Rope | None
    ) -> Float[Array, "B K R C"]:
        return dot_rows(query, grouped_array.dequantize(body))  # the query holds the norm already

    @property
    def normalizes_channels(self) -> bool:
        return self.normalize

    def paper_bytes(self, elements: int) -> int | None:
        """Return the bytes of the paper's hybrid groups; None for other schemes, whose layout is the one stored here.

        A group takes its codes at `bits` each, one 32-bit slot (signs, or an fp32 zero point), an fp16 scale and one bit for the mode.
        """
        if self.format.scheme != "hybrid":
            return None
        groups = elements // self.format.group_size
        return -(-(elements * self.format.bits + groups * (SLOT_BITS + SCALE_BITS + MODE_BITS)) // 8)


@dataclasses.dataclass(frozen=True)
class InnerQ(Method):
    """Keys per token over groups of channels, values per channel over groups of tokens. Source: Tayaranian et al., InnerQ, section 4."""

    name: ClassVar[str] = "innerq"
    summary: ClassVar[str] = "inner-dimension groups, symmetric or asymmetric by group (hybrid), keys normalized per channel"
    source: ClassVar[str] = "InnerQ (Tayaranian et al. 2026), arXiv:2602.23200"
    has_prompt_statistics: ClassVar[bool] = True
    replaces: ClassVar[Mapping[str, tuple[str, ...]]] = {"total_bits": ("bits", "k_bits", "v_bits")}

    bits: int | PerLayer = option(
        2, "magnitude bits, the paper's count: the sign of symmetric groups is extra", choices=BITS, per_layer=True
    )
    k_bits: int | PerLayer = option(0, "bits of keys, where they differ (0: bits)", choices=(0, *BITS), per_layer=True)
    v_bits: int | PerLayer = option(0, "bits of values, where they differ (0: bits)", choices=(0, *BITS), per_layer=True)
    total_bits: int = option(
        0, "bits, the sign included (0: use bits); 3 here is the paper's 2 unless mode=asym", choices=(0, 2, 3, 4, 5, 8, 9)
    )
    mode: Mode = option("hybrid", "how a group is quantized", choices=("hybrid", "sym", "asym", "hybrid_prefill"))
    group_size: int = option(0, "elements that share a scale (0: 32, or the largest divisor below)")
    normalize: bool = option(True, "divide keys by a norm of each channel of the prompt")
    scale_dtype: str = option("float16", "dtype of scales and zero points", choices=("float16", "bfloat16", "float32"))

    def windows(self) -> Windows:
        return Windows(sink=32, recent=96, block=self.group_size or 32)

    def codec(self, side: Side, layer: int, dims: ModelDims, block: int, dtype: str) -> Codec:
        own = at_layer(self.k_bits if side == "k" else self.v_bits, layer)
        bits = own or at_layer(self.bits, layer)
        if self.total_bits:
            bits = self.total_bits - (self.mode != "asym")
        scheme: Scheme = "hybrid" if self.mode == "hybrid_prefill" else self.mode
        if side == "k":
            group, axis = resolve_group(self.group_size, dims.head_dim, "head_dim"), "channels"
        else:
            group, axis = resolve_group(self.group_size, block, "the block of tokens"), "tokens"
        format = GroupFormat(bits, scheme, axis, group, dims.head_dim, block, self.scale_dtype)
        return InnerQCodec(side, format, hybrid_decode=self.mode != "hybrid_prefill", normalize=self.normalize and side == "k")
