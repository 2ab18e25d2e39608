"""Bodies with random codes and scales, as the kernels take them, and what they stand for."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from cpu_kernels.body import Affine, Body
from kvq_jax.arrays.packing import pack
from pallas_kernels.tiles.layout import plane_layout


@dataclasses.dataclass(frozen=True)
class Case:
    """One side of a body: bits of a code, head dim, block of tokens, what has a scale, and how many elements share it."""

    bits: int
    channels: int
    block: int
    affine: Affine
    group: int
    heads: int = 1
    scale_dtype: str = "float16"
    centre: int | None = None
    table: bool = False

    @property
    def body(self) -> Body:
        p = plane_layout(self.bits, self.channels, self.block)
        layout = p.bits, p.sets[0], p.channels, p.chunks, p.width, p.slots, p.span
        return Body(*layout, self.affine, self.group, self.heads, self.scale_dtype, self.centre, self.table)

    def random(self, batch: int, heads: int, tokens: int, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Return (the stored arrays, the vectors [B, K, S, H] that they stand for)."""
        rng = np.random.default_rng(seed)
        codes = rng.integers(0, 1 << self.bits, (batch, heads, tokens, self.channels))
        words = pack(jnp.asarray(codes), plane_layout(self.bits, self.channels, self.block))
        shape = {
            "token groups": (batch, heads, tokens // self.group, self.channels),
            "channel groups": (batch, heads // self.heads, self.channels // self.group, tokens),
            "channels": (heads, self.channels),
        }[self.affine]
        scale, zero = (jnp.asarray(rng.normal(size=shape) / (1 << self.bits), self.scale_dtype) for _ in range(2))
        levels = rng.normal(size=1 << self.bits).astype(np.float32)
        entries = levels[codes] if self.table else codes
        wide_scale, wide_zero = (self._wide(np.asarray(a, np.float64), batch) for a in (scale, zero))
        if self.centre is not None:
            wide_zero = -self.centre * wide_scale
        stored = [scale] if self.centre is not None else [scale, zero]
        bits = [np.asarray(a) if a.dtype == jnp.float32 else np.asarray(a).view(np.uint16) for a in stored]
        return [*map(np.asarray, words), *([levels] if self.table else []), *bits], entries * wide_scale + wide_zero

    def _wide(self, statistic: np.ndarray, batch: int) -> np.ndarray:
        if self.affine == "token groups":
            return np.repeat(statistic, self.group, axis=2)
        if self.affine == "channels":
            return np.repeat(statistic[None, :, None], batch, axis=0)
        return np.repeat(np.repeat(np.swapaxes(statistic, 2, 3), self.group, axis=3), self.heads, axis=1)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (m, l, o) in float64 for q [B, K, R, H], k and v [B, K, S, H], limits [B, T]."""
    rows = q.shape[2]
    seen = np.arange(k.shape[2])[None, None] < np.tile(limits, (1, rows // limits.shape[1]))[:, :, None]  # [B, R, S]
    scores = np.where(seen[:, None], np.einsum("bkrh,bksh->bkrs", q.astype(np.float64), k) * q.shape[-1] ** -0.5, -1e30)
    m = scores.max(-1, keepdims=True, initial=-1e30)
    p = np.where(seen[:, None], np.exp(scores - m), 0)
    return m, p.sum(-1, keepdims=True), np.einsum("bkrs,bksh->bkrh", p, v)
