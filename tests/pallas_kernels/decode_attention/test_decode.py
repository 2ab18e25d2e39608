"""The decode-attention kernel, interpreted, against attention over the rows that the same codes
stand for; and its lowering for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention.kernel import decode_attention
from pallas_kernels.decode_attention.tuning import Tuning
from pallas_kernels.launch import Launch
from tests.pallas_kernels.kernel_cases import (
    KernelCase,
    Lengths,
    kernel_cases,
    reader_of,
    row_errors,
    rows_with_neighbours_scales,
    spoiled,
    stored_rows,
    stored_structs,
)
from tests.pallas_kernels.lowering import lower_for_cuda

HEADS = 2
TOLERANCE = 1e-2
INTERPRETED = Launch(interpret=True)


SHORT = Lengths(320, (0, 1, 127, 128, 129, 257, 320))
LONG = Lengths(
    1088, (0, 1, 127, 128, 257, 1001, 1088)
)  # several splits, as they are chosen on a GPU
GARBAGE = (
    float("nan"),
    float("inf"),
    60000.0,
)  # the last is finite in fp16, and its product with a code is not


def tuned(splits: int, tile: int = 128) -> Tuning:
    return Tuning(tile=tile, cores=splits * HEADS * len(SHORT.limits), resident=1)


@functools.cache
def rows(head_dim: int, seed: int, lengths: Lengths) -> np.ndarray:
    found = (
        np.random.default_rng(seed)
        .standard_normal((len(lengths.limits), HEADS, lengths.capacity, head_dim))
        .astype(np.float32)
    )
    found[..., :: head_dim // 4] *= 3
    return found


def queries(case: KernelCase, batch: int = len(SHORT.limits)) -> jax.Array:
    return jnp.asarray(
        np.random.default_rng(9).standard_normal((batch, HEADS, case.group, case.head_dim)),
        jnp.float32,
    )


def stored(case: KernelCase, lengths: Lengths) -> tuple[list[jax.Array], list[jax.Array]]:
    k, v = (
        stored_rows(f, rows(case.head_dim, i, lengths))[0] for i, f in enumerate((case.k, case.v))
    )
    return k, v


def reference(q: jax.Array, k: np.ndarray, v: np.ndarray, limits: tuple[int, ...]) -> np.ndarray:
    """Return softmax(q k^T / sqrt(H)) v over the first limits[b] tokens; zeros where there are
    none."""
    scores = np.einsum("bkgh,bksh->bkgs", np.asarray(q, np.float64), k) * k.shape[-1] ** -0.5
    seen = np.arange(k.shape[2]) < np.asarray(limits)[:, None, None, None]
    weights = np.where(seen, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    return np.einsum("bkgs,bksh->bkgh", weights, v) / np.maximum(
        weights.sum(axis=-1, keepdims=True), 1e-300
    )


@functools.partial(jax.jit, static_argnames=("case", "capacity", "tuning", "launch"))
def attend(case, q, k, v, limits, capacity, tuning, launch):
    keys, values = (reader_of(case.k, case.head_dim), k), (reader_of(case.v, case.head_dim), v)
    return decode_attention(
        q, keys, values, limits, capacity=capacity, tuning=tuning, launch=launch
    )


def output(part) -> np.ndarray:
    return np.asarray(part.o / jnp.maximum(part.l, 1e-30))


def outputs(
    case: KernelCase, arrays, lengths: Lengths, tuning: Tuning | None, launch: Launch, more: int = 0
) -> np.ndarray:
    """Attention to the first limit + more tokens of each row, where there are so many."""
    limits = jnp.minimum(jnp.asarray(lengths.limits) + more, lengths.capacity)
    return output(attend(case, queries(case), *arrays, limits, lengths.capacity, tuning, launch))


def check_lengths(
    case: KernelCase, lengths: Lengths, tuning: Tuning | None, launch: Launch
) -> None:
    q, limits = queries(case), lengths.limits
    exact = [rows(case.head_dim, i, lengths) for i in (0, 1)]
    (k, k_rows), (v, v_rows) = (
        stored_rows(f, r) for f, r in zip((case.k, case.v), exact, strict=True)
    )
    found = outputs(case, (k, v), lengths, tuning, launch)
    wanted = reference(q, k_rows, v_rows, limits)
    errors = row_errors(found, wanted).max(axis=(1, 2))
    assert (found[0] == 0).all(), "a row without tokens has no output"
    assert errors[1:].max() < TOLERANCE, f"errors by row {dict(zip(limits, errors, strict=True))}"
    wrong = {
        "zeros": np.zeros(found.shape),
        "values in the place of keys": reference(q, v_rows, v_rows, limits),
        "keys in the place of values": reference(q, k_rows, k_rows, limits),
        "one token fewer": reference(q, k_rows, v_rows, tuple(max(n - 1, 0) for n in limits)),
        "one token more": reference(
            q, k_rows, v_rows, tuple(min(n + 1, lengths.capacity) for n in limits)
        ),
        "the next group's keys": reference(q, np.roll(k_rows, 32, axis=2), v_rows, limits),
    }
    k_shifted, v_shifted = (
        rows_with_neighbours_scales(f, r) for f, r in zip((case.k, case.v), exact, strict=True)
    )
    if k_shifted is not None:
        wrong["keys with a neighbour's scales"] = reference(q, k_shifted, v_rows, limits)
    if v_shifted is not None:
        wrong["values with a neighbour's scales"] = reference(q, k_rows, v_shifted, limits)
    for name, rows_ in wrong.items():
        assert row_errors(found, rows_)[1:].max() > 3 * TOLERANCE, f"{name} would pass"


def check_garbage(
    case: KernelCase, lengths: Lengths, tuning: Tuning | None, launch: Launch, garbage: float
) -> None:
    """Check that what lies at a row's limit and behind it changes no bit, whatever it is."""
    arrays, live = stored(case, lengths), np.asarray(lengths.limits) < lengths.capacity
    dirty = [
        spoiled(f, a, lengths.limits, garbage)
        for f, a in zip((case.k, case.v), arrays, strict=True)
    ]
    for before, after in zip(jax.tree.leaves(arrays), jax.tree.leaves(dirty), strict=True):
        assert (np.asarray(before) != np.asarray(after)).any(), "an array was not spoiled"
    found = outputs(case, dirty, lengths, tuning, launch)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, outputs(case, arrays, lengths, tuning, launch))
    further, clean = (
        outputs(case, a, lengths, tuning, launch, more=1)[live] for a in (dirty, arrays)
    )
    assert (further != clean).any(axis=(1, 2, 3)).all(), (
        "the token at the limit is not spoiled: nothing was shown"
    )


