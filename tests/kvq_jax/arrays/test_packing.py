"""Packed words: an exact round trip, and the layout facts that kernels and byte counts rely on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.arrays.packing import pack, run_layout, unpack
from pallas_kernels.tiles.layout import plane_layout, plane_sets
from tests.compile_options import QUICK_COMPILE

HEAD_DIMS = (8, 64, 80, 96, 128, 256)


@functools.partial(jax.jit, static_argnums=1, compiler_options=QUICK_COMPILE)
def round_trips(codes, layouts):
    """Return (words, unpacked codes) of each array: one compiled function for all head dims."""
    words = [pack(c, layout) for c, layout in zip(codes, layouts, strict=True)]
    return words, [unpack(w, layout) for w, layout in zip(words, layouts, strict=True)]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("block", [1, 8, 32])
def test_unpack_inverts_pack(bits: int, block: int):
    layouts = tuple(plane_layout(bits, head_dim, block) for head_dim in HEAD_DIMS)
    rng = np.random.default_rng(bits)
    codes = [
        rng.integers(0, 1 << bits, (2, 64, head_dim)).astype(np.uint16) for head_dim in HEAD_DIMS
    ]
    for given, layout, words, found in zip(
        codes, layouts, *round_trips([jnp.asarray(c) for c in codes], layouts), strict=True
    ):
        np.testing.assert_array_equal(found, given, err_msg=f"{layout}")
        for set_bits, word in zip(layout.sets, words, strict=True):
            assert (word.shape, word.dtype) == (
                (2, 64 // layout.slots, layout.words(set_bits)),
                jnp.int16,
            ), f"{layout}"


@pytest.mark.parametrize(
    ("head_dim", "slots"),
    [(64, (2, 4, 1, 1)), (96, (4, 8, 2, 1)), (128, (1, 2, 1, 1)), (256, (1, 1, 1, 1))],
    ids=lambda v: str(v),
)
def test_tokens_share_word_rows_only_where_one_token_does_not_fill_them(
    head_dim: int, slots: tuple[int, ...]
):
    assert tuple(plane_layout(bits, head_dim, 32).slots for bits in (2, 3, 4, 8)) == slots


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8, 9])
def test_stored_bits_are_exact_where_nothing_is_padded(bits: int):
    for head_dim in (64, 96, 128, 256):
        layout = plane_layout(bits, head_dim, 32)
        stored = sum(layout.words(b) for b in layout.sets) * 16 / layout.slots
        assert stored == bits * head_dim, f"{head_dim=}"


def test_planes_are_never_wider_than_a_default_group():
    for bits in (1, 2, 3, 4, 8):
        for head_dim in HEAD_DIMS:
            assert plane_layout(bits, head_dim, 32).width in (16, 32)


@pytest.mark.parametrize("bits", [0, 16])
def test_bits_that_fit_no_word_are_refused(bits: int):
    with pytest.raises(ValueError, match=f"bits={bits}"):
        plane_sets(bits)


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("channels", [2, 8, 24])
def test_runs_of_any_number_of_channels_are_stored_without_padding(width: int, channels: int):
    layout = run_layout(width, channels, 32)
    assert sum(layout.words(bits) for bits in layout.sets) * 16 == layout.slots * width * channels
