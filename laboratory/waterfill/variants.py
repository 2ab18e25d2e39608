"""Variants of waterfill: a basis fitted to moments, widths, and a rule for scales.

basis      mean, analysis A [H, H], synthesis A^-1, energies: channels u = (x - mean) A have
           variance 1, and a squared error d of channel i costs energy_i d
widths     as `reverse_water_filling.layer_widths` shares them out, the same for all heads
scales     one byte for each token and head, by the rule of arrays/run_array.py or another
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvq_jax.arrays.reverse_water_filling import STEPS, layer_widths
from kvq_jax.arrays.rotations import rotation
from kvq_jax.arrays.run_array import PER_OCTAVE
from kvq_jax.codecs.codec import Side
from kvq_jax.codecs.fitting import square_roots
from kvq_jax.types.array_types import PositionsBT, RowsBKTH
from kvq_jax.types.rope import Rope, rotate
from laboratory.waterfill.moments import SIDES, Moments

CHUNKS = 8
LLOYD_MOST = 4  # bits up to which levels of Lloyd and Max are tabled


class Basis(NamedTuple):
    """A basis of one side of all layers. mean, energies [L, K, H]; matrices [L, K, H, H]."""

    mean: np.ndarray
    analysis: np.ndarray
    synthesis: np.ndarray
    energies: np.ndarray


def pairs(moments: Moments) -> Basis:
    """Return waterfill's basis of keys: sorted RoPE pairs, divided by their deviation."""
    spread, slope = (
        _paired(np.diagonal(m, axis1=2, axis2=3)) for m in (moments.covariance, moments.metric)
    )
    half = spread.shape[-1]
    order = np.argsort(-spread * slope, axis=-1, kind="stable")
    columns = np.stack([order, order + half], axis=-1).reshape(*order.shape[:-1], 2 * half)
    gather = np.swapaxes(np.eye(2 * half)[columns], -1, -2)  # [.., channel, place]
    deviation = np.sqrt(np.tile(np.maximum(spread, 1e-8 * spread.max()), 2))
    energies = np.repeat(np.take_along_axis(spread * slope, order, axis=-1), 2, axis=-1)
    return Basis(
        moments.mean,
        gather / deviation[..., :, None],
        np.swapaxes(gather, -1, -2) * deviation[..., None, :],
        energies,
    )


def eigen(moments: Moments, ridge: float = 1e-3, metric_weight: float = 1.0) -> Basis:
    """Return waterfill's basis of values: the eigenbasis of M^1/2 C M^1/2.

    metric_weight: exponent of M, 1 for its own directions and 0 for a plain eigenbasis of C.
    """
    width = moments.mean.shape[-1]
    metric = moments.metric + ridge * np.trace(moments.metric, axis1=2, axis2=3)[
        ..., None, None
    ] / width * np.eye(width)
    if metric_weight == 0:
        size = np.trace(metric, axis1=2, axis2=3)[..., None, None] / width
        metric = size * np.eye(width)
    bases = [_eigen_of(c, m) for c, m in zip(moments.covariance, metric, strict=True)]
    return Basis(moments.mean, *(np.stack(field) for field in zip(*bases, strict=True)))


def _eigen_of(covariance: np.ndarray, metric: np.ndarray) -> tuple[np.ndarray, ...]:
    root, inverse = square_roots(metric)
    energies, basis = np.linalg.eigh(root @ covariance @ root)
    energies, basis = energies[:, ::-1], basis[:, :, ::-1]
    energies = np.maximum(energies, 1e-8 * energies[:, :1])
    deviation = np.sqrt(energies)
    analysis = root @ basis / deviation[:, None]
    synthesis = deviation[:, :, None] * np.swapaxes(basis, 1, 2) @ inverse
    return analysis, synthesis, energies


def rescaled(basis: Basis, moments: Moments, *, deviations: bool) -> Basis:
    """Return the basis with the means of other rows and, if `deviations`, its channels divided by
    their deviations there. Energies stay."""
    if not deviations:
        return basis._replace(mean=moments.mean)
    variance = np.einsum(
        "lkce,lkcd,lkde->lke", basis.analysis, moments.covariance, basis.analysis, optimize=True
    )
    deviation = np.sqrt(np.maximum(variance, 1e-6))
    return basis._replace(
        mean=moments.mean,
        analysis=basis.analysis / deviation[..., None, :],
        synthesis=basis.synthesis * deviation[..., :, None],
    )


