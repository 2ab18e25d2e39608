"""Waterfill's codecs: rows in a calibrated order of channels, in chunks of one width each. Equations: README.md beside this file."""

from __future__ import annotations

import abc
import dataclasses
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int8, Shaped

from kvq_jax.arrays.packing import PlaneLayout, Words, pack, run_layout, unpack
from kvq_jax.arrays.stored import BodySpec, word_specs
from kvq_jax.codecs import kernel_readers, native_bodies
from kvq_jax.codecs.base import Codec, rotate_keys, side_rows
from kvq_jax.codecs.dots import weigh_rows
from kvq_jax.codecs.fitting import Rows
from kvq_jax.codecs.kernel_readers import Reader
from kvq_jax.codecs.native_bodies import Body
from kvq_jax.methods.waterfill import fit
from kvq_jax.methods.waterfill.allocation import STEPS
from kvq_jax.types.array_types import ArraySpec, Axis, CachedRows, LayerInputs, RowsBKTH, Tree
from kvq_jax.types.pytree import describe, pytree
from kvq_jax.types.rope import Rope

PER_OCTAVE = 8  # steps of the logarithmic scale in a factor of 2
LARGEST = 1e18  # its square is finite in fp32
UNCLIPPED = 5  # bits from which on no channel is clipped: there a clipped entry costs more than the longer steps (docs/decisions.md)


@pytree
@dataclasses.dataclass(frozen=True)
class WaterfillArray:
    """The words of each run of channels of one width, the widest first, and the scale of each token: int8 [B, K, S], 2^(scale / 8)."""

    words: tuple[Words, ...]
    scale: Int8[Array, "B K S"]


