"""Special features of readers of tables, outliers and keys before RoPE. (test_decode.py compares
them with the reference.)
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.codecs import kernel_readers
from pallas_kernels.decode_attention import kernel
from pallas_kernels.readers.rotary import RotatedReader
from pallas_kernels.readers.sparse_outliers import outlier_scores
from pallas_kernels.tiles.layout import plane_layout
from tests.pallas_kernels.codebook_sides import CodebookSideFormat, codebook_arrays, codebook_side
from tests.pallas_kernels.harness import (
    HEADS,
    INTERPRETED,
    Lengths,
    attend,
    output,
    outputs,
    reference,
    row_errors,
    tuned,
)
from tests.pallas_kernels.kernel_cases import CODEBOOK, codebook

TOLERANCE = 5e-3


def test_heads_come_one_after_the_other_if_scores_of_all_need_too_much_memory(monkeypatch):
    """All but the first have a barrier that waits for the head before.

    Scores are the same, bit for bit. Exponentials of arrays of another shape may differ in their
    last bit, and a weight may then round to the next fp16 number: 2^-11 of its share of a row.
    """
    values = codebook_side(2, "token", 4)
    case = codebook("outliers", codebook_side(2, "channels", 4), values, 64, 1)
    lengths, tuning = Lengths(96, (1, 65, 96)), tuned(2, 32, 3)
    k, v = case.sides(lengths)
    at_once = outputs(case, (k.arrays, v.arrays), lengths, tuning, INTERPRETED)
    monkeypatch.setattr(kernel, "STORED_SCORES", 1)
    attend.clear_cache()
    limits, readers = jnp.asarray(lengths.limits), (k.reader, v.reader)
    args = case.queries(3), k.arrays, v.arrays, limits, lengths.capacity, tuning, INTERPRETED
    text = attend.lower(readers, *args).as_text()
    assert text.count("stablehlo.optimization_barrier") == HEADS - 1
    apart = outputs(case, (k.arrays, v.arrays), lengths, tuning, INTERPRETED)
    attend.clear_cache()
    errors = row_errors(apart, at_once)
    assert np.median(errors) < 1e-6, "few weights lie on the border of two fp16 numbers"
    assert errors.max() < 2**-11
    assert row_errors(apart[:, ::-1], at_once).max() > 5 * TOLERANCE, "the heads could be exchanged"


@pytest.mark.parametrize(("block", "tile"), [(32, 64), (96, 32)])
def test_keys_of_a_shard_are_rotated_to_the_positions_of_its_blocks(block, tile):
    """Shard 1 of 3, in tiles that are a part of a block or whole blocks. Outliers too, in pools
    that all these tiles hold.
    """
    shard, shards, capacity = 1, 3, 384
    format = CodebookSideFormat(2, "channels", 9, pre_rope=True)
    keys = codebook_arrays(format, (1, HEADS, capacity, 64), 0)
    reader = dataclasses.replace(keys.reader, block=block, shards=shards)
    q = jnp.asarray(np.random.default_rng(9).standard_normal((1, HEADS, 4, 64)), jnp.float32)
    arrays = [*keys.arrays, np.int32(shard)]
    values, limits = (
        codebook_arrays(CodebookSideFormat(2, "token"), keys.dense.shape, 1),
        [capacity],
    )
    tuning, readers = tuned(2, tile, 1), (reader, values.reader)
    part = attend(
        readers, q, arrays, values.arrays, jnp.asarray(limits), capacity, tuning, INTERPRETED
    )
    actual = output(part)
    stored = np.arange(capacity)
    tokens = (stored // block * shards + shard) * block + stored % block

    def error(tokens: np.ndarray) -> float:
        rows = keys.rotated(keys.dense + keys.outliers, tokens=tokens)
        return row_errors(actual, reference(q, rows, values.dense, limits)).max()

    assert error(tokens) < TOLERANCE
    assert error(tokens + block) > 5 * TOLERANCE, "the blocks of another shard would pass"
    assert error(stored + tokens[0]) > 5 * TOLERANCE, "neighbouring blocks would pass"


def test_a_tile_never_begins_and_ends_in_different_parts_of_blocks():
    case = CODEBOOK[0]
    reader = case.sides(case.short)[0].reader
    assert isinstance(reader, RotatedReader)
    longest = [
        dataclasses.replace(reader, block=block, shards=2).longest_tile
        for block in (32, 64, 96, 128, 160, 192, 512)
    ]
    assert longest == [128, 128, 32, 128, 32, 64, 128]
    assert dataclasses.replace(reader, block=96).longest_tile == 128, (
        "the blocks of a single shard are neighbours"
    )


def test_outliers_of_padding_are_not_read():
    q = jnp.ones((2, 2, 1, 64), jnp.float32)
    index = np.broadcast_to(64 * np.arange(128, dtype=np.uint16), (2, 2, 128))  # one of each token
    ends, residual = np.full((2, 2, 2), 128, np.uint16), np.ones((2, 2, 128), np.float32)
    limits, slots = jnp.asarray([0, 128]), (jnp.asarray(a) for a in (index, residual, ends))
    actual = outlier_scores(q, *slots, limits, None, INTERPRETED, 128, 1)
    assert (actual[0] == 0).all()
    assert (actual[1, 0, 0, :128] == 1).all(), "all tokens of a pool that is read"
    assert (actual[1, 0, 0, 128:] == 0).all(), "no token of one behind the limit"
    assert (actual[1, 1] == 0).all(), "no slot belongs to the other head"


def test_what_the_kernels_cannot_read_has_a_reason():
    layout = plane_layout(4, 128, 32)
    assert "5-bit codes" in str(kernel_readers.codebook(plane_layout(5, 128, 32), None))
    assert "groups of 16 channels" in str(kernel_readers.codebook(layout, ChannelGroup(1, 16)))
    assert "head_dim 80" in str(kernel_readers.codebook(plane_layout(4, 80, 32), None))
    assert "not a multiple of 32" in str(kernel_readers.codebook(plane_layout(4, 128, 16), None))
    assert "outliers of 16 tokens share slots; kernels read those of 32, 64, 128" in str(
        kernel_readers.codebook(layout, None, pool=16)
    )
