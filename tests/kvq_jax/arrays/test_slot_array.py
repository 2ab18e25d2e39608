"""InnerQ's hybrid groups as the paper stores them: the words mean what the module says, and the
numbers are the hybrid quantizer's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.arrays import slot_array, uniform
from kvq_jax.arrays.grouped_array import GroupFormat
from kvq_jax.arrays.packing import unpack
from kvq_jax.cache.cache import CacheDims
from kvq_jax.layer.plan import LayerPlan

HEADS, TOKENS, CHANNELS = 2, 64, 64


def rows() -> np.ndarray:
    """Rows whose groups are of both modes: some lie around zero, some far from it, one is constant,
    one zero, one not finite."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, HEADS, TOKENS, CHANNELS)) + rng.choice(
        [0, 30, -100], (1, HEADS, TOKENS // 32, CHANNELS // 32)
    ).repeat(32, 2).repeat(32, 3)
    x[:, 0, :32, :32] = 100.03
    x[:, 1, 32:, 32:] = 0
    x[:, 1, 5, 40:43] = np.inf, -np.inf, np.nan
    return x.astype(np.float32)


def format_of(
    axis: str, bits: int = 2, group: int = 32, block: int = 32, dtype: str = "float16"
) -> GroupFormat:
    return GroupFormat(bits, "hybrid", axis, group, CHANNELS, block, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def round_trip(x, format: GroupFormat, scheme: str | None = None):
    body = slot_array.quantize(x, format, scheme)
    return body, unpack(body.words, slot_array.layout(format)), slot_array.dequantize(body)


def in_groups(x: np.ndarray, format: GroupFormat) -> np.ndarray:
    """[.., groups as they are stored .., elements]."""
    g = format.group_size
    if format.axis == "channels":
        return np.moveaxis(x.reshape(1, HEADS, TOKENS, -1, g), 2, 3)
    return np.moveaxis(x.reshape(1, HEADS, -1, g, CHANNELS), 3, 4)


CASES = [
    ("channels", 2, 32, 32),
    ("tokens", 2, 32, 32),
    ("channels", 1, 8, 4),
    ("tokens", 4, 16, 16),
    ("tokens", 8, 32, 32),
]


@pytest.mark.parametrize(("axis", "bits", "group", "block"), CASES)
def test_words_slots_and_modes_mean_what_is_written(axis: str, bits: int, group: int, block: int):
    """Read by hand, bit by bit. The control reads the signs from the other end of the word."""
    format, x = format_of(axis, bits, group, block), rows()
    body, codes, x_hat = round_trip(jnp.asarray(x), format)
    scale, slot = np.asarray(body.scale, np.float64)[..., None], np.asarray(body.slot)
    modes = np.unpackbits(np.asarray(body.mode), axis=-1, bitorder="little").reshape(
        *body.mode.shape, 8
    )
    symmetric = (
        modes[..., : scale.shape[3] // body.mode.shape[-1]].reshape(slot.shape)[..., None] == 1
    )
    codes, found = (
        in_groups(np.asarray(codes).astype(np.float64), format),
        in_groups(np.asarray(x_hat), format),
    )
    assert codes.max() < 2**bits
    zero = slot.view(np.float32).astype(np.float64)[..., None]

    def by_hand(places: np.ndarray) -> np.ndarray:
        signs = 1 - 2 * (slot.view(np.uint32)[..., None] >> places.astype(np.uint32) & 1).astype(
            np.float64
        )
        return np.where(
            symmetric, signs * codes * scale, codes * scale + np.where(symmetric, 0, zero)
        )

    np.testing.assert_allclose(found, by_hand(np.arange(group)), rtol=1e-6)
    assert not np.allclose(found, by_hand(np.arange(group)[::-1]), rtol=1e-6), (
        "signs in another order would pass"
    )
    assert symmetric.any()
    assert not symmetric.all()


@pytest.mark.parametrize("axis", ["channels", "tokens"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_numbers_are_those_of_the_better_mode_with_a_zero_point_in_fp32(axis: str, dtype: str):
    format, x = format_of(axis, dtype=dtype), rows()
    body, _, x_hat = round_trip(jnp.asarray(x), format)
    groups, found = (in_groups(np.asarray(a), format) for a in (x, x_hat))
    both = uniform.hybrid_modes(jnp.asarray(groups), 2, 4, jnp.dtype(dtype), jnp.float32)
    wanted = np.where(both.symmetric, uniform.dequantize(both.sym), uniform.dequantize(both.asym))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    other = np.where(both.symmetric, uniform.dequantize(both.asym), uniform.dequantize(both.sym))
    assert not np.allclose(found, other, rtol=1e-2), "the other mode would pass"
    constant = found[0, 0][groups[0, 0] == np.float32(100.03)]
    np.testing.assert_array_equal(
        constant, np.float32(100.03), err_msg="a zero point in float16 would be 100.0"
    )
    _, _, forced = round_trip(jnp.asarray(x), format, "sym")
    np.testing.assert_allclose(
        in_groups(np.asarray(forced), format), uniform.dequantize(both.sym), rtol=1e-6, atol=1e-6
    )


def keys_and_values(spec: str) -> LayerPlan:
    return kvq.cache.layout(spec, CacheDims(1, 4, 2, 128, 512), 1, 256).plans[0]


def test_stored_bytes_are_those_that_the_paper_counts():
    slot, planes = keys_and_values("innerq:bits=2,storage=slot"), keys_and_values("innerq:bits=2")
    elements = 2 * 256 * 128
    for side in ("k", "v"):
        stored = kvq.size.nbytes(getattr(slot, side).body(1, 2, 256))
        assert (
            stored
            == getattr(planes, side).facts.paper.bytes(elements)
            == elements * (2 + 1 + 0.5 + 1 / 32) / 8
        )
        assert stored < kvq.size.nbytes(getattr(planes, side).body(1, 2, 256))
        assert getattr(slot, side).facts.paper.bytes is None, (
            "nothing else is counted where that is what is stored"
        )
