"""KVQuant against what its public implementation returns for the same numbers (a slice in
tests/golden/): 48 tokens of 128 channels, keys with given thresholds, values with those of each
token."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.arrays import sparse_outliers
from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.arrays.codebook_array import CodebookFormat
from kvq_jax.arrays.codebooks import look_up, nearest_codes
from kvq_jax.arrays.sparse_outliers import Pool, outliers_per_side
from kvq_jax.codecs.codec import Side
from kvq_jax.methods.kvquant.codec import Datatype, KVQuantCodec
from tests.kvq_jax.methods.test_golden import compare_numbers, golden
from tests.kvq_jax.origins import PROMPT

WIDTH = 128
UNCAPPED = 128  # a slot for every entry


def codec_of(
    side: Side,
    bits: int,
    slots: int,
    pool: int = 1,
    datatype: Datatype = "nuq",
    qnorm: bool = False,
) -> KVQuantCodec:
    """slots: of a token; `pool` tokens share theirs."""
    group = None if side == "k" else ChannelGroup(1, WIDTH)
    format = CodebookFormat(
        bits, WIDTH, 1, group, Pool(pool, pool * slots, side == "k") if slots else None, "float32"
    )
    return KVQuantCodec(
        side, format, datatype, "fisher", 0.01, min(slots, 1), False, qnorm, pre_rope=False
    )


def parameters(bits: int, lower: np.ndarray, upper: np.ndarray) -> dict[str, jnp.ndarray]:
    stretched = jnp.asarray([1.05, -0.01], jnp.float32)
    channels = {
        "scale": (upper - lower) / 2,
        "zero": (upper + lower) / 2,
        "lower": lower,
        "upper": upper,
    }
    found = {name: jnp.asarray(array)[None] for name, array in channels.items()}
    return found | {
        "levels": jnp.asarray(golden("kvquant_nuq")[f"lut_b{bits}"]),
        "qnorm": stretched,
    }


def decoded(side: Side, bits: int, slots: int, **options) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows as the body returns them, how many outliers of each pool had no slot)."""
    data = golden("kvquant_nuq")
    lower, upper = (
        (data["k_lower"], data["k_upper"]) if slots else (data["k_min"], data["k_max"])
    )  # of all tokens, not of the slice
    params = parameters(bits, lower, upper)
    codec = codec_of(side, bits, slots, **options)
    body = codec.quantize(params, (), jnp.asarray(data[side.upper()])[None, None], PROMPT)
    sparse = body.outliers
    dropped = np.zeros(1) if sparse is None else np.asarray(sparse_outliers.counts(sparse)[1])[0]
    return np.asarray(codec.dequantize(params, (), body))[0, 0], dropped


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("side", ["k", "v"])
class TestMatchesThePublicCode:
    def test_with_outliers(self, side: Side, bits: int):
        expected = golden("kvquant_nuq")[f"{side}_deq_b{bits}"]
        found, dropped = decoded(side, bits, UNCAPPED if side == "k" else 2)
        assert not dropped.any()
        compare_numbers(found, expected)
        with pytest.raises(AssertionError):
            compare_numbers(decoded(side, bits, 0)[0], expected)

    def test_without_outliers(self, side: Side, bits: int):
        compare_numbers(
            decoded(side, bits, 0)[0], golden("kvquant_nuq")[f"{side}_deq_dense_b{bits}"]
        )

    @pytest.mark.parametrize("pool", [1, 16])
    def test_the_capped_store_equals_the_uncapped_one_where_nothing_overflows(
        self, side: Side, bits: int, pool: int
    ):
        slots = 2 * outliers_per_side(0.01, WIDTH)
        found, dropped = decoded(side, bits, slots, pool=pool)
        expected = golden("kvquant_nuq")[f"{side}_deq_b{bits}"]
        found, expected = (rows.reshape(-1, pool, WIDTH) for rows in (found, expected))
        compare_numbers(found[dropped == 0], expected[dropped == 0])
        assert side == "v" or 0 < (dropped > 0).sum() < len(dropped), (
            "both kinds of pools are needed"
        )
        for p in np.flatnonzero(dropped):
            differing = (
                np.abs(found[p] - expected[p]) > 1e-5 * np.maximum(1, np.abs(expected[p]))
            ).sum()
            assert 0 < differing <= dropped[p], (
                f"pool {p} dropped {dropped[p]} outliers, {differing} entries differ"
            )


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_qnorm_and_uniform_levels_match_the_public_code(bits: int):
    compare_numbers(
        decoded("k", bits, UNCAPPED, qnorm=True)[0], golden("kvquant_nuq")[f"k_deq_qnorm_b{bits}"]
    )
    compare_numbers(
        decoded("k", bits, UNCAPPED, datatype="int")[0], golden("kvquant_nuq")[f"k_deq_int_b{bits}"]
    )


def test_a_code_is_the_nearest_level_the_lower_one_on_a_tie():
    levels = jnp.asarray([-1.0, -0.25, 0.25, 1.0])
    y = jnp.asarray([-3.0, -0.7, -0.6, 0.0, 0.1, 0.9, 7.0])
    codes = nearest_codes(y, levels)
    assert codes.tolist() == [0, 0, 1, 1, 2, 3, 3]
    np.testing.assert_array_equal(look_up(levels, codes), np.asarray(levels)[np.asarray(codes)])
