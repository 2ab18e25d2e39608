"""Attention to the tokens between two limits, in bodies that are rings, with a soft cap of scores,
by both routes to a GPU, interpreted, against float64 over the same rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention.kernel import decode_attention
from pallas_kernels.decode_attention.lower_limits import LowerLimits
from pallas_kernels.decode_attention.tuning import Tuning
from pallas_kernels.launch import Launch
from pallas_kernels.mosaic import route
from tests.exhaustive import some
from tests.pallas_kernels.harness import (
    EMULATED,
    INTERPRETED,
    KernelCase,
    Lengths,
    launch_name,
    output,
    row_errors,
)
from tests.pallas_kernels.kernel_cases import CASES, innerq, kivi, looked_up, rows, turned
from tests.pallas_kernels.lowering import lower_for_cuda

CAPACITY, RING = 320, 288  # one block behind the ring is for other use
# limits and lower limits by row: nothing at all, nothing inside, one tile, limits inside tiles and
# groups, all of the body
PLAIN = (0, 130, 100, 129, 257, 320), (0, 130, 70, 1, 150, 0)
# a first round, two rounds, a limit where a round begins, a full ring, few tokens on both sides
# of its end, nothing inside
WRAPPED = (100, 400, 576, 700, 290, 900), (37, 200, 300, 412, 287, 900)
CAP = 1.5
MOSAIC = Launch(interpret=True, route="mosaic")
MOSAIC_TUNING = Tuning(128, stages=2, cores=5, resident=1)


@dataclasses.dataclass(frozen=True)
class Window:
    """The tokens that rows see, and the cap of their scores."""

    limits: tuple[int, ...]
    lower: tuple[int, ...]
    ring: int | None
    soft_cap: float | None

    @property
    def lengths(self) -> Lengths:
        return Lengths(CAPACITY, self.limits)

    def moved(self, by: int) -> Window:
        return dataclasses.replace(self, lower=tuple(max(n + by, 0) for n in self.lower))

    def seen(self) -> np.ndarray:
        """Return a mask of the places that each row sees."""
        mask = np.zeros((len(self.limits), CAPACITY), bool)
        for row, (first, limit) in enumerate(zip(self.lower, self.limits, strict=True)):
            mask[row, np.arange(first, limit) % (self.ring or CAPACITY)] = True
        return mask

    def expected(self, case: KernelCase) -> np.ndarray:
        """Return the attention to these places in float64."""
        k, v = case.sides(self.lengths)
        q = np.asarray(case.queries(len(self.limits)), np.float64)
        scores = q @ np.swapaxes(k.rows, 2, 3) * case.head_dim**-0.5
        if self.soft_cap is not None:
            scores = self.soft_cap * np.tanh(scores / self.soft_cap)
        weights = np.where(self.seen()[:, None, None], np.exp(scores), 0)
        return weights @ v.rows / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)


BEHIND_A_LIMIT = Window(*PLAIN, None, None)
IN_A_RING = Window(*WRAPPED, RING, CAP)


@functools.partial(jax.jit, static_argnames=("readers", "ring", "soft_cap", "tuning", "launch"))
def attend(
    readers: Any,
    q: jax.Array,
    k: Any,
    v: Any,
    limits: jax.Array,
    lower: jax.Array,
    *,
    ring: int | None,
    soft_cap: float | None,
    tuning: Tuning | None,
    launch: Launch,
) -> Any:
    return decode_attention(
        q,
        (readers[0], k),
        (readers[1], v),
        limits,
        capacity=CAPACITY,
        lower=LowerLimits(lower, ring),
        soft_cap=soft_cap,
        tuning=tuning,
        launch=launch,
    )


def outputs(case: KernelCase, window: Window, launch: Launch, arrays: Any = None) -> np.ndarray:
    k, v = case.sides(window.lengths)
    k_arrays, v_arrays = arrays or (k.arrays, v.arrays)
    tuning = MOSAIC_TUNING if launch.route == "mosaic" else case.tuning
    tuning = tuning if launch.interpret else None
    limits, lower = (jnp.asarray(n, jnp.int32) for n in (window.limits, window.lower))
    part = attend(
        (k.reader, v.reader),
        case.queries(len(window.limits)),
        k_arrays,
        v_arrays,
        limits,
        lower,
        ring=window.ring,
        soft_cap=window.soft_cap,
        tuning=tuning,
        launch=launch,
    )
    return output(part)


def check(case: KernelCase, window: Window, launch: Launch) -> None:
    actual, expected = outputs(case, window, launch), window.expected(case)
    live = window.seen().any(axis=1)
    assert (actual[~live] == 0).all(), "a row that sees nothing has no output"
    errors = row_errors(actual, expected).max(axis=(1, 2))
    assert errors[live].max() < case.tolerance, f"errors by row {errors}"
    first = tuple(max(limit - (window.ring or limit), 0) for limit in window.limits)
    wrong = {
        "no lower limit": dataclasses.replace(window, lower=first),
        "a token too few": window.moved(1),
        "a token too many": window.moved(-1),
        "another cap": dataclasses.replace(window, soft_cap=None if window.soft_cap else CAP),
    }
    for name, other in wrong.items():
        error = row_errors(actual, other.expected(case))[live].max()
        assert error > case.margin * case.tolerance, f"{name} would pass: {error}"


def spoiled(array: Any, seen: np.ndarray) -> Any:
    """Return an array of scales or zeros with NaN for tokens, or groups of them, that no query
    sees, and other arrays as they are."""
    array = np.asarray(array)
    if array.dtype != np.uint16:
        return array
    array, places = array.copy(), seen.shape[1]
    for row, of_row in enumerate(seen):
        if array.shape[3] == places:
            array[row, :, :, ~of_row] = 0x7FFF
        else:
            of_groups = of_row.reshape(array.shape[2], -1).any(axis=1)
            array[row, :, ~of_groups] = 0x7FFF
    return array


by_triton = [CASES[id] for id in ("kivi2_h64_g8_size64", "innerq2_asym_h64_g7", "dense")]
by_triton += [CASES[id] for id in ("nuq4_h256", "m4n2_size64_h64_g7", "k_dense_v2")]
by_mosaic = [kivi(2, 64, 2), innerq(2, "hybrid", 64), kivi(4, 128, 16), innerq(2, "asym", 256, 8)]
by_mosaic += [looked_up(4, "token", 64), rows(64, 4), turned(kivi(4, 64))]
RUNS = [
    *((case, window, INTERPRETED) for case in by_triton for window in (BEHIND_A_LIMIT, IN_A_RING)),
    (by_triton[1], IN_A_RING, EMULATED),
    *((case, window, MOSAIC) for case in by_mosaic for window in (BEHIND_A_LIMIT, IN_A_RING)),
]
ON_GPUS = [
    pytest.param(case, window, launch, marks=pytest.mark.gpu)
    for cases, launches in (
        (by_triton, (Launch("jnp"), Launch("asm"))),
        (by_mosaic, (Launch(route="mosaic"),)),
    )
    for case in cases
    for window in (BEHIND_A_LIMIT, IN_A_RING)
    for launch in launches
]
USUAL = [RUNS[0], RUNS[5], RUNS[12], RUNS[13], RUNS[16]]


def name(value: Any) -> str | None:
    if isinstance(value, Launch) and value.route == "mosaic":
        return "mosaic" if value.interpret else "gpu-mosaic"
    if isinstance(value, Window):
        return "plain" if value.ring is None else "ring"
    return launch_name(value)


def runs(chosen: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("case", "window", "launch"), chosen, ids=name)


def skip_without_mosaic(launch: Launch) -> None:
    if launch.route == "mosaic" and (reason := route.missing()):
        pytest.skip(reason)


@runs([*some(RUNS, USUAL), *ON_GPUS])
def test_a_window_equals_a_mask(case: KernelCase, window: Window, launch: Launch):
    skip_without_mosaic(launch)
    check(case, window, launch)


@runs(some(RUNS[:4] + RUNS[13:], [RUNS[1], RUNS[14]]))
def test_what_no_query_sees_changes_nothing(case: KernelCase, window: Window, launch: Launch):
    skip_without_mosaic(launch)
    sides, seen = case.sides(window.lengths), window.seen()
    arrays = tuple([spoiled(array, seen) for array in side.arrays] for side in sides)
    expected = outputs(case, window, launch)
    np.testing.assert_array_equal(outputs(case, window, launch, arrays), expected)
    every_place = (CAPACITY,) * len(seen), (0,) * len(seen)
    leaks = outputs(case, Window(*every_place, None, None), launch, arrays)
    assert np.isnan(leaks).any(), "nothing was spoiled: nothing was shown"


@pytest.mark.parametrize("compiled", [Launch("asm"), Launch(route="mosaic")], ids=["asm", "mosaic"])
def test_a_window_lowers_for_cuda(compiled: Launch):
    skip_without_mosaic(compiled)
    case, window = kivi(4, 128), IN_A_RING
    k, v = case.sides(window.lengths)
    rows = jnp.asarray(window.limits, jnp.int32)
    text = lower_for_cuda(
        lambda *args: attend(
            (k.reader, v.reader),
            *args,
            ring=window.ring,
            soft_cap=window.soft_cap,
            tuning=None,
            launch=compiled,
        ),
        *(case.queries(len(window.limits)), k.arrays, v.arrays),
        rows,
        rows,
    )
    assert ("mosaic_gpu" in text) == (compiled.route == "mosaic")


def test_outliers_take_no_lower_limit():
    case = CASES["nuq4_after_rope"]
    with pytest.raises(ValueError, match="CodebookReader takes no lower limits"):
        outputs(case, BEHIND_A_LIMIT, INTERPRETED)
