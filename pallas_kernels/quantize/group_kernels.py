"""The kernels that quantize uniform groups, over channels and over tokens (kernel.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.quantize.rounding import (
    Job,
    Quantizer,
    cleaned,
    finite_or,
    fold,
    is_plain,
    within_limit,
)
from pallas_kernels.quantize.words import LevelWriter
from pallas_kernels.tiles.layout import SPAN

_AT_ONCE = 4  # tokens that one loop step over a group reads


def _open(refs: Sequence[Any], job: Job) -> tuple[Any, Any, Sequence[Any], Any, Any]:
    """Return (rows, divisor or None, words of each plane set, scale, zero or None)."""
    rows, *rest = refs
    divisor = rest.pop(0) if job.divided else None
    sets = len(job.reader.layout.sets)
    return (
        rows,
        divisor,
        rest[:sets],
        rest[sets],
        rest[sets + 1] if job.reader.centre is None else None,
    )


def _inverse_divisor(divisor: Any, job: Job, chunk: int) -> Array | None:
    """Return 1 / divisor of a chunk, [1, W], or None without a divisor."""
    width = job.reader.layout.width
    return None if divisor is None else 1.0 / divisor[:, pl.ds(chunk * width, width)]


def channel_kernel(*refs: Any, job: Job) -> None:
    """Quantize one span of tokens, group by group. A tile [32 / slots, W] of each chunk is loaded,
    coded and packed in registers.
    """
    # rows [32, H], divisor [1, H], words [32 / slots, tiles * W], scale and zero [H / group, 32]
    rows, divisor, word_refs, scale_ref, zero_ref = _open(refs, job)
    p = job.reader.layout
    run, per_group = SPAN // p.slots, job.reader.group // p.width

    def store(plane_set: int, tile: int, word: Array) -> None:
        word_refs[plane_set][:, pl.ds(tile * p.width, p.width)] = word

    words = LevelWriter(p, store)
    units = [(slot, group) for slot in range(p.slots) for group in range(p.chunks // per_group)]
    # In the order of tiles, so that few words are open at a time.
    for slot, group in sorted(units, key=lambda unit: p.field(unit[0], unit[1] * per_group).tile):
        chunks = range(group * per_group, (group + 1) * per_group)
        tokens = pl.ds(slot * run, run)
        tiles = []
        for c in chunks:
            x = rows[tokens, pl.ds(c * p.width, p.width)].astype(jnp.float32)
            inverse = _inverse_divisor(divisor, job, c)
            tiles.append(x if inverse is None else x * inverse)
        levels, quantizer = _code_tiles(tiles, job)
        for chunk, level in zip(chunks, levels, strict=True):
            words.add(slot, chunk, level)
        scale_ref[group, tokens] = quantizer.scale[:, 0].astype(scale_ref.dtype)
        if zero_ref is not None:
            zero_ref[group, tokens] = quantizer.zero[:, 0].astype(zero_ref.dtype)


def _code_tiles(tiles: list[Array], job: Job) -> tuple[list[Array], Quantizer]:
    """Quantize groups that run over axis 1 of the tiles side by side."""

    def reduced(operation: Any, pairwise: Any, tiles: list[Array]) -> Array:
        return operation(fold(pairwise, tiles), axis=1)[:, None]

    low, high = reduced(jnp.min, jnp.minimum, tiles), reduced(jnp.max, jnp.maximum, tiles)

    def finite() -> tuple[list[Array], Array, Array]:
        low = within_limit(
            reduced(jnp.min, jnp.minimum, [finite_or(x, jnp.inf) for x in tiles]), job.limit
        )
        high = within_limit(
            reduced(jnp.max, jnp.maximum, [finite_or(x, -jnp.inf) for x in tiles]), job.limit
        )
        return [cleaned(x, low, high) for x in tiles], low, high

    plain = is_plain(low, high, reduced(jnp.sum, jnp.add, tiles), job.limit)
    tiles, low, high = lax.cond(plain, lambda: (tiles, low, high), finite)
    schemes = job.schemes(low, high)
    levels = [[job.levels(x, quantizer) for x in tiles] for quantizer in schemes]
    if len(schemes) == 1:
        return levels[0], schemes[0]
    errors = [
        reduced(
            jnp.sum,
            jnp.add,
            [job.error(x, level, quantizer) for x, level in zip(tiles, of_scheme, strict=True)],
        )
        for of_scheme, quantizer in zip(levels, schemes, strict=True)
    ]
    choose_sym = errors[0] > errors[1]
    chosen = [jnp.where(choose_sym, sym, asym) for asym, sym in zip(*levels, strict=True)]
    return chosen, _choose(choose_sym, *schemes)


def _choose(choose_sym: Array, asym: Quantizer, sym: Quantizer) -> Quantizer:
    return Quantizer(*(jnp.where(choose_sym, s, a) for a, s in zip(asym, sym, strict=True)))


def token_kernel(*refs: Any, job: Job) -> None:
    """Quantize some groups of tokens side by side, one row [groups, W] of each at a time.

    So the range of a group is elementwise, and no lane waits for another. Scales are computed chunk
    by chunk, then codes word row by word row. The second pass reads the rows from the GPU's caches.
    """
    # rows [groups, group, H], divisor [1, H], words [groups, group / slots, tiles * W], scale and
    # zero [groups, H]
    rows, divisor, word_refs, scale_ref, zero_ref = _open(refs, job)
    p, slots, run = job.reader.layout, job.reader.layout.slots, SPAN // job.reader.layout.slots
    inverses = [_inverse_divisor(divisor, job, c) for c in range(p.chunks)]

    def load(token: Any, chunk: int) -> Array:
        x = rows[:, token, pl.ds(chunk * p.width, p.width)].astype(jnp.float32)
        inverse = inverses[chunk]
        return x if inverse is None else x * inverse

    chunks = []
    for c in range(p.chunks):
        low, high, plain = _token_range(functools.partial(load, chunk=c), job)
        quantizer = _token_quantizer(functools.partial(load, chunk=c), low, high, plain, job)
        scale_ref[:, pl.ds(c * p.width, p.width)] = quantizer.scale.astype(scale_ref.dtype)
        if zero_ref is not None:
            zero_ref[:, pl.ds(c * p.width, p.width)] = quantizer.zero.astype(zero_ref.dtype)
        chunks.append((low, high, plain, quantizer))

    def write(clean: bool) -> None:
        def word_row(row: Array, _: None) -> None:
            def store(plane_set: int, tile: int, word: Array) -> None:
                word_refs[plane_set][:, row, pl.ds(tile * p.width, p.width)] = word

            words = LevelWriter(p, store)
            within = row & (run - 1)
            first = (row - within) * slots + within
            for slot in range(slots):
                for c, (low, high, _, quantizer) in enumerate(chunks):
                    x = load(first + slot * run, c)
                    words.add(slot, c, job.levels(cleaned(x, low, high) if clean else x, quantizer))

        lax.fori_loop(0, job.reader.group // slots, word_row, None)

    plain = fold(jnp.logical_and, [plain for _, _, plain, _ in chunks])
    pl.when(plain)(lambda: write(clean=False))
    pl.when(jnp.logical_not(plain))(lambda: write(clean=True))


def _over_tokens(
    job: Job,
    step: Callable[[list[Array], Any], Any],
    load: Callable[[Any], Array],
    carry: Any,
    at_once: int,
) -> Any:
    """Carry step(rows of some tokens, carry) through all tokens of a group."""

    def body(i: Array, carry: Any) -> Any:
        return step([load(i * at_once + j) for j in range(at_once)], carry)

    return lax.fori_loop(0, job.reader.group // at_once, body, carry)


def _token_range(load: Callable[[Any], Array], job: Job) -> tuple[Array, Array, Array]:
    """Return (low, high, plain) of groups that run over tokens."""
    shape = (job.spans, job.reader.layout.width)
    start = jnp.full(shape, jnp.inf), jnp.full(shape, -jnp.inf)

    def step(tiles: list[Array], carry: Any) -> Any:
        low, high, total = carry
        return (
            fold(jnp.minimum, [low, *tiles]),
            fold(jnp.maximum, [high, *tiles]),
            fold(jnp.add, [total, *tiles]),
        )

    low, high, total = _over_tokens(job, step, load, (*start, jnp.zeros(shape)), _AT_ONCE)
    plain = is_plain(low, high, total, job.limit)

    def finite_step(tiles: list[Array], carry: Any) -> Any:
        low, high = carry
        lowest, highest = (finite_or(tiles[0], other) for other in (jnp.inf, -jnp.inf))
        return jnp.minimum(low, lowest), jnp.maximum(high, highest)

    def finite() -> tuple[Array, Array]:
        low, high = _over_tokens(job, finite_step, load, start, 1)
        return within_limit(low, job.limit), within_limit(high, job.limit)

    low, high = lax.cond(plain, lambda: (low, high), finite)
    return low, high, plain


def _token_quantizer(
    load: Callable[[Any], Array], low: Array, high: Array, plain: Array, job: Job
) -> Quantizer:
    """Return the quantizers of groups that run over tokens, chosen for each group in the hybrid
    scheme.
    """
    schemes = job.schemes(low, high)
    if len(schemes) == 1:
        return schemes[0]

    def step(tiles: list[Array], errors: Any) -> Any:
        return [
            fold(
                jnp.add,
                [error, *(job.error(x, job.levels(x, quantizer), quantizer) for x in tiles)],
            )
            for error, quantizer in zip(errors, schemes, strict=True)
        ]

    start = [jnp.zeros(low.shape)] * 2
    asym_error, sym_error = lax.cond(
        plain,
        lambda: _over_tokens(job, step, load, start, _AT_ONCE),
        lambda: _over_tokens(job, step, lambda token: cleaned(load(token), low, high), start, 1),
    )
    return _choose(asym_error > sym_error, *schemes)