def check_splits(case: KernelCase, lengths: Lengths, launch: Launch) -> None:
    arrays = stored(case, lengths)
    one, many = (outputs(case, arrays, lengths, tuned(n, tile=32), launch) for n in (1, 3))
    assert row_errors(many, one)[1:].max() < 2e-3
    assert row_errors(many[1:], one[:-1])[1:].max() > 3e-2, "rows of other lengths must differ"


@kernel_cases()
def test_every_length_equals_the_reference_on_the_same_codes(case):
    check_lengths(case, SHORT, tuned(2), INTERPRETED)


@kernel_cases()
def test_garbage_in_unused_capacity_does_not_leak(case):
    for garbage in GARBAGE:
        check_garbage(case, SHORT, tuned(2), INTERPRETED, garbage)


@kernel_cases("innerq2_hybrid_h128_g1", "kivi2_h128_g4_size32")
def test_the_number_of_splits_changes_nothing_but_rounding(case):
    check_splits(case, SHORT, INTERPRETED)


@kernel_cases("innerq1_sym_h128_g4", "k_dense_v2")
def test_the_usual_step_and_splits_serve_lengths_of_any_kind(case):
    check_lengths(case, LONG, None, INTERPRETED)


@kernel_cases("innerq1_sym_h128_g4", "kivi4_h128_g7_size32")
def test_weights_below_the_least_number_of_fp16_still_count(case):
    check_small_weights(case, INTERPRETED)


def check_small_weights(case: KernelCase, launch: Launch) -> None:
    """Check rows whose first token, of value 0, has 2^27 times the weight of each other one:
    rounded to fp16 as they are, those are 0."""
    sides = [
        np.random.default_rng(i)
        .standard_normal((1, HEADS, SHORT.capacity, case.head_dim))
        .astype(np.float32)
        for i in (0, 1)
    ]
    q = np.ones((1, HEADS, case.group, case.head_dim), np.float32)
    sides[0][:], sides[1][:, :, 0] = 0.0, 0.0
    sides[0][:, :, :32] = 1e-3  # a group over tokens has one scale: its other tokens are next to 0
    sides[0][:, :, 0] = 27 * np.log(2) * case.head_dim**-0.5
    (k, k_rows), (v, v_rows) = (
        stored_rows(f, r) for f, r in zip((case.k, case.v), sides, strict=True)
    )
    found = output(
        attend(
            case,
            jnp.asarray(q),
            k,
            v,
            jnp.array([SHORT.capacity]),
            SHORT.capacity,
            tuned(2),
            launch,
        )
    )
    wanted = reference(jnp.asarray(q), k_rows, v_rows, (SHORT.capacity,))
    assert 0 < np.abs(wanted).max() < 1e-5, "the weights are not small"
    assert not v_rows[:, :, 0].any()
    assert row_errors(found, wanted).max() < 3e-2


