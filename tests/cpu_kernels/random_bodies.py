"""Bodies with random codes and scales, as the kernels take them, and the vectors that they stand
for.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from cpu_kernels.attention import NEAR, TOGETHER
from cpu_kernels.body import RUN_WIDTHS, Affine, Body, Form
from kvq_jax.arrays.packing import run_layout
from pallas_kernels.tiles.layout import SPAN, plane_layout
from tests.float64 import rotated
from tests.pallas_kernels.codebook_sides import random_slots
from tests.pallas_kernels.compiled import pack


@dataclasses.dataclass(frozen=True)
class BodyCase:
    """One side of a body: bits of a code, head dim, block of tokens, the unit of scales, and how
    many elements share a scale. The other fields are as in `Body`.
    """

    bits: int
    channels: int
    block: int
    affine: Affine
    group: int
    heads: int = 1
    scale_dtype: str = "float16"
    centre: int | None = None
    table: bool = False
    form: Form = "codes"
    pool: int = 0
    rotated: bool = False
    angle_bits: int = 0
    residual_dtype: str = "float16"
    root: bool = False
    synthesis: bool = False
    run_channels: tuple[int, ...] = (0,) * RUN_WIDTHS

    @property
    def error(self) -> float:
        """The relative error that a kernel may have, against float64. Keys that a matrix makes of
        their channels have that of a matrix of 16 bits."""
        return 5e-5 if self.synthesis else 1e-5

    @property
    def body(self) -> Body:
        if self.form == "rows":
            return Body(
                0,
                0,
                self.channels,
                -(-self.channels // 16),
                16,
                1,
                1,
                "channels",
                1,
                scale_dtype=self.scale_dtype,
                form="rows",
            )
        if self.form == "runs":
            chunks, span = -(-self.channels // 16), math.gcd(self.block, SPAN)
            names = "rotated", "synthesis", "run_channels"
            options = {name: getattr(self, name) for name in names}
            return Body(
                0, 0, self.channels, chunks, 16, 1, span, "channels", 1, form="runs", **options
            )
        p = plane_layout(
            self.bits, self.channels // 2 if self.form == "polar" else self.channels, self.block
        )
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[3:]}
        return Body(p.bits, p.sets[0], p.channels, p.chunks, p.width, p.slots, p.span, **options)

    def random(
        self, batch: int, heads: int, tokens: int, seed: int
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Return (the stored arrays, the vectors [B, K, S, H] that they stand for)."""
        rng = np.random.default_rng(seed)
        if self.form == "rows":
            rows = jnp.asarray(
                rng.normal(size=(batch, heads, tokens, self.channels)), self.scale_dtype
            )
            return [_bits(rows)], np.asarray(rows, np.float64)
        if self.form == "polar":
            return self._polar(rng, batch, heads, tokens)
        if self.form == "runs":
            return self._runs(rng, batch, heads, tokens)
        codes = rng.integers(0, 1 << self.bits, (batch, heads, tokens, self.channels))
        words = pack(jnp.asarray(codes), plane_layout(self.bits, self.channels, self.block))
        shape = {
            "token groups": (batch, heads, tokens // self.group, self.channels),
            "channel groups": (batch, heads // self.heads, self.channels // self.group, tokens),
            "channels": (heads, self.channels),
        }[self.affine]
        scale, zero = (
            jnp.asarray(rng.normal(size=shape) / (1 << self.bits), self.scale_dtype)
            for _ in range(2)
        )
        levels = rng.normal(size=1 << self.bits).astype(np.float32)
        entries = levels[codes] if self.table else codes
        wide_scale, wide_zero = (
            self._wide(np.asarray(a, np.float64), batch) for a in (scale, zero)
        )
        if self.centre is not None:
            wide_zero = -self.centre * wide_scale
        stored = [scale] if self.centre is not None else [scale, zero]
        arrays = [*map(np.asarray, words), *([levels] if self.table else []), *map(_bits, stored)]
        vectors = np.broadcast_to(entries * wide_scale + wide_zero, codes.shape).copy()
        if self.pool:
            arrays += self._outliers(rng, vectors)
        return (
            (arrays + _turns(self.channels // 2, tokens), _rotated(vectors))
            if self.rotated
            else (arrays, vectors)
        )

    def _outliers(self, rng: np.random.Generator, vectors: np.ndarray) -> list[np.ndarray]:
        """Add residuals to some of the vectors. Return their slots, with garbage in the unused
        ones.
        """
        index, residual, ends, outliers = random_slots(rng, 3, self.pool, vectors.shape)
        vectors += outliers
        used = np.arange(index.shape[2]) < ends[:, :, -1:]
        garbage = rng.integers(0, 1 << 16, index.shape, np.uint16)
        stored = jnp.asarray(np.where(used, residual, np.nan), self.residual_dtype)
        return [np.where(used, index, garbage), _bits(stored), ends]

    def _polar(
        self, rng: np.random.Generator, batch: int, heads: int, tokens: int
    ) -> tuple[list[np.ndarray], np.ndarray]:
        pairs = self.channels // 2
        codes = rng.integers(0, 1 << self.bits, (batch, heads, tokens, pairs))
        words = pack(jnp.asarray(codes), plane_layout(self.bits, pairs, self.block))
        shape = (batch, heads, tokens // self.group, pairs)
        of_radii, of_angles = (
            (1.0 / (1 << (self.bits - self.angle_bits)), 1.0),
            (6.0 / (1 << self.angle_bits), 3.0),
        )
        stored = [
            jnp.asarray(rng.random(shape) * size, self.scale_dtype)
            for size in (*of_radii, *of_angles)
        ]
        step, minimum, angle_step, angle_minimum = (
            np.repeat(np.asarray(a, np.float64), self.group, axis=2) for a in stored
        )
        radius = (codes // (1 << self.angle_bits) + 0.5) * step + minimum
        angle = (codes % (1 << self.angle_bits) + 0.5) * angle_step + angle_minimum
        radius = radius**2 if self.root else radius
        return [*map(np.asarray, words), *map(_bits, stored)], np.concatenate(
            [radius * np.cos(angle), radius * np.sin(angle)], axis=-1
        )

    def _runs(
        self, rng: np.random.Generator, batch: int, heads: int, tokens: int
    ) -> tuple[list[np.ndarray], np.ndarray]:
        steps = ((rng.random(RUN_WIDTHS) + 0.5) / 2.0 ** np.arange(RUN_WIDTHS)).astype(np.float32)
        words, rows = [], []
        for width in range(RUN_WIDTHS, 0, -1):
            if not (channels := self.run_channels[width - 1]):
                continue
            codes = rng.integers(0, 1 << width, (batch, heads, tokens, channels))
            words += pack(jnp.asarray(codes), run_layout(width, channels, self.block))
            rows.append((codes + 0.5 - 2 ** (width - 1)) * steps[width - 1])
        exponents = rng.integers(-12, 4, (batch, heads, tokens), np.int8)
        u = np.concatenate(rows, axis=-1) * 2.0 ** (exponents[..., None] / 8)
        stored, mean = u.shape[-1], 0.5 * rng.normal(size=(heads, self.channels)).astype(np.float32)
        arrays = [*map(np.asarray, words), exponents, steps]
        half = self.channels // 2
        if not self.rotated or self.synthesis:
            synthesis = rng.normal(size=(heads, self.channels, self.channels)).astype(np.float32)
            if self.rotated:  # so that no token has all the weight
                synthesis /= np.float32(math.sqrt(self.channels))
            vectors = np.einsum("bktc,kch->bkth", u, synthesis[:, :stored]) + mean[None, :, None]
            arrays += [synthesis, mean]
            return (
                ([*arrays, *_turns(half, tokens)], _rotated(vectors))
                if self.rotated
                else (arrays, vectors)
            )
        ranks = np.stack([rng.permutation(half) for _ in range(heads)])
        place = np.concatenate([2 * ranks, 2 * ranks + 1], axis=-1).astype(np.int32)
        scale = 0.5 * rng.normal(size=(heads, self.channels)).astype(np.float32)
        whole = np.pad(u, [(0, 0)] * 3 + [(0, self.channels - stored)])
        vectors = (
            np.take_along_axis(whole, place[None, :, None], axis=-1) * scale[None, :, None]
            + mean[None, :, None]
        )
        return [*arrays, place, scale, mean, *_turns(half, tokens)], _rotated(vectors)

    def _wide(self, statistic: np.ndarray, batch: int) -> np.ndarray:
        if self.affine == "token groups":
            return np.repeat(statistic, self.group, axis=2)
        if self.affine == "channels":
            return np.repeat(statistic[None, :, None], batch, axis=0)
        return np.repeat(
            np.repeat(np.swapaxes(statistic, 2, 3), self.group, axis=3), self.heads, axis=1
        )


# The position of the first token of a body of keys before RoPE, and RoPE's attention factor.
SINK, FACTOR = (3, 1.25)


def _bits(array: jnp.ndarray) -> np.ndarray:
    """Return an array as the kernels take it: 16-bit floats as uint16."""
    return np.asarray(array) if array.dtype == jnp.float32 else np.asarray(array).view(np.uint16)


def _angles(half: int, positions: np.ndarray) -> np.ndarray:
    return positions[:, None] * 100.0 ** (-np.arange(half) / half)


def _turns(half: int, tokens: int) -> list[np.ndarray]:
    near, far = (
        np.arange(0, min(tokens, NEAR * TOGETHER), TOGETHER),
        SINK + np.arange(0, tokens, NEAR * TOGETHER),
    )
    tables = (
        (_angles(half, positions), factor)
        for positions, factor in ((np.arange(TOGETHER), FACTOR), (near, 1), (far, 1))
    )
    return [
        np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32) * np.float32(factor)
        for angles, factor in tables
    ]


def _rotated(vectors: np.ndarray) -> np.ndarray:
    positions = SINK + np.arange(vectors.shape[2])
    return rotated(vectors, _angles(vectors.shape[3] // 2, positions), FACTOR)


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, limits: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (m, l, o) in float64 for q [B, K, R, H], k and v [B, K, S, H], limits [B, T]."""
    rows = q.shape[2]
    seen = (
        np.arange(k.shape[2])[None, None]
        < np.tile(limits, (1, rows // limits.shape[1]))[:, :, None]
    )  # [B, R, S]
    scores = np.where(
        seen[:, None],
        np.einsum("bkrh,bksh->bkrs", q.astype(np.float64), k) * q.shape[-1] ** -0.5,
        -1e30,
    )
    m = scores.max(-1, keepdims=True, initial=-1e30)
    p = np.where(seen[:, None], np.exp(scores - m), 0)
    return m, p.sum(-1, keepdims=True), np.einsum("bkrs,bksh->bkrh", p, v)
