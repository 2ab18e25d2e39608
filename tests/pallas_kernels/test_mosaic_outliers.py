"""Tables with outliers on Mosaic GPU, against their references in an interpreter that looks for
races."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import kernel
from pallas_kernels.launch import Launch
from pallas_kernels.mosaic import route
from pallas_kernels.readers.codebook import CodebookReader
from tests.exhaustive import some
from tests.float64 import row_errors
from tests.pallas_kernels.codebook_sides import CodebookSideFormat, codebook_arrays, codebook_side
from tests.pallas_kernels.grouped_sides import format_of, grouped_side
from tests.pallas_kernels.harness import (
    HEADS,
    KernelCase,
    Lengths,
    attend,
    check_attention,
    check_unused_capacity,
    lowered_attention,
    output,
    outputs,
)
from tests.pallas_kernels.kernel_cases import codebook
from tests.pallas_kernels.lowering import needs_mosaic
from tests.pallas_kernels.test_mosaic import INTERPRETED, LENGTHS, ON_A_GPU, TUNING

pytestmark = needs_mosaic


def sparse(bits: int, head_dim: int, group: int = 4, slots: tuple[int, int] = (4, 4)) -> KernelCase:
    """Return KVQuant's tables: keys before RoPE with ranges of channels, values with ranges of
    tokens, and `slots` for the outliers of a token."""
    of_keys, of_values = slots
    return cut(
        codebook(
            f"nuq{bits}_h{head_dim}_g{group}_slots{of_keys}_{of_values}",
            codebook_side(bits, "channels", of_keys, pre_rope=True),
            codebook_side(bits, "token", of_values),
            head_dim,
            group,
        )
    )


def cut(case: KernelCase) -> KernelCase:
    return dataclasses.replace(case, short=LENGTHS, long=LENGTHS, tuning=TUNING)


CASES = (
    *(sparse(bits, 64, group) for bits, group in itertools.product((2, 3, 4), (1, 4))),
    sparse(4, 128, 7),
    sparse(3, 128, 16),
    sparse(2, 256, 8, (6, 3)),
    # on one side alone, after RoPE, and beside values in uniform groups
    sparse(4, 64, 4, (4, 0)),
    sparse(4, 64, 2, (0, 5)),
    cut(codebook("after_rope", codebook_side(4, "token", 3), codebook_side(4, 32, 3), 64, 4)),
    cut(
        codebook(
            "beside_groups",
            codebook_side(3, 32, 3, pre_rope=True),
            grouped_side(format_of(2, "asym", "tokens", 64)),
            64,
            4,
        )
    ),
)
USUAL = [case for case in CASES if case.id in ("nuq4_h64_g4_slots4_4", "nuq4_h64_g2_slots0_5")]
each = pytest.mark.parametrize("case", some(CASES, USUAL), ids=lambda case: case.id)


@each
def test_attention_equals_its_reference_without_a_race(case: KernelCase):
    check_attention(case, case.short, case.tuning, INTERPRETED)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_attention_on_a_gpu_equals_its_reference(case: KernelCase):
    check_attention(case, ON_A_GPU, None, Launch(route="mosaic"))


@pytest.mark.exhaustive
def test_what_lies_behind_a_limit_changes_nothing():
    check_unused_capacity(sparse(4, 64), LENGTHS, TUNING, INTERPRETED)


def test_heads_come_one_after_the_other_if_scores_of_all_need_too_much_memory(
    monkeypatch: pytest.MonkeyPatch,
):
    case = sparse(2, 64, 1)
    k, v = case.sides(LENGTHS)
    arrays = k.arrays, v.arrays
    at_once = outputs(case, arrays, LENGTHS, TUNING, INTERPRETED)
    monkeypatch.setattr(kernel, "STORED_SCORES", 1)
    attend.clear_cache()
    apart = outputs(case, arrays, LENGTHS, TUNING, INTERPRETED)
    attend.clear_cache()
    live = np.asarray(LENGTHS.limits) > 0
    assert row_errors(apart, at_once)[live].max() < 2**-11
    assert row_errors(apart[:, ::-1], at_once)[live].max() > 0.1, "heads could be exchanged"


def test_keys_of_a_shard_are_rotated_to_the_positions_of_its_blocks():
    shard, shards, capacity, block = 1, 3, 160, 32
    format = CodebookSideFormat(2, "channels", 9, pre_rope=True)
    keys = codebook_arrays(format, (1, HEADS, capacity, 64), 0)
    v = codebook_side(2, "token")((1, HEADS, capacity, 64), 1)
    reader = dataclasses.replace(keys.reader, block=block, shards=shards)
    q = jnp.asarray(np.random.default_rng(9).standard_normal((1, HEADS, 4, 64)), jnp.float32)
    arrays = [*keys.arrays, np.int32(shard)], v.arrays
    limits = jnp.asarray([capacity])
    actual = output(attend((reader, v.reader), q, *arrays, limits, capacity, TUNING, INTERPRETED))
    stored = np.arange(capacity)
    tokens = (stored // block * shards + shard) * block + stored % block

    def error(tokens: np.ndarray) -> float:
        rows = keys.rotated(keys.dense + keys.outliers, tokens=tokens)
        scores = np.asarray(q, np.float64) @ np.swapaxes(rows, 2, 3) / 8
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return row_errors(actual, weights / weights.sum(axis=-1, keepdims=True) @ v.rows).max()

    assert error(tokens) < 5e-3
    assert error(tokens + block) > 0.02, "the blocks of another shard would pass"
    assert error(stored + tokens[0]) > 0.02, "neighbouring blocks would pass"


def test_kernels_lower_for_cuda_without_triton():
    case = dataclasses.replace(sparse(4, 128), long=Lengths(608, (0, 577)))
    text = lowered_attention(case, Launch(route="mosaic"))
    for name in ("outlier_scores", "outlier_values"):
        assert name in text
        assert name not in lowered_attention(sparse(4, 128, 4, (0, 0)), Launch(route="mosaic"))
    assert "triton" not in text


def test_pools_of_other_tokens_than_a_span_are_left_to_triton():
    k, v = (side.reader for side in sparse(4, 64).sides(LENGTHS))
    assert route.unsupported(k, v, 4, 128) is None
    assert isinstance(v, CodebookReader)
    wide = dataclasses.replace(v, pool=64)
    reason = "v: outliers of 64 tokens share slots, not of 32"
    assert route.unsupported(k, wide, 4, 128) == reason
