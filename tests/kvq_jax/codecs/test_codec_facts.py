"""What a codec says of itself is true: of every method of the table."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

import kvq_jax as kvq
from kvq_jax.codecs.base import Codec, OutlierCounts
from kvq_jax.layer.plan import LayerPlan, by_side
from tests.kvq_jax.layer_runs import DIMS, empty, parameters_of, quick_jit, sequences
from tests.methods_table import MethodCase, cases

TOKENS = 64


@functools.partial(quick_jit, static_argnums=(0, 1))
def stored(
    plan: LayerPlan, codec: Codec, own: Any, inputs: kvq.LayerInputs
) -> tuple[jax.Array, Any, jax.Array, OutlierCounts | None]:
    """Return rows in whole blocks, the body that they are quantized to, what it decodes to, and its
    outliers where it has slots for any."""
    rows = codec.rows(own, inputs)[:, :, : TOKENS // plan.regions.block * plan.regions.block]
    stats = codec.initial_statistics(len(rows), plan.heads)
    body = codec.quantize(own, stats, rows, prefill=True)
    counts = codec.outlier_counts(body) if codec.outlier_slots(plan.heads) else None
    return rows, body, codec.dequantize(own, stats, body), counts


@cases(every=True)
def test_a_codec_is_exact_where_rows_come_back_as_they_are_and_counts_the_outliers_that_it_has_slots_for(
    case: MethodCase,
):
    plan, _ = empty(case.spec, batch=2)
    whole = sequences(2).window(np.zeros(2, np.int32), np.full(2, TOKENS, np.int32), TOKENS)
    for codec, own in zip(plan.codecs, by_side(parameters_of(plan)), strict=False):
        rows, body, decoded, counts = stored(plan, codec, own, whole)
        assert codec.exact == np.array_equal(decoded, rows)
        if counts is not None:
            slots = codec.outlier_slots(plan.heads)
            runs = counts.kept.shape[1]
            assert counts.kept.shape == counts.dropped.shape == (2, runs)
            assert runs % (rows.shape[2] // plan.regions.block) == 0, "a block is whole runs"
            assert 0 < int(counts.kept.max()) <= slots * rows.shape[2] // runs
        if layout := codec.code_layout:
            words = [layout.words(bits) * rows.shape[2] // layout.slots for bits in layout.sets]
            assert kvq.nbytes(jax.tree.leaves(body)) >= 2 * sum(words), (
                "words take less than the layout says"
            )


@cases(
    "kivi2",
    "kivi3_k8_pre_rope",
    "innerq2",
    "int4",
    "nf4_two_heads",
    "kvquant4",
    "squat2",
    "squat3_pre",
    "polar44",
)
def test_what_a_wrapped_codec_says_is_what_the_inner_one_says(case: MethodCase):
    """The same facts with and without the key's bias, but for the bits that a bias would spoil."""
    plain = kvq.layout(case.spec, DIMS, 1, 90).plans[0].k
    wrapped = (
        kvq.layout(dataclasses.replace(kvq.parse(case.spec), subtract_bias=True), DIMS, 1, 90)
        .plans[0]
        .k
    )
    for name in ("exact", "code_layout", "before_rope", "normalizes_channels"):
        assert getattr(wrapped, name) == getattr(plain, name), name
    assert wrapped.outlier_slots(2) == plain.outlier_slots(2)
    assert wrapped.paper_bits(64, 100, pointers=True) == plain.paper_bits(64, 100, pointers=True)
    assert wrapped.paper_bytes(4096) == plain.paper_bytes(4096)
    assert wrapped.describe() == plain.describe() | {"subtract_bias": True}
    assert wrapped.channel_group_bits is None
