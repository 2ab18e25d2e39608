"""The table of formats that decode-attention kernels are tested with."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from kvq_jax.arrays.polar_array import PolarFormat
from pallas_kernels.decode_attention.tuning import tuning_for
from tests.pallas_kernels.codebook_sides import codebook_side
from tests.pallas_kernels.grouped_sides import format_of, grouped_side, reader_of
from tests.pallas_kernels.harness import KernelCase, Lengths, tuned
from tests.pallas_kernels.polar_sides import polar_reader, polar_side
from tests.pallas_kernels.rotated_sides import before_rope
from tests.pallas_kernels.run_sides import run_side


def innerq(bits: int, scheme: str, head_dim: int, group: int = 4) -> KernelCase:
    k, v = (grouped_side(format_of(bits, scheme, a, head_dim)) for a in ("channels", "tokens"))
    return KernelCase(f"innerq{bits}_{scheme}_h{head_dim}_g{group}", k, v, head_dim, group)


def kivi(bits: int, head_dim: int, group: int = 4, size: int = 32) -> KernelCase:
    k = grouped_side(format_of(bits, "asym", "tokens", head_dim, size))
    v = grouped_side(format_of(bits, "asym", "channels", head_dim, 32))
    return KernelCase(f"kivi{bits}_h{head_dim}_g{group}_size{size}", k, v, head_dim, group)


# bits are magnitude bits: symmetric and hybrid codes have one more
GROUPED = (
    innerq(1, "sym", 128),
    innerq(2, "hybrid", 128, 1),
    innerq(2, "asym", 64, 7),
    innerq(2, "sym", 64),
    innerq(3, "sym", 256, 8),
    innerq(4, "hybrid", 64, 4),
    innerq(8, "asym", 128),
    kivi(2, 128),
    kivi(2, 64, 8, 64),
    kivi(3, 64, 1),
    kivi(4, 128, 7),
    kivi(8, 64, 16),
    KernelCase(
        "k3_v4",
        grouped_side(format_of(3, "asym", "channels", 64, 16, "bfloat16")),
        grouped_side(format_of(4, "asym", "channels", 64, 64, "float32")),
        64,
    ),
    KernelCase("dense", grouped_side(None), grouped_side(None), 64, 4),
    KernelCase(
        "k_dense_v2", grouped_side(None), grouped_side(format_of(2, "asym", "tokens", 128)), 128, 1
    ),
)


def codebook(id: str, keys: Any, values: Any, head_dim: int, group: int) -> KernelCase:
    return KernelCase(
        id,
        keys,
        values,
        head_dim,
        group,
        short=Lengths(160, (0, 1, 63, 64, 65, 129, 160)),
        long=Lengths(608, (0, 1, 63, 64, 129, 577, 608)),
        tuning=tuned(2, 64),
        tolerance=5e-3,
        margin=5,
        # in fp16 NaN, infinity, and the largest number, of which two are infinite
        garbage=(0x7FFF, 0x7C00, 0x7BFF),
        span=32,
    )


CODEBOOK = (
    codebook(
        "nuq3_1percent_before_rope",
        codebook_side(3, "channels", 4, pre_rope=True),
        codebook_side(3, "token", 4),
        128,
        1,
    ),
    codebook("nuq4_after_rope", codebook_side(4, "channels", 2), codebook_side(4, 32), 64, 7),
    codebook(
        "nuq2_groups_before_rope",
        codebook_side(2, 64, pre_rope=True),
        codebook_side(2, "channels", 3),
        128,
        8,
    ),
    codebook(
        "nuq4_h256",
        codebook_side(4, "channels", pre_rope=True),
        codebook_side(3, "token", 6),
        256,
        4,
    ),
    codebook(
        "nuq2_h64_slots",
        codebook_side(2, "channels", 9, pre_rope=True),
        codebook_side(2, "token", 9),
        64,
        4,
    ),
)


def looked_up(bits: int, scales: Any, head_dim: int, group: int = 4) -> KernelCase:
    """Return tables with scales of tokens on both sides."""
    side = codebook_side(bits, scales)
    return codebook(f"table{bits}_{scales}_h{head_dim}_g{group}", side, side, head_dim, group)


def turned(case: KernelCase) -> KernelCase:
    """Return the case with its keys before RoPE."""
    return dataclasses.replace(case, id=f"{case.id}_turned", keys=before_rope(case.keys))


def rows(head_dim: int, group: int) -> KernelCase:
    side = grouped_side(None)
    return KernelCase(f"rows_h{head_dim}_g{group}", side, side, head_dim, group)


def polar(
    angle: int, radius: int, size: int, head_dim: int, group: int, v: Any, dtype: str = "float16"
) -> KernelCase:
    """Lengths include one that two splits share unevenly."""
    capacity = 384
    format = PolarFormat(angle, radius, head_dim, size, size, scale_dtype=dtype)
    readers = polar_reader(format), reader_of(v, head_dim)
    tile = tuning_for(*readers, 8, capacity, False).tile
    uneven = min(5 * tile // 2 + 1, capacity - 32)
    lengths = Lengths(capacity, (0, 1, tile - 1, tile, tile + 1, uneven, capacity))
    return KernelCase(
        f"m{angle}n{radius}_size{size}_h{head_dim}_g{group}",
        polar_side(format),
        grouped_side(v),
        head_dim,
        group,
        short=lengths,
        long=lengths,
        tuning=tuned(2, tile),
        tolerance=3e-3,
        margin=10,
    )


POLAR = (
    polar(4, 4, 128, 128, 4, None),
    polar(4, 2, 64, 64, 7, format_of(4, "asym", "channels", 64)),
    polar(4, 4, 32, 256, 8, None, "bfloat16"),
    polar(4, 2, 128, 128, 1, format_of(2, "asym", "tokens", 128, 128), "float32"),
)


def runs(head_dim: int, keys: str, values: str, capacity: int, eigen: bool = False) -> KernelCase:
    """keys, values: the widths of chunks of equal size. eigen: keys in an eigenbasis."""
    lengths = Lengths(capacity, (1, capacity - 37, capacity))
    return KernelCase(
        f"{'eigen' if eigen else 'runs'}_h{head_dim}_{keys}_{values}",
        run_side(keys, keys=True, eigen=eigen),
        run_side(values, keys=False),
        head_dim,
        4,
        short=lengths,
        long=lengths,
        tuning=None,
        tolerance=4e-3,
        margin=25,
        garbage=(127, -128),
        span=32,
    )


RUNS = (
    runs(64, "8531", "7642", 256),
    runs(64, "2100", "4400", 288),
    # chunks of two runs that store nothing alike (6 and 3 bits) or a part of it (5 and 4)
    runs(64, "54332110", "65544322", 256),
    # a half that is stored beside one that is not, on both sides
    runs(64, "20000000", "32111000", 288),
    runs(128, "63322110", "55432100", 608),
    runs(128, "5433222111100000", "6543332222110000", 256),
)

EIGEN = (  # Mosaic GPU alone reads them
    runs(64, "54332110", "65544322", 256, eigen=True),
    runs(64, "20000000", "32111000", 288, eigen=True),
    runs(128, "63322110", "55432100", 608, eigen=True),
    runs(128, "8531222111100000", "6543332222110000", 256, eigen=True),
)

# tables of every width, with scales of each kind and dtype
TABLES = tuple(
    KernelCase(
        f"table{bits}_h{head_dim}_{scales}",
        codebook_side(bits, scales, scale_dtype=dtype),
        codebook_side(bits, scales, scale_dtype=dtype),
        head_dim,
        tuning=tuned(1, 128, 1),
    )
    for bits, head_dim, scales, dtype in (
        (2, 64, "token", "float16"),
        (2, 128, "channels", "float16"),
        (3, 64, 32, "bfloat16"),
        (3, 128, "channels", "float16"),
        (4, 64, "token", "float32"),
        (4, 128, "token", "float16"),
        (4, 256, "channels", "float16"),
    )
)

CASES = {case.id: case for case in (*GROUPED, *CODEBOOK, *TABLES, *POLAR, *RUNS)}
# what runs without --exhaustive: interpreted in array operations, and executed in assembly
USUAL = (
    "innerq1_sym_h128_g4",
    "innerq2_asym_h64_g7",
    "kivi2_h64_g8_size64",
    "dense",
    *(case.id for case in (CODEBOOK[0], TABLES[0], TABLES[3], POLAR[0], RUNS[0], RUNS[2])),
)
# codes of 3, 4 and 8 bits, tables with and without outliers, polar keys, runs; test_layout.py has
# the fields of every width
IN_ASSEMBLY = (
    "innerq8_asym_h128_g4",
    "kivi4_h128_g7_size32",
    "k3_v4",
    *(case.id for case in (CODEBOOK[1], TABLES[6], POLAR[0], RUNS[2])),
)
LOWERED = tuple(dict.fromkeys((*USUAL, *IN_ASSEMBLY)))


def cases_of(ids: Iterable[str]) -> list[KernelCase]:
    return [CASES[id] for id in ids]


def named(*ids: str) -> pytest.MarkDecorator:
    """Parametrize a test over the cases of these names."""
    return pytest.mark.parametrize("case", cases_of(ids), ids=lambda case: case.id)
