"""KVQuant's codec: the sources of its ranges, thresholds and codebooks.

The stored arrays are in arrays/codebook_array.py and arrays/sparse_outliers.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

from kvq_jax.arrays import codebook_array, sparse_outliers
from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.arrays.codebook_array import CodebookArray, CodebookFormat
from kvq_jax.arrays.codebooks import normal_float_levels, uniform_levels
from kvq_jax.arrays.uniform import finite_range, saturation_limit
from kvq_jax.codecs import kernel_readers, kernel_writers, kernels
from kvq_jax.codecs.codec import Side, TokensAt
from kvq_jax.codecs.facts import Facts, OutlierCounts, Outliers, PaperCount, TokenGroup
from kvq_jax.codecs.kernel_writers import KernelWriter
from kvq_jax.codecs.kernels import Kernels, unserved
from kvq_jax.codecs.learning import Learning, required
from kvq_jax.codecs.one_side import OneSideCodec
from kvq_jax.codecs.prompt_statistics import Statistics
from kvq_jax.methods.kvquant import fit
from kvq_jax.types.array_types import ArraySpec, Axis, CachedRows, LayerInputs, RowsBKTH, Tree

Datatype = Literal["nuq", "nf", "int"]
Weighting = Literal["fisher_scale", "fisher", "none"]

RANGES = ("scale", "zero", "lower", "upper")  # of a channel
# Ranges of 15 rows have three times the error of calibrated ones, ranges of 31 less.
MIN_PROMPT = 24


@dataclasses.dataclass(frozen=True)
class KVQuantCodec(OneSideCodec):
    """x^ = values[code] * scale + zero, and outliers in full precision.

    format: its `group` is None if ranges belong to channels (calibrated, so known before a token
        arrives), and spans the whole KV width if they belong to tokens.
    per_side: the outliers among a token's largest entries, and among its smallest, for thresholds
        of tokens.
    outliers: the fraction of outliers. It is 0 if each token has its own thresholds and the option,
        then `unmet_outliers`, is less than one of its entries.
    online: ranges and thresholds of channels are taken from each sequence's prompt. The calibrated
        ones serve in their place if there was no prompt, and in channels that are constant in it.

    Parameters, by name:

        levels [2^bits]       the codebook that codes are chosen from (datatype nuq)
        qnorm [2]             with the option `qnorm`, values = qnorm[0] * levels + qnorm[1]
                              (without it, values = levels)
        scale, zero [K, H]    half a channel's range, and its middle (ranges of channels)
        lower, upper          thresholds of outliers: [K, H] (ranges of channels), or [] (ranges of
                              tokens, thresholds of the whole layer)
    """

    side: Side
    format: CodebookFormat
    datatype: Datatype
    weighting: Weighting
    outliers: float
    per_side: int
    per_matrix: bool
    qnorm: bool
    pre_rope: bool
    online: bool = False
    unmet_outliers: float | None = None

    @property
    def per_channel(self) -> bool:
        return self.format.group is None

    def body(self, batch: int, heads: int, tokens: int) -> CodebookArray:
        return codebook_array.specs(self.format, batch, heads, tokens)

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> CodebookArray:
        rows = rows.astype(jnp.float32)
        if self.per_channel:
            clean, scale, zero, exact = self._by_channel(params, stats, rows)
        else:
            clean, scale, zero, exact = self._by_token(params, rows)
        return codebook_array.quantize(
            clean, self.format, self._levels(params), self._values(params), scale, zero, exact
        )

    def dequantize(self, params: Tree, stats: Tree, body: CodebookArray) -> CachedRows:
        if not self.per_channel:
            return codebook_array.dequantize(body, self._values(params))
        scale, zero, *_ = self._ranges(params, stats)
        return codebook_array.dequantize(body, self._values(params), scale, zero)

    @property
    def statistics(self) -> Statistics:
        if not self.online:
            return Statistics()
        return Statistics(self._prompt_ranges_spec, self._prompt_ranges, unprompted=0.0)

    @property
    def facts(self) -> Facts:
        pool = self.format.pool
        return dataclasses.replace(
            super().facts,
            code_layout=self.format.layout,
            channel_group_bits=None if self.per_channel else self.format.bits,
            token_group=TokenGroup(self.format.bits, math.inf) if self.per_channel else None,
            requantizes="drifts" if self.datatype == "nuq" and not self.per_channel else "exact",
            outliers=pool and Outliers(lambda heads: pool.slots / pool.tokens, _counts),
            unmet=self._unmet,
            paper=PaperCount(bits=self._paper_bits),
        )

    @property
    def kernels(self) -> Kernels:
        if self.online:
            return unserved(
                "each sequence has its own ranges of channels; kernels read those of a calibration"
            )
        return kernels.of_codebook(
            self.format, self._kernel_arrays, self._kernel_writer, pre_rope=self.pre_rope
        )

    @property
    def learning(self) -> Learning:
        # Kernels rotate such keys, and scale their rows in this dtype first.
        narrow = self.per_channel and self.pre_rope and not self.online
        names = ("scale", "zero") if narrow else ()
        return Learning(
            self._parameters,
            self._calibrate,
            before_rope=self.pre_rope,
            narrowed=tuple((name, kernel_readers.SCALE_DTYPE) for name in names),
            key=self._key(),
        )

    def _parameters(self, heads: int) -> dict[str, ArraySpec]:
        axes: dict[str, tuple[Axis, ...]] = {}
        if self.datatype == "nuq":
            axes |= {"levels": (Axis("none", 2**self.format.bits),), "qnorm": (Axis("none", 2),)}
        if self.per_channel:
            axes |= dict.fromkeys(
                RANGES, (Axis("kv_heads", heads), Axis("channels", self.format.channels))
            )
        elif self.per_matrix and self.format.pool:
            axes |= {"lower": (), "upper": ()}
        return {name: ArraySpec(array_axes, "float32") for name, array_axes in axes.items()}

    def _key(self) -> str:
        ranges = "channel" if self.per_channel else "token"
        thresholds = "matrix" if self.per_matrix else "vector"
        options = [
            f"bits={self.format.bits}",
            f"outliers={self.outliers:g}",
            f"datatype={self.datatype}",
            f"ranges={ranges}",
        ]
        options += [f"weighting={self.weighting}", f"thresholds={thresholds}"]
        return ",".join(
            options + ([f"pre_rope={str(self.pre_rope).lower()}"] if self.side == "k" else [])
        )

    def _calibrate(
        self, rows: Float[np.ndarray, "tokens K H"], gradients: Float[np.ndarray, "tokens K H"]
    ) -> dict[str, Shaped[np.ndarray, "..."]]:
        fitted = fit.parameters(
            rows,
            gradients,
            levels=2**self.format.bits if self.datatype == "nuq" else None,
            per_channel=self.per_channel,
            per_matrix=self.per_matrix,
            outliers=self.outliers,
            per_side=self.per_side,
            weighting=self.weighting,
        )
        return {name: fitted[name] for name in self._parameters(rows.shape[1])}

    def _prompt_ranges(self, params: Tree, inputs: LayerInputs) -> Float[Array, "B K 4 H"]:
        """Return scale, zero, lower and upper of each channel, fp32, as a calibration on the
        prompt alone would find them.

            lower, upper = the linearly interpolated quantiles f/2 and 1 - f/2 over the prompt's
                           valid, finite rows but the first
            scale, zero  = half the range and the middle of the rows within them

        The first token is left out because models use it as an attention sink, whose keys are
        unlike the others (the paper's section 3.5). All four are 0, for the calibrated ranges, if
        fewer than MIN_PROMPT rows of a channel count.
        Source: Hooper et al., KVQuant, Table 14 (online).
        """
        rows = self.rows(params, inputs).astype(jnp.float32)
        counted = (inputs.valid & (inputs.positions > 0))[:, None, :, None] & jnp.isfinite(rows)
        lower, upper = _quantiles(rows, counted, self.outliers / 2)
        kept = counted & (rows >= lower) & (rows <= upper)
        low = jnp.min(jnp.where(kept, rows, jnp.inf), axis=2, keepdims=True)
        high = jnp.max(jnp.where(kept, rows, -jnp.inf), axis=2, keepdims=True)
        ranges = jnp.concatenate([(high - low) / 2, (high + low) / 2, lower, upper], axis=2)
        enough = jnp.sum(counted, axis=2, keepdims=True) >= MIN_PROMPT
        return jnp.where(enough & jnp.any(kept, axis=2, keepdims=True), ranges, 0)

    def _prompt_ranges_spec(self, batch: int, heads: int) -> ArraySpec:
        axes = (
            Axis("batch", batch),
            Axis("kv_heads", heads),
            Axis("none", len(RANGES)),
            Axis("channels", self.format.channels),
        )
        return ArraySpec(axes, "float32")

    def _unmet(self, heads: int) -> str | None:
        if self.unmet_outliers is None:
            return None
        width, rows = heads * self.format.channels, {"k": "keys", "v": "values"}[self.side]
        minimum = sparse_outliers.smallest_fraction(width)
        return (
            f"{rows} have no outliers in full precision: outliers={self.unmet_outliers:g} is less"
            f" than one of a token's {width} entries; from outliers={minimum:g} on they do"
        )

    def _kernel_arrays(self, params: Tree, body: CodebookArray) -> list[Any]:
        affine = [params["scale"], params["zero"]] if self.per_channel else [body.scale, body.zero]
        outliers = body.outliers
        sparse = [] if outliers is None else [outliers.index, outliers.residual, outliers.ends]
        return [*body.words, self._values(params), *affine, *sparse]

    def _kernel_writer(self, params: Tree, stats: Tree, prefill: bool) -> KernelWriter:
        fixed = self.per_channel or self.per_matrix  # thresholds
        return kernel_writers.table(
            self.format,
            self._levels(params),
            self._values(params),
            of_channels=[params["scale"], params["zero"]] if self.per_channel else [],
            thresholds=[params["lower"], params["upper"]] if fixed and self.format.pool else [],
            per_side=self.per_side,
        )

    def _paper_bits(self, width: int, context: int, pointers: bool) -> float:
        """Return b + 32 / width (ranges of tokens) or b + 32 / context (of channels), plus 32 *
        fraction for outliers and half a pointer.

        Source: Hooper et al., KVQuant, Appendix M.
        """
        pointer = 32 / width / 2 if pointers and self.outliers else 0
        ranges = 32 / (context if self.per_channel else width)
        return self.format.bits + ranges + 32 * self.outliers + pointer

    def _by_channel(
        self, params: Tree, stats: Tree, rows: RowsBKTH
    ) -> tuple[RowsBKTH, Array, Array, Bool[Array, "B K T H"]]:
        """Return (finite rows, scale, zero, mask of outliers) for ranges of channels."""
        scale, zero, lower, upper = self._ranges(params, stats)
        low, high = zero - scale, zero + scale
        clean = jnp.where(
            jnp.isfinite(rows),
            rows,
            jnp.where(jnp.isnan(rows), jnp.clip(0, low, high), jnp.where(rows > 0, high, low)),
        )
        return clean, scale, zero, (clean < lower) | (clean > upper)

    def _by_token(
        self, params: Tree, rows: RowsBKTH
    ) -> tuple[RowsBKTH, Array, Array, Bool[Array, "B K T H"] | None]:
        """Return the same for ranges of tokens, from the smallest to the largest entry that is not
        an outlier."""
        group, dtype = self.format.group, self.format.scale_dtype
        assert group is not None, "ranges of tokens have a group"
        cut, low, high = finite_range(group.cut(rows), ChannelGroup.AXES, saturation_limit(dtype))
        clean, exact = cut.reshape(rows.shape), None
        if self.format.pool:
            if self.per_matrix:
                bounds = tuple(
                    self._parameter(params, name).reshape(1, 1, 1, 1) for name in ("lower", "upper")
                )
            else:
                bounds = _innermost(clean, self.per_side)
            exact = (clean < bounds[0]) | (clean > bounds[1])
            kept_low, kept_high = (jnp.where(exact, limit, clean) for limit in (jnp.inf, -jnp.inf))
            low = jnp.min(group.cut(kept_low), ChannelGroup.AXES, keepdims=True)
            high = jnp.max(group.cut(kept_high), ChannelGroup.AXES, keepdims=True)
            low, high = (jnp.where(jnp.isfinite(bound), bound, 0) for bound in (low, high))
        scale, zero = codebook_array.half_range(group.stored(low), group.stored(high), dtype)
        return clean, scale, zero, exact

    def _levels(self, params: Tree) -> Float[Array, " entries"]:
        if self.datatype == "nuq":
            return self._parameter(params, "levels")
        fixed = normal_float_levels if self.datatype == "nf" else uniform_levels
        return jnp.asarray(fixed(self.format.bits), jnp.float32)

    def _values(self, params: Tree) -> Float[Array, " entries"]:
        levels = self._levels(params)
        if not self.qnorm:
            return levels
        stretch, shift = self._parameter(params, "qnorm")
        return levels * stretch + shift

    def _ranges(self, params: Tree, stats: Tree) -> list[Float[Array, "#B K 1 H"]]:
        """Return scale, zero, lower and upper of channels."""
        calibrated = [self._parameter(params, name)[None, :, None] for name in RANGES]
        if not self.online:
            return calibrated
        of_prompt = jnp.split(stats, len(RANGES), axis=2)
        return [
            jnp.where(of_prompt[0] > 0, prompt_range, calibrated_range)
            for prompt_range, calibrated_range in zip(of_prompt, calibrated, strict=True)
        ]

    def _parameter(self, params: Tree, name: str) -> Array:
        return required(params, f"kvquant needs calibrated {name} of {self.side}")[name]


def _counts(body: CodebookArray) -> OutlierCounts:
    assert body.outliers is not None, "a format with slots stores outliers"
    return OutlierCounts(*sparse_outliers.counts(body.outliers))


def _quantiles(
    rows: RowsBKTH, counted: Bool[Array, "B K T H"], order: float
) -> list[Float[Array, "B K 1 H"]]:
    """Return the linearly interpolated quantiles `order` and 1 - order of each channel's counted
    rows, as np.quantile does."""
    ordered = jnp.sort(jnp.where(counted, rows, jnp.inf), axis=2)
    last = jnp.maximum(jnp.sum(counted, axis=2, keepdims=True, dtype=jnp.int32) - 1, 0)
    quantiles = []
    for at in (order * last.astype(jnp.float32), (1 - order) * last.astype(jnp.float32)):
        below = jnp.floor(at)
        a, b = (
            jnp.take_along_axis(ordered, jnp.minimum(below.astype(jnp.int32) + i, last), axis=2)
            for i in (0, 1)
        )
        quantiles.append(jnp.where(at > below, a + (b - a) * (at - below), a))
    return quantiles


def _innermost(rows: RowsBKTH, beyond: int) -> tuple[Array, Array]:
    """Return (low, high), [B, 1, T, 1]. In each token's KV width, `beyond` entries lie below low
    and as many above high."""
    batch, _, tokens, _ = rows.shape
    flat = jnp.swapaxes(rows, 1, 2).reshape(batch, tokens, -1)
    ordered = (lax.top_k(sign * flat, beyond + 1) for sign in (1, -1))
    # XLA of JAX 0.10 would sort all entries of a row on a CPU, to take one
    high, low = (lax.optimization_barrier(values)[..., -1] for values, _ in ordered)
    return -low[:, None, :, None], high[:, None, :, None]
