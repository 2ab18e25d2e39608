"""The blocks of GGUF's tensors, and tensors of 16 bits, as packed matrices, without dequantizing
them: every value is the same, bit for bit.

                codes                scales                      minima
    Q4_0        4 bits, centre 8     float16 for 32 inputs       none
    Q4_1        4 bits               float16 for 32              float16 for 32
    Q4_K        4 bits               6 bits for 32 x float16     6 bits for 32 x float16
    Q5_0, Q8_0  8 bits               float16 for 32              none
    Q5_1        8 bits               float16 for 32              float16 for 32
    Q5_K        8 bits               6 bits for 32 x float16     6 bits for 32 x float16
    Q6_K        8 bits               int8 for 16 x float16       none
    MXFP4       4 bits (E2M1)        a power of two for 32       none
    F16, BF16   the values           none                        none

The coarse float16 factors of K blocks are for 256 inputs. 5- and 6-bit codes take 8 bits here. The
codes of Hugging Face checkpoints (AWQ, GPTQ, compressed-tensors, FP8, NF4) have 4 bits and centre 8
or levels, or 8 bits; their own scales for 32 inputs, repeated if their groups are larger; and
minima that are whole numbers, centre less zero, times the scales.

Source: ggml's block structures, as the gguf library reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Int, Shaped, UInt8

from kvq_models.llama import huge_pages
from kvq_models.llama.packed_weights import PANEL, PackedMatrix
from kvq_models.llama.quantized.groups import GroupedCodes
from kvq_models.llama.stored_tensor import CheckpointError

Blocks = UInt8[np.ndarray, "O n _"]
# bits of the exponent, all ones in a number that is not finite
_EXPONENTS = {"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}
_MAX_EXPONENT = 252  # of MXFP4, whose largest number fits float32
_LOW = np.uint32(0x0F0F0F0F)  # the low 4 bits of each byte of a word


class _Entries(NamedTuple):
    """The arrays of a `PackedMatrix` by output."""

    codes: Shaped[np.ndarray, "O _"]
    scales: Shaped[np.ndarray, "O _"] | None = None
    coarse_scales: Shaped[np.ndarray, "O _"] | None = None
    mins: Shaped[np.ndarray, "O _"] | None = None
    coarse_mins: Shaped[np.ndarray, "O _"] | None = None


def is_whole(shape: tuple[int, ...], *, experts: bool) -> bool:
    """Return True if a tensor of rows [O, I], or of all experts [E, O, I], has whole groups of
    inputs, and whole panels of outputs for each expert."""
    return (
        2 <= len(shape) <= 2 + experts
        and shape[-1] % 32 == 0
        and (shape[-2] % PANEL == 0 or not experts)
    )


def packed_matrix(
    blocks: Blocks, kind: str, order: Int[np.ndarray, "O"] | None, dtype: DTypeLike
) -> tuple[PackedMatrix, bool]:
    """Return the matrix [I, O] of a tensor's rows [O, I], on the default device, and True if all
    of it is finite.

    Args:
        blocks: the bytes of the tensor's blocks, by row.
        kind: the name of its type, one of KINDS.
        order: the row of the tensor that is output o, or None if they are in order.
        dtype: of the values.
    """
    entries = KINDS[kind](blocks if order is None else blocks[order])
    return _packed(entries, 8 if kind == "Q4_0" else 0, dtype)


def matrix_of_numbers(
    rows: Shaped[np.ndarray, "O I"], dtype: DTypeLike
) -> tuple[PackedMatrix, bool]:
    """Return the matrix [I, O] of rows of bfloat16 or float16, as `packed_matrix` does."""
    return _packed(_Entries(rows), 0, dtype)


def matrix_of_codes(weights: Sequence[GroupedCodes], dtype: DTypeLike) -> tuple[PackedMatrix, bool]:
    """Return the matrix [I, O] of weights whose outputs lie behind each other, as `packed_matrix`
    does. Their groups are runs of a multiple of 32 inputs. Raises CheckpointError if the weights
    are not stored alike."""
    first = weights[0]
    kinds = {(w.bits, w.levels, w.scales.dtype, w.scales.shape[1]) for w in weights}
    if len(kinds) > 1:
        raise CheckpointError(
            "weights of one matrix have codes of different bits or scales of different types: load"
            " them with weights='dense'"
        )
    codes, scales, zeros = (
        np.ascontiguousarray(rows[0]) if len(rows) == 1 else np.concatenate(rows)
        for rows in zip(*((w.codes, w.scales, w.zeros) for w in weights), strict=True)
    )
    from_zero = codes.dtype == np.uint8 and first.levels is None
    half = 2 ** (first.bits - 1) if from_zero else 0
    mins = (half - zeros.astype(np.int32)).astype(np.int8)
    repeats = codes.shape[1] // scales.shape[1] // 32
    scales, mins = (np.repeat(rows, repeats, axis=1) for rows in (scales, mins))
    if first.bits == 4:
        low, high = np.split(codes.reshape(len(codes), -1, 32), 2, axis=2)
        codes = _rows(_words(np.ascontiguousarray(low | (high << np.uint8(4)))))
    elif from_zero:
        codes = (codes ^ np.uint8(128)).view(np.int8)
    entries = _Entries(codes, scales, mins=mins if mins.any() else None)
    return _packed(entries, half if first.bits == 4 else 0, dtype, first.levels)


def _packed(
    entries: _Entries, centre: int, dtype: DTypeLike, levels: tuple[float, ...] | None = None
) -> tuple[PackedMatrix, bool]:
    finite = all(_is_finite(rows) for rows in entries if rows is not None)
    finite = finite and all(map(math.isfinite, levels or ()))
    codes, *factors = entries
    matrix = PackedMatrix(
        _placed(codes.reshape(len(codes), -1, 4) if codes.dtype.itemsize == 1 else codes),
        *map(_placed, factors),
        outputs=len(codes),
        centre=centre,
        levels=levels,
        value_dtype=jnp.dtype(dtype).name,
    )
    return matrix, finite


def _is_finite(rows: Shaped[np.ndarray, "O _"]) -> bool:
    """Return True if codes or factors stand for finite numbers."""
    if rows.dtype == np.uint8:  # powers of two, times 12 at most
        return not rows.size or int(rows.max()) <= _MAX_EXPONENT
    if rows.dtype == jnp.float8_e4m3fn:  # which has NaN and no infinity
        return not np.any(rows.view(np.uint8) & 127 == 127)
    if rows.dtype == np.float32:
        return bool(np.isfinite(rows).all())
    exponent = _EXPONENTS.get(rows.dtype.name)
    if exponent is None:
        return True
    return bool(np.all(rows.view(np.uint16) & exponent != exponent))


def _panels_of(rows: Shaped[np.ndarray, "O n ..."]) -> Shaped[np.ndarray, "P n 32 ..."]:
    """Return the entries of outputs by panel, with zeros behind the last output."""
    outputs, whole = len(rows), len(rows) // PANEL
    shape = (-(-outputs // PANEL), rows.shape[1], PANEL, *rows.shape[2:])
    by_panel = huge_pages.empty(shape, rows.dtype)
    split = rows[: whole * PANEL].reshape(whole, PANEL, *rows.shape[1:])
    by_panel[:whole] = np.swapaxes(split, 1, 2)
    if rest := outputs % PANEL:
        by_panel[whole, :, :rest] = np.swapaxes(rows[whole * PANEL :], 0, 1)
        by_panel[whole, :, rest:] = 0
    return by_panel


def _placed(rows: Shaped[np.ndarray, "O n ..."] | None) -> Any:
    return None if rows is None else huge_pages.placed(_panels_of(rows))


def _rows(entries: Shaped[np.ndarray, "O ..."]) -> Shaped[np.ndarray, "O _"]:
    return entries.reshape(len(entries), -1)


def _halves(blocks: Blocks, at: int) -> Shaped[np.ndarray, "O n"]:
    return _rows(blocks[..., at : at + 2].view("<f2"))


def _words(blocks: Blocks) -> Shaped[np.ndarray, "O n words"]:
    return blocks.view("<u4")


def _q4_0(blocks: Blocks) -> _Entries:
    return _Entries(_rows(_words(blocks[..., 2:])), _halves(blocks, 0))


def _q4_1(blocks: Blocks) -> _Entries:
    return _Entries(_rows(_words(blocks[..., 4:])), _halves(blocks, 0), mins=_halves(blocks, 2))


def _five_bits(low: Blocks, high: Blocks) -> Shaped[np.ndarray, "O n 32"]:
    """Return the codes of blocks of 32 from the low 4 bits of all and the fifth bits of all."""
    fifth = np.unpackbits(high, axis=-1, bitorder="little") << np.uint8(4)
    return (np.concatenate([low & 15, low >> 4], axis=-1) | fifth).view(np.int8)


def _q5_0(blocks: Blocks) -> _Entries:
    codes = _five_bits(blocks[..., 6:], blocks[..., 2:6]) - np.int8(16)
    return _Entries(_rows(codes), _halves(blocks, 0))


def _q5_1(blocks: Blocks) -> _Entries:
    codes = _five_bits(blocks[..., 8:], blocks[..., 4:8])
    return _Entries(_rows(codes), _halves(blocks, 0), mins=_halves(blocks, 2))


def _q8_0(blocks: Blocks) -> _Entries:
    return _Entries(_rows(blocks[..., 2:].view(np.int8)), _halves(blocks, 0))


def _k_scales(blocks: Blocks) -> tuple[Shaped[np.ndarray, "O _"], ...]:
    """Return scales, coarse scales, minima and coarse minima of Q4_K and Q5_K, whose minima are
    subtracted in the file."""
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=-1)
    mins = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=-1)
    by_group = (_rows(entries.view(np.int8)) for entries in (scales, mins))
    return next(by_group), _halves(blocks, 0), next(by_group), -_halves(blocks, 2)


def _q4_k(blocks: Blocks) -> _Entries:
    pairs = _words(blocks[..., 16:]).reshape(*blocks.shape[:2], 4, 2, 4)  # two groups of 32 each
    left, right = pairs[..., 0, :], pairs[..., 1, :]
    lower = (left & _LOW) | ((right & _LOW) << np.uint32(4))
    upper = ((left >> np.uint32(4)) & _LOW) | (right & ~_LOW)
    return _Entries(_rows(np.stack([lower, upper], axis=-2)), *_k_scales(blocks))


def _q5_k(blocks: Blocks) -> _Entries:
    low = blocks[..., 48:].reshape(*blocks.shape[:2], 4, 1, 32)
    fours = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*blocks.shape[:2], 8, 32)
    bits = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[..., None, 16:48] >> bits) & 1
    codes = (fours | (fifth << np.uint8(4))).view(np.int8)
    return _Entries(_rows(codes), *_k_scales(blocks))


def _q6_k(blocks: Blocks) -> _Entries:
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64)
    fours = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*blocks.shape[:2], 2, 4, 32)
    bits = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    twos = (blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> bits) & 3
    codes = (fours | (twos << np.uint8(4))).view(np.int8) - np.int8(32)
    scales = _rows(blocks[..., 192:208].view(np.int8))
    return _Entries(_rows(codes), scales, _halves(blocks, 208))


def _mxfp4(blocks: Blocks) -> _Entries:
    return _Entries(_rows(_words(blocks[..., 1:])), np.ascontiguousarray(blocks[..., 0]))


def _f16(blocks: Blocks) -> _Entries:
    return _Entries(_rows(blocks.view("<f2")))


def _bf16(blocks: Blocks) -> _Entries:
    return _Entries(_rows(blocks.view(jnp.bfloat16)))


KINDS: dict[str, Callable[[Blocks], _Entries]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    "F16": _f16,
    "BF16": _bf16,
}
