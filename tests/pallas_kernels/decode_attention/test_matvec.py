"""The matrix-vector products by themselves, interpreted, against products with the rows that the
arrays stand for.
"""

import jax.numpy as jnp
import pytest

from pallas_kernels.decode_attention import matvec
from pallas_kernels.decode_attention.tuning import Tuning
from pallas_kernels.launch import Launch
from tests.pallas_kernels.grouped_sides import reader_of
from tests.pallas_kernels.harness import (
    HEADS,
    KernelCase,
    Lengths,
    check_scores,
    check_values,
    each_lowering,
    launches,
    scores,
    tuned,
    weighted_values,
)
from tests.pallas_kernels.kernel_cases import CASES, CODEBOOK, GROUPED, POLAR, TABLES, cases_of
from tests.pallas_kernels.lowering import lower_for_cuda

LONG = 1024  # tokens: at least four splits in the default tuning
WITH_VALUES = (*GROUPED, *CODEBOOK, *TABLES)
# attention reads the other formats; only these products take tables by themselves
USUAL = (
    *cases_of(("innerq3_sym_h256_g8", "kivi2_h64_g8_size64", "dense")),
    *(CODEBOOK[1], TABLES[0], TABLES[3]),
)
IN_ASSEMBLY = CASES["kivi2_h64_g8_size64"], TABLES[0], TABLES[6]
LOWERED = ("innerq1_sym_h128_g4", "k3_v4", "dense", *(case.id for case in TABLES[::3]))


def sizes(case: KernelCase, launch: Launch) -> tuple[int, Tuning | None]:
    """Return (capacity, tuning): two splits of two tiles; tables are read in tiles of 128."""
    if not launch.interpret:
        return LONG, None
    return 256, tuned(1, 128, 1) if case in TABLES else tuned(2, 64, 1)


@launches((*WITH_VALUES, *POLAR), (*USUAL, POLAR[0]), IN_ASSEMBLY, WITH_VALUES)
def test_scores_equal_the_reference_on_the_same_codes(case, launch):
    check_scores(case, *sizes(case, launch), launch)


@launches(WITH_VALUES, USUAL, IN_ASSEMBLY)
def test_weighted_values_equal_the_reference_on_the_same_codes(case, launch):
    check_values(case, *sizes(case, launch), launch)


def test_a_capacity_of_no_whole_tiles_is_refused():
    rows = [jnp.zeros((1, 1, 96, 64), jnp.uint16)]
    with pytest.raises(ValueError, match="capacity=96 is not whole tiles of 64"):
        matvec.weighted_values(
            jnp.zeros((1, 1, 1, 96)), reader_of(None, 64), rows, tuning=Tuning(tile=64)
        )


def test_a_tile_shorter_than_a_span_is_refused():
    with pytest.raises(ValueError, match="not whole spans of 32"):
        matvec.scores(
            jnp.zeros((1, 1, 1, 64)), reader_of(None, 64), [], capacity=256, tuning=Tuning(tile=16)
        )


@each_lowering((*GROUPED, *TABLES), [case for case in (*GROUPED, *TABLES) if case.id in LOWERED])
def test_both_products_lower_for_cuda(case, arithmetic):
    launch, (k, v) = Launch(arithmetic), case.sides(Lengths(LONG, (LONG,)))
    p = jnp.zeros((1, HEADS, case.group, LONG), jnp.float16)
    text = lower_for_cuda(
        lambda q, p, keys, values: (
            scores(k.reader, q, keys, LONG, None, launch),
            weighted_values(v.reader, p, values, None, launch),
        ),
        *(case.queries(1), p, k.arrays, v.arrays),
    )
    assert "matvec_scores" in text
    assert "matvec_values" in text
