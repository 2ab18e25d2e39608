"""A codec's facts are true, for every method of the table."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

import kvq_jax as kvq
from kvq_jax.codecs.codec import Codec, TokensAt
from kvq_jax.codecs.facts import Facts, OutlierCounts
from kvq_jax.layer.plan import LayerPlan, by_side
from tests.kvq_jax.layer_runs import DIMS, empty, parameters_of, quick_jit, sequences
from tests.methods_table import MethodCase, cases

TOKENS, BATCH = 64, 2


@functools.partial(quick_jit, static_argnums=(0, 1))
def stored(
    plan: LayerPlan, codec: Codec, params: Any, inputs: kvq.types.LayerInputs, rows: jax.Array
) -> tuple[Any, jax.Array, OutlierCounts | None]:
    """Return the body of rows in whole blocks, the decoded rows, and the body's outliers."""
    stats = codec.statistics.of(params, inputs)
    at = TokensAt(inputs.positions[:, : rows.shape[2]], prefill=True)
    body = codec.quantize(params, stats, rows, at)
    outliers = codec.facts.outliers
    counts = outliers.counts(body) if outliers else None
    return body, codec.dequantize(params, stats, body), counts


def codecs_and_rows(case: MethodCase) -> list[tuple[LayerPlan, Codec, Any, Any, Any]]:
    """Return (plan, codec, parameters, inputs, rows in whole blocks) of each side."""
    plan, _ = empty(case.spec, batch=BATCH)
    block = plan.regions.block
    whole = np.zeros(BATCH, np.int32), np.full(BATCH, TOKENS, np.int32)
    inputs = sequences(BATCH).window(*whole, TOKENS)
    return [
        (plan, codec, params, inputs, codec.rows(params, inputs)[:, :, : TOKENS // block * block])
        for codec, params in zip(plan.codecs, by_side(parameters_of(plan)), strict=False)
    ]


@cases()
def test_a_codec_is_exact_if_rows_come_back_as_they_are_and_counts_its_outliers(case: MethodCase):
    for plan, codec, params, inputs, rows in codecs_and_rows(case):
        body, decoded, counts = stored(plan, codec, params, inputs, rows)
        assert codec.facts.exact == np.array_equal(decoded, rows)
        if counts is not None:
            slots = codec.facts.outlier_slots(plan.heads)
            runs = counts.kept.shape[1]
            assert counts.kept.shape == counts.dropped.shape == (BATCH, runs)
            assert runs % (rows.shape[2] // plan.regions.block) == 0, "a block is whole runs"
            assert 0 < int(counts.kept.max()) <= slots * rows.shape[2] // runs
        if layout := codec.facts.code_layout:
            words = [layout.words(bits) * rows.shape[2] // layout.slots for bits in layout.sets]
            assert kvq.size.nbytes(jax.tree.leaves(body)) >= 2 * sum(words), (
                "words take less than the layout says"
            )


def described(facts: Facts) -> dict[str, Any]:
    """Return the facts as values that can be compared: functions are asked for their answers."""
    values = {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)}
    paper = values.pop("paper")
    return values | {
        "row_axes": facts.row_axes(2, 64),
        "outliers": facts.outlier_slots(2),
        "unmet": facts.unmet and facts.unmet(2),
        "paper_bits": paper.bits and paper.bits(64, 100, True),
        "paper_bytes": paper.bytes and paper.bytes(4096),
    }


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
def test_subtracting_a_bias_changes_no_fact_but_the_ones_that_it_is_about(case: MethodCase):
    plain = kvq.cache.layout(case.spec, DIMS, 1, 90).plans[0].k
    spec = dataclasses.replace(kvq.parse(case.spec), subtract_bias=True)
    wrapped = kvq.cache.layout(spec, DIMS, 1, 90).plans[0].k
    changed = {"form": "other", "channel_group_bits": None, "token_group": None}
    assert described(wrapped.facts) == described(plain.facts) | changed
    assert wrapped.learning.before_rope == plain.learning.before_rope
    assert wrapped.describe() == plain.describe() | {"subtract_bias": True}