def _paired(channels: np.ndarray) -> np.ndarray:
    first, second = np.split(channels, 2, axis=-1)
    return (first + second) / 2


def widths_of(
    bases: Mapping[Side, Basis],
    chunk_bits: Mapping[Side, int],
    *,
    power: float = 1.0,
    profiles: int = 4,
    minimum: int = 0,
    joint: bool = False,
) -> dict[Side, Int[np.ndarray, "L H"]]:
    """Return the widths of all layers' channels. chunk_bits: the sum of a side's digits.

    power: exponent of the energies, below 1 for widths closer to equal. least: bits that every
    chunk has, whatever its energy. joint: True if the two sides of a layer share their bits out
    together.
    """
    energies = {
        side: (basis.energies**power).reshape(*basis.energies.shape[:2], CHUNKS, -1).sum((1, 3))
        for side, basis in bases.items()
    }
    layers = [[energies[side][layer] for side in SIDES] for layer in range(len(energies["k"]))]
    budgets = [chunk_bits[side] - minimum * CHUNKS for side in SIDES]
    if joint:
        layers, budgets = [[np.concatenate(sides)] for sides in layers], [sum(budgets)]
    chosen = layer_widths(layers, budgets, profiles)
    if joint:
        chosen = [[one[:CHUNKS], one[CHUNKS:]] for (one,) in chosen]
    channels = bases["k"].mean.shape[-1] // CHUNKS
    return {
        side: np.repeat(np.array([one[i] for one in chosen]) + minimum, channels, axis=1)
        for i, side in enumerate(SIDES)
    }


