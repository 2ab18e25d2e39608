"""Sizes as the KVQuant paper prints them, from its rule; and sizes as stored, from the arrays."""

import pytest

from kvq_jax.cache.cache import CacheDims
from kvq_jax.cache.paper_bits import paper_bits

LLAMA_7B = CacheDims(32, 32, 32, 128, 4096)
LLAMA_65B = CacheDims(80, 64, 64, 128, 8192)
LLAMA_2_70B = CacheDims(80, 64, 8, 128, 8192)
K, M = 1024, 1024 * 1024
TEN_M = 10_000_000


def gigabytes(spec: str, dims: CacheDims, context: int, pointers: bool) -> float:
    bits = paper_bits(spec, dims, context, pointers=pointers)
    assert bits is not None
    elements = 2 * dims.num_hidden_layers * dims.num_key_value_heads * dims.head_dim * context
    return elements * bits / 8 / 2**30


@pytest.mark.parametrize(
    ("dims", "bits", "outliers", "printed"),
    [
        (LLAMA_7B, 4, 0, (16.0, 128.1, 1221.9)),
        (LLAMA_7B, 3, 0.01, (13.3, 106.4, 1014.4)),
        (LLAMA_7B, 2, 0.01, (9.3, 74.4, 709.2)),
        (LLAMA_65B, 2, 0.01, (46.5, 371.5, 3543.3)),
    ],
)
def test_sizes_are_those_of_table_8(
    dims: CacheDims, bits: int, outliers: float, printed: tuple[float, float, float]
):
    spec = f"kvquant:bits={bits},outliers={outliers}"
    for context, expected, pointers in zip(
        (128 * K, M, TEN_M), printed, (True, False, False), strict=True
    ):
        # the printed sizes of 65B with outliers are up to 0.3 GB of 6595 above any rule that gives
        # the others
        slack = 1e-4 * expected if dims is LLAMA_65B and outliers else 0
        found = round(gigabytes(spec, dims, context, pointers), 1)
        assert found == pytest.approx(expected, abs=0.051 + slack), f"{context=}"
    other = gigabytes("kvquant:bits=4,outliers=0.05", dims, M, False)
    assert abs(gigabytes(spec, dims, M, False) - other) > 1


@pytest.mark.parametrize(
    ("spec", "dims", "printed"),
    [
        ("kvquant:bits=4,outliers=0.01", LLAMA_7B, 4.33),  # Table 2
        ("kvquant:bits=4,outliers=0.01", LLAMA_2_70B, 4.35),
        # Table 17, its smallest and largest averages
        ("kvquant:bits=4,outliers=0.001", LLAMA_65B, 4.04),
        ("kvquant:bits=3,outliers=0.005", LLAMA_2_70B, 3.19),
        ("kvquant:bits=4,outliers=0", LLAMA_2_70B, 4.02),
        ("int4", LLAMA_2_70B, 4.02),
        ("int4:group_size=128", LLAMA_7B, 4.16),
        ("nf3:group_size=128", LLAMA_7B, 3.25),
    ],
)
def test_average_bits_are_those_of_tables_2_and_17(spec: str, dims: CacheDims, printed: float):
    assert round(paper_bits(spec, dims, 32 * K) or 0, 2) == pytest.approx(printed, abs=0.0051)