@kernel_cases("innerq1_sym_h128_g4", "kivi2_h64_g8_size64")
def test_rows_at_the_end_of_fp16s_range_are_read(case):
    check_large_rows(case, INTERPRETED)


def check_large_rows(case: KernelCase, launch: Launch) -> None:
    """Check values as large as scales of float16 can say: codes are multiplied by scales in
    fp16."""
    sides = [
        np.random.default_rng(i).uniform(-1, 1, (1, HEADS, 64, case.head_dim)).astype(np.float32)
        for i in (0, 1)
    ]
    sides[1][:, :, ::7], sides[1][:, :, 1::7] = 1, -1
    sides[1] *= 32752
    q = (
        np.random.default_rng(2)
        .standard_normal((1, HEADS, case.group, case.head_dim))
        .astype(np.float32)
    )
    (k, k_rows), (v, v_rows) = (
        stored_rows(f, r) for f, r in zip((case.k, case.v), sides, strict=True)
    )
    assert np.abs(v_rows).max() > 32700
    found = output(
        attend(
            case,
            jnp.asarray(q),
            k,
            v,
            jnp.array([64]),
            64,
            Tuning(tile=64, cores=HEADS, resident=1),
            launch,
        )
    )
    assert row_errors(found, reference(jnp.asarray(q), k_rows, v_rows, (64,))).max() < TOLERANCE
    assert row_errors(found, reference(jnp.asarray(q), k_rows, v_rows, (63,))).max() > TOLERANCE, (
        "without the last token it would pass"
    )


def structs(case: KernelCase, batch: int = 2):
    q = jax.ShapeDtypeStruct((batch, HEADS, case.group, case.head_dim), jnp.float32)
    k, v = (stored_structs(f, batch, HEADS, LONG.capacity, case.head_dim) for f in (case.k, case.v))
    return q, k, v, jax.ShapeDtypeStruct((batch,), jnp.int32)


@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@kernel_cases()
def test_every_kernel_lowers_for_cuda(case, arithmetic):
    text = lower_for_cuda(
        lambda *args: attend(case, *args, LONG.capacity, None, Launch(arithmetic)), *structs(case)
    )
    assert "triton" in text, "another route than Triton"
    assert "decode_attention" in text, "the kernel has lost its name"


@kernel_cases("dense")
def test_exact_rows_may_be_any_number(case):
    check_lengths(case, Lengths(277, (0, 1, 31, 32, 129, 276, 277)), tuned(2, 32), INTERPRETED)


@kernel_cases("kivi2_h128_g4_size32")
def test_packed_rows_that_end_within_a_span_are_refused(case):
    with pytest.raises(ValueError, match="capacity=1080: packed rows come in whole spans of 32"):
        jax.eval_shape(lambda *args: attend(case, *args, 1080, None, INTERPRETED), *structs(case))


@pytest.mark.parametrize("tile", [16, 48, 2 * LONG.capacity])
@kernel_cases("dense")
def test_steps_that_do_not_fit_the_contract_are_refused(case, tile):
    with pytest.raises(ValueError, match=f"tile={tile}"):
        jax.eval_shape(
            lambda *args: attend(case, *args, LONG.capacity, Tuning(tile=tile), INTERPRETED),
            *structs(case),
        )


# On a GPU: tuned as kernels are where they serve, that is without a tuning, and once as they are
# interpreted above.


@pytest.fixture
def gpu() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU in this process")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@kernel_cases()
def test_every_kernel_runs_on_a_gpu(case, arithmetic):
    check_lengths(case, LONG, None, Launch(arithmetic))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@kernel_cases(
    "innerq1_sym_h128_g4",
    "innerq2_asym_h64_g7",
    "kivi2_h64_g8_size64",
    "kivi4_h128_g7_size32",
    "dense",
)
def test_garbage_in_unused_capacity_does_not_leak_on_a_gpu(case, arithmetic):
    for garbage in GARBAGE:
        check_garbage(case, LONG, None, Launch(arithmetic), garbage)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@kernel_cases("innerq1_sym_h128_g4", "kivi4_h128_g7_size32")
def test_weights_below_the_least_number_of_fp16_still_count_on_a_gpu(case, arithmetic):
    check_small_weights(case, Launch(arithmetic))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@kernel_cases("innerq2_hybrid_h128_g1", "kivi2_h128_g4_size32")
def test_other_steps_and_splits_change_nothing_but_rounding_on_a_gpu(case, arithmetic):
    check_splits(case, SHORT, Launch(arithmetic))
    check_lengths(case, SHORT, tuned(2), Launch(arithmetic))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@kernel_cases("innerq1_sym_h128_g4", "kivi2_h64_g8_size64")
def test_rows_at_the_end_of_fp16s_range_are_read_on_a_gpu(case, arithmetic):
    check_large_rows(case, Launch(arithmetic))