def spread(basis: Basis) -> Basis:
    """Return the basis with the channels of each chunk turned among themselves by a Hadamard
    matrix: each is a mean of eight, closer to normal, whatever the widths."""
    width = basis.mean.shape[-1]
    turn = np.kron(np.eye(CHUNKS), rotation(width // CHUNKS))
    return basis._replace(
        analysis=basis.analysis @ turn.T,
        synthesis=turn @ basis.synthesis,
        energies=basis.energies @ np.square(turn.T),
    )


def turned_within_runs(basis: Basis, widths: Int[np.ndarray, "L H"]) -> Basis:
    """Return the basis with the channels of one width turned among themselves by a random rotation:
    each is a mean of all, closer to normal, and no channel alone is clipped."""
    width = basis.mean.shape[-1]
    turns = []
    for row in widths:
        turn = np.eye(width)
        for bits in np.unique(row[row > 0]):
            (places,) = np.nonzero(row == bits)
            turn[np.ix_(places, places)] = rotation(len(places))
        turns.append(turn)
    turned = np.stack(turns)[:, None]
    return basis._replace(
        analysis=basis.analysis @ turned, synthesis=np.swapaxes(turned, -1, -2) @ basis.synthesis
    )


@dataclasses.dataclass(frozen=True)
class Rule:
    """The quantizer of normalized channels.

    unclipped: from this many bits on, no channel of a token is clipped.
    lloyd: the least bits with levels of Lloyd and Max in place of equal steps, up to 4 bits; 0 for
        none.
    search: the number of scales around the root mean square, of which the one of least error is
        taken.
    block: tokens that share a scale for each channel, a byte each; 0 for none.
    """

    unclipped: int = 5
    lloyd: int = 0
    search: int = 0
    block: int = 0


@functools.cache
def lloyd_levels(bits: int) -> np.ndarray:
    """Return the 2^bits levels of least squared error for a normal variable."""
    x = np.linspace(-6, 6, 24001)
    mass = np.exp(-(x**2) / 2)
    levels = (np.arange(2**bits) + 0.5 - 2 ** (bits - 1)) * STEPS[bits]
    for _ in range(600):
        part = np.digitize(x, (levels[1:] + levels[:-1]) / 2)
        levels = np.bincount(part, x * mass) / np.bincount(part, mass)
    return levels


@functools.partial(jax.jit, static_argnames="rule")
def coded(
    rows: RowsBKTH,
    mean: Float[Array, "K H"],
    analysis: Float[Array, "K H H"],
    synthesis: Float[Array, "K H H"],
    widths: Int[Array, " H"],
    rule: Rule,
) -> RowsBKTH:
    """Return rows after quantization."""
    u = jnp.einsum("bktc,kce->bkte", rows - mean[None, :, None], analysis)
    widths = widths[None, None, None]
    shared = jnp.ones(())
    if rule.block:
        shared = _block_scales(u, rule.block)
        u = u / shared
    u_read = jnp.where(widths > 0, _read(u, widths, rule), 0) * shared
    return jnp.einsum("bktc,kce->bkte", u_read, synthesis) + mean[None, :, None]


def _block_scales(u: Array, block: int) -> Array:
    """Return a scale for each channel of a block of tokens, in steps of 2^(1/8)."""
    batch, heads, tokens, width = u.shape
    whole = tokens // block * block
    parts = u[:, :, :whole].reshape(batch, heads, whole // block, block, width)
    size = jnp.sqrt(jnp.mean(parts**2, axis=3) + 1e-12)
    size = jnp.exp2(jnp.round(PER_OCTAVE * jnp.log2(size)) / PER_OCTAVE)
    size = jnp.repeat(size, block, axis=2)
    return jnp.concatenate([size, jnp.ones((batch, heads, tokens - whole, width))], axis=2)


def _read(u: Array, widths: Array, rule: Rule) -> Array:
    """Return u as codes of one scale for each token give it back."""
    stored = widths > 0
    steps = jnp.asarray(STEPS, jnp.float32)[widths]
    half = jnp.exp2(widths.astype(jnp.float32) - 1)
    count = jnp.maximum(stored.sum(), 1).astype(jnp.float32)
    size = jnp.sqrt(jnp.sum(jnp.where(stored, u**2, 0), axis=-1, keepdims=True) / count)
    reach = jnp.where(stored & (widths >= rule.unclipped), half * steps, jnp.inf)
    size = jnp.maximum(size, jnp.max(jnp.abs(u) / reach, axis=-1, keepdims=True))
    octaves = jnp.round(PER_OCTAVE * jnp.log2(jnp.maximum(size, 1e-20)))

    def at(octaves: Array) -> Array:
        scale = jnp.exp2(octaves / PER_OCTAVE)
        return scale * _levels(u / scale, widths, steps, half, rule)

    if not rule.search:
        return at(octaves)
    best, error = at(octaves), jnp.full(octaves.shape, jnp.inf)
    for offset in range(-(rule.search // 2), rule.search // 2 + 1):
        read = at(octaves + offset)
        cost = jnp.sum(jnp.where(stored, (read - u) ** 2, 0), axis=-1, keepdims=True)
        best, error = jnp.where(cost < error, read, best), jnp.minimum(cost, error)
    return best


def _levels(u: Array, widths: Array, steps: Array, half: Array, rule: Rule) -> Array:
    safe = jnp.maximum(steps, 1e-6)
    uniform = (jnp.clip(jnp.floor(u / safe), -half, half - 1) + 0.5) * safe
    if not rule.lloyd:
        return uniform
    for bits in range(rule.lloyd, LLOYD_MOST + 1):
        levels = lloyd_levels(bits).astype(np.float32)
        read = jnp.full(u.shape, levels[0])
        for low, high in itertools.pairwise(levels):
            read = jnp.where(u > (low + high) / 2, high, read)
        uniform = jnp.where(widths == bits, read, uniform)
    return uniform


class Variant:
    """Bases, widths and a rule, as a quantizer of a simulation."""

    def __init__(
        self,
        bases: Mapping[Side, Basis],
        widths: Mapping[Side, Int[np.ndarray, "L H"]],
        rule: Rule,
    ) -> None:
        self.rule = rule
        self.arrays = {
            side: [
                (
                    *(jnp.asarray(field[layer], jnp.float32) for field in bases[side][:3]),
                    jnp.asarray(widths[side][layer], jnp.int32),
                )
                for layer in range(len(bases[side].mean))
            ]
            for side in SIDES
        }

    def __call__(
        self, layer: int, side: Side, rows: RowsBKTH, positions: PositionsBT, rope: Rope
    ) -> RowsBKTH:
        read = coded(rows, *self.arrays[side][layer], rule=self.rule)
        return _rotated(read, positions, rope) if side == "k" else read


_rotated = jax.jit(rotate)
