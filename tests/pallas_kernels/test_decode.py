"""The decode-attention kernel, interpreted, against attention over the rows that the same codes stand for; and its lowering for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._launch import Launch
from pallas_kernels.decode import Tuning, decode_attention, merge_splits
from tests.pallas_kernels.kernel_cases import KernelCase, kernel_cases, row_errors, side_of, stored_rows, stored_structs
from tests.pallas_kernels.lowering import lower_for_cuda

TILE, CAPACITY, HEADS = 128, 320, 2  # the capacity is no multiple of the tile
LIMITS = (0, 1, TILE - 1, TILE, TILE + 1, 2 * TILE + 1, CAPACITY)
TOLERANCE = 1e-2
INTERPRETED = Launch(interpret=True)


def tuned(splits: int, programs: int = 2 * len(LIMITS), tile: int = TILE) -> Tuning:
    return Tuning(tile=tile, cores=splits * programs, resident=1)


@functools.cache
def rows(head_dim: int, seed: int, batch: int = len(LIMITS)) -> np.ndarray:
    found = np.random.default_rng(seed).standard_normal((batch, HEADS, CAPACITY, head_dim)).astype(np.float32)
    found[..., :: head_dim // 4] *= 3
    return found


def queries(case: KernelCase, batch: int = len(LIMITS)) -> jax.Array:
    return jnp.asarray(np.random.default_rng(9).standard_normal((batch, HEADS, case.group, case.head_dim)), jnp.float32)


def reference(q: jax.Array, k: np.ndarray, v: np.ndarray, limits: tuple[int, ...]) -> np.ndarray:
    """softmax(q k^T / sqrt(H)) v over the first limits[b] tokens; zeros where there are none."""
    scores = np.einsum("bkgh,bksh->bkgs", np.asarray(q, np.float64), k) * k.shape[-1] ** -0.5
    seen = np.arange(k.shape[2]) < np.asarray(limits)[:, None, None, None]
    weights = np.where(seen, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    return np.einsum("bkgs,bksh->bkgh", weights, v) / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)


@functools.partial(jax.jit, static_argnames=("case", "tuning", "how"))
def attend(case, q, k, v, limits, tuning, how):
    keys, values = (side_of(case.k, case.head_dim), k), (side_of(case.v, case.head_dim), v)
    return decode_attention(q, keys, values, limits, capacity=CAPACITY, tuning=tuning, how=how)


def output(part) -> np.ndarray:
    return np.asarray(part.o / jnp.maximum(part.l, 1e-30))


def spoiled(format, arrays: list[jax.Array]) -> list[jax.Array]:
    """What no token below a row's limit reads, overwritten: floats by NaN (as bits where they are stored so), words by all ones."""
    found = []
    for i, array in enumerate(arrays):
        array = np.array(array)
        statistic = format is not None and i >= len(format.layout.sets)
        axis = 3 if statistic and format.axis == "channels" else 2
        per_entry = CAPACITY // array.shape[axis]
        for b, limit in enumerate(LIMITS):
            whole_groups = -(-limit // 64) * 64  # what shares a word row or a group with a live token stays
            index = [b, slice(None), slice(None), slice(None)]
            index[axis] = slice(whole_groups // per_entry, None)
            array[tuple(index)] = np.nan if array.dtype.kind == "f" else (0x7FFF if array.dtype == np.uint16 else -1)
        found.append(jnp.asarray(array))
    return found


@kernel_cases()
def test_every_length_equals_the_reference_on_the_same_codes(case):
    q = queries(case)
    (k, k_rows), (v, v_rows) = stored_rows(case.k, rows(case.head_dim, 0)), stored_rows(case.v, rows(case.head_dim, 1))
    limits = jnp.asarray(LIMITS)
    found = output(attend(case, q, k, v, limits, tuned(2), INTERPRETED))
    wanted = reference(q, k_rows, v_rows, LIMITS)
    errors = row_errors(found, wanted).max(axis=(1, 2))
    assert (found[0] == 0).all(), "a row without tokens has no output"
    assert errors[1:].max() < TOLERANCE, f"errors by row {dict(zip(LIMITS, errors, strict=True))}"
    for name, wrong in {
        "values in the place of keys": reference(q, v_rows, v_rows, LIMITS),
        "keys in the place of values": reference(q, k_rows, k_rows, LIMITS),
        "one token fewer": reference(q, k_rows, v_rows, tuple(max(n - 1, 0) for n in LIMITS)),
        "the next group's keys": reference(q, np.roll(k_rows, 32, axis=2), v_rows, LIMITS),
    }.items():
        assert row_errors(found, wrong)[2:].max() > 3 * TOLERANCE, f"{name} would pass"


@kernel_cases("innerq1_sym_h128_g4", "innerq2_asym_h64_g7", "kivi2_h64_g8_size64", "kivi4_h128_g7_size32", "dense")
def test_garbage_in_unused_capacity_does_not_leak(case):
    q = queries(case)
    stored = [stored_rows(f, rows(case.head_dim, i))[0] for i, f in enumerate((case.k, case.v))]
    clean = output(attend(case, q, *stored, jnp.asarray(LIMITS), tuned(2), INTERPRETED))
    dirty = [spoiled(f, arrays) for f, arrays in zip((case.k, case.v), stored, strict=True)]
    for before, after in zip(jax.tree.leaves(stored), jax.tree.leaves(dirty), strict=True):
        assert (np.asarray(before) != np.asarray(after)).any(), "an array was not spoiled"
    dirty = output(attend(case, q, *dirty, jnp.asarray(LIMITS), tuned(2), INTERPRETED))
    assert np.isfinite(dirty).all()
    np.testing.assert_array_equal(dirty, clean)


@kernel_cases("innerq2_hybrid_h128_g1", "kivi2_h128_g4_size32")
def test_the_number_of_splits_changes_nothing_but_rounding(case):
    q = queries(case)
    stored = [stored_rows(f, rows(case.head_dim, i))[0] for i, f in enumerate((case.k, case.v))]
    one, many = (output(attend(case, q, *stored, jnp.asarray(LIMITS), tuned(n, tile=32), INTERPRETED)) for n in (1, 3))
    assert row_errors(many, one)[1:].max() < 2e-3
    assert row_errors(many[1:], one[:-1])[1:].max() > 3e-2, "rows of other lengths must differ"


def test_merged_splits_are_the_softmax_of_all_tokens():
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(1, 1, 3, 5, 4)) * 4, rng.normal(size=(1, 1, 3, 5, 8))  # [B, K, splits, tokens, G], [.., tokens, H]
    m = scores.max(axis=3)
    m[:, :, 1] = -1e30  # an empty split
    weights = np.exp2(np.minimum(scores - m[:, :, :, None], 0)) * (np.arange(3) != 1)[:, None, None]
    part = merge_splits(
        jnp.asarray(np.einsum("bkstg,bksth->bkshg", weights, values)[:, :, :, None]), jnp.asarray(m), jnp.asarray(weights.sum(axis=3))
    )
    every = np.exp2(scores[:, :, [0, 2]]).reshape(10, 4)
    wanted = np.einsum("tg,th->gh", every / every.sum(axis=0), values[:, :, [0, 2]].reshape(10, 8))
    assert row_errors(output(part)[0, 0], wanted).max() < 1e-5
    np.testing.assert_allclose(np.exp(part.m[0, 0, :, 0]) * part.l[0, 0, :, 0], every.sum(axis=0), rtol=1e-5)


def structs(case: KernelCase, batch: int = 2):
    q = jax.ShapeDtypeStruct((batch, HEADS, case.group, case.head_dim), jnp.float32)
    k, v = (stored_structs(f, batch, HEADS, CAPACITY, case.head_dim) for f in (case.k, case.v))
    return q, k, v, jax.ShapeDtypeStruct((batch,), jnp.int32)


@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@kernel_cases()
def test_every_kernel_lowers_for_cuda(case, arithmetic):
    text = lower_for_cuda(lambda *args: attend(case, *args, tuned(2), Launch(arithmetic)), *structs(case))
    assert "__gpu$xla.gpu.triton" in text or "triton" in text
    assert "decode_attention" in text, "the kernel has lost its name"


@pytest.mark.gpu
@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@kernel_cases()
def test_every_kernel_runs_on_a_gpu(case, arithmetic):
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU in this process")
    q = queries(case)
    (k, k_rows), (v, v_rows) = stored_rows(case.k, rows(case.head_dim, 0)), stored_rows(case.v, rows(case.head_dim, 1))
    tuning = tuned(2, tile=128)
    found = output(attend(case, q, k, v, jnp.asarray(LIMITS), tuning, Launch(arithmetic)))
    wanted = reference(q, k_rows, v_rows, LIMITS)
    errors = row_errors(found, wanted).max(axis=(1, 2))
    assert (found[0] == 0).all()
    assert errors[1:].max() < TOLERANCE, f"{arithmetic}: errors by row {dict(zip(LIMITS, errors, strict=True))}"
    assert row_errors(found, reference(q, v_rows, v_rows, LIMITS))[2:].max() > 3 * TOLERANCE, "values in the place of keys would pass"