@dataclasses.dataclass(frozen=True)
class WaterfillCodec(Codec):
    """u = analysis of a row minus its mean, sorted by energy, each channel of variance 1;   u^ = g (code + 1/2 - 2^(b-1)) step_b.

    widths: bits of the chunks of a row's sorted channels, the widest first; those of width 0 are not stored. g: the root mean square of the
    stored channels of a token, or more where a channel of at least UNCLIPPED bits needs it for its largest code, as a power of 2^(1/8).
    step_b: the best for normal variables (allocation.STEPS).
    """

    head_dim: int
    block: int
    widths: tuple[int, ...]
    read_by_kernels: ClassVar[tuple[str, ...]]

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Return (width, channels) of the stored runs of one width."""
        chunk = self.head_dim // len(self.widths)
        return tuple((width, chunk * len(tuple(same))) for width, same in itertools.groupby(self.widths) if width)

    @property
    def stored_channels(self) -> int:
        return sum(channels for _, channels in self.runs)

    @property
    def ends(self) -> Float[np.ndarray, " stored"]:
        """Return how far the codes of each stored channel reach, where that bounds g: 2^(b-1) step_b, or infinity below UNCLIPPED bits."""
        reach = [2 ** (width - 1) * STEPS[width] if width >= UNCLIPPED else np.inf for width, _ in self.runs]
        return np.repeat(np.asarray(reach, np.float32), [channels for _, channels in self.runs])

    def layouts(self) -> tuple[PlaneLayout, ...]:
        return tuple(run_layout(width, channels, self.block) for width, channels in self.runs)

    def body(self, batch: int, heads: int, tokens: int) -> WaterfillArray:
        words = tuple(word_specs(layout, batch, heads, tokens) for layout in self.layouts())
        scale = BodySpec((Axis("batch", batch), Axis("kv_heads", heads), Axis("tokens", tokens)), "int8")
        return describe(WaterfillArray, words=words, scale=scale)

    def outlier_slots(self, heads: int) -> int:
        return 0

    def calibration_key(self) -> str:
        return "weights=fisher"  # the order and the energies of channels do not depend on their widths

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, *, prefill: bool) -> WaterfillArray:
        u = self.analysed(_given(params), rows.astype(jnp.float32))[..., : self.stored_channels]
        u = jnp.clip(jnp.where(jnp.isnan(u), 0, u), -LARGEST, LARGEST)
        size = jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(u), axis=-1)), jnp.max(jnp.abs(u) / self.ends[None, None, None], axis=-1))
        scale = jnp.clip(jnp.round(PER_OCTAVE * jnp.log2(jnp.maximum(size, 1e-30))), -128, 127).astype(jnp.int8)
        u = u / _factor(scale)
        words, start = [], 0
        for (width, channels), layout in zip(self.runs, self.layouts(), strict=True):
            middle = 2 ** (width - 1)
            codes = jnp.floor(u[..., start : start + channels] / STEPS[width]) + middle
            words.append(pack(jnp.clip(codes, 0, 2 * middle - 1).astype(jnp.uint16), layout))
            start += channels
        return WaterfillArray(tuple(words), scale)

    def levels(self, body: WaterfillArray) -> Float[Array, "B K T stored"]:
        """Return u^ / g of the stored channels."""
        parts = []
        for (width, _), layout, words in zip(self.runs, self.layouts(), body.words, strict=True):
            parts.append((unpack(words, layout).astype(jnp.float32) + (0.5 - 2 ** (width - 1))) * STEPS[width])
        return jnp.concatenate(parts, axis=-1)

    @abc.abstractmethod
    def analysed(self, params: Tree, rows: CachedRows) -> Float[Array, "B K T H"]:
        """Return rows as normalized channels, sorted by energy."""

    def kernel_reader(self) -> Reader | str:
        return kernel_readers.runs(self.layouts(), self.head_dim, pre_rope=self.before_rope)

    def native_body(self) -> Body | str:
        return native_bodies.runs(self.layouts(), self.head_dim, pre_rope=self.before_rope)

    def kernel_arrays(self, params: Tree, body: WaterfillArray) -> list[Array]:
        parameters = [_given(params)[name] for name in self.read_by_kernels]
        return [*jax.tree.leaves(body), jnp.asarray(STEPS[1:], jnp.float32), *parameters]

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"widths": "".join(map(str, self.widths))}


@dataclasses.dataclass(frozen=True)
class KeyCodec(WaterfillCodec):
    """Keys before RoPE, minus their mean, divided by the deviation of their pair.

    Parameters: mean, scale [K, H] in the model's order; place [K, H], where each channel stands among the sorted ones; energies [K, H/2].
    The mean's share of the scores is exact: `vectors` rotates whole keys.
    """

    read_by_kernels = ("place", "scale", "mean")

    def parameters(self, heads: int) -> dict[str, ArraySpec]:
        rows = Axis("kv_heads", heads), Axis("channels", self.head_dim)
        flat, pairs = ArraySpec(rows, "float32"), ArraySpec((rows[0], Axis("pairs", self.head_dim // 2)), "float32")
        return {"mean": flat, "scale": flat, "place": ArraySpec(rows, "int32"), "energies": pairs}

    def calibrate(self, rows: Rows, gradients: Rows) -> dict[str, Shaped[np.ndarray, "..."]]:
        return fit.keys(rows, gradients)

    def rows(self, params: Tree, inputs: LayerInputs) -> CachedRows:
        return side_rows(inputs, "k", pre_rope=True)

    def analysed(self, params: Tree, rows: CachedRows) -> Float[Array, "B K T H"]:
        u = (rows - params["mean"][None, :, None]) / params["scale"][None, :, None]
        return _gathered(u, jnp.argsort(params["place"], axis=-1))

    def dequantize(self, params: Tree, stats: Tree, body: WaterfillArray) -> CachedRows:
        params = _given(params)
        u = self.levels(body) * _factor(body.scale)
        u = jnp.pad(u, [(0, 0)] * 3 + [(0, self.head_dim - self.stored_channels)])
        return _gathered(u, params["place"]) * params["scale"][None, :, None] + params["mean"][None, :, None]

    def vectors(self, params: Tree, rows: CachedRows, positions: Int[Array, "#B T"], rope: Rope | None) -> RowsBKTH:
        return rotate_keys(rows, positions, rope)

    @property
    def before_rope(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class ValueCodec(WaterfillCodec):
    """Values minus their mean, in the eigenbasis in which errors of equal energy cost the loss the same.

    Parameters: mean [K, H]; analysis and synthesis [K, H, H], inverses of each other; energies [K, H]. A weighted sum is taken over
    normalized channels and meets `synthesis` once for a chunk of tokens.
    """

    read_by_kernels = ("synthesis", "mean")

    def parameters(self, heads: int) -> dict[str, ArraySpec]:
        rows = Axis("kv_heads", heads), Axis("channels", self.head_dim)
        matrix = ArraySpec((*rows, Axis("none", self.head_dim)), "float32")
        flat = ArraySpec(rows, "float32")
        return {"mean": flat, "analysis": matrix, "synthesis": matrix, "energies": flat}

    def calibrate(self, rows: Rows, gradients: Rows) -> dict[str, Shaped[np.ndarray, "..."]]:
        return fit.values(rows, gradients)

    def rows(self, params: Tree, inputs: LayerInputs) -> CachedRows:
        return side_rows(inputs, "v")

    def analysed(self, params: Tree, rows: CachedRows) -> Float[Array, "B K T H"]:
        finite = jnp.where(jnp.isfinite(rows), rows, 0)  # one entry that is not would enter every channel
        return _turned(finite - params["mean"][None, :, None], params["analysis"])

    def dequantize(self, params: Tree, stats: Tree, body: WaterfillArray) -> CachedRows:
        params = _given(params)
        turned = _turned(self.levels(body) * _factor(body.scale), params["synthesis"][:, : self.stored_channels])
        return turned + params["mean"][None, :, None]

    def weighted(
        self, params: Tree, stats: Tree, weights: Float[Array, "B K R C"], body: Tree, positions: Int[Array, "#B C"], rope: Rope | None
    ) -> Float[Array, "B K R H"]:
        params = _given(params)
        sums = weigh_rows(weights * jnp.swapaxes(_factor(body.scale), -1, -2), self.levels(body))
        mean = jnp.sum(weights, axis=-1, keepdims=True) * params["mean"][None, :, None]
        return _turned(sums, params["synthesis"][:, : self.stored_channels]) + mean


def _factor(scale: Int8[Array, "B K T"]) -> Float[Array, "B K T 1"]:
    return jnp.exp2(scale.astype(jnp.float32)[..., None] / PER_OCTAVE)


def _gathered(rows: Float[Array, "B K T H"], index: Int[Array, "K H"]) -> Float[Array, "B K T H"]:
    return jnp.take_along_axis(rows, index[None, :, None], axis=-1)


def _turned(rows: Float[Array, "B K T C"], matrices: Float[Array, "K C E"]) -> Float[Array, "B K T E"]:
    return jnp.einsum("bktc,kce->bkte", rows, matrices, preferred_element_type=jnp.float32)


def _given(params: Tree) -> Tree:
    if not params:
        raise ValueError("waterfill needs calibrated channels: kvq.prepare_layer or kvq_models.prepare attaches them")
    return params
