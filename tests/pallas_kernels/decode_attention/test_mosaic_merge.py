"""The kernel on Mosaic GPU that merges pieces and windows, interpreted with a detector of races,
against the softmax over all tokens at once."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention.partial_attention import Splits
from pallas_kernels.decode_attention.schedule import Pieces, Schedule
from pallas_kernels.launch import Launch
from pallas_kernels.mosaic import route
from tests.exhaustive import some
from tests.float64 import row_errors
from tests.pallas_kernels.decode_attention.test_merge import (
    BATCH,
    CHANNELS,
    HEADS,
    POSITIONS,
    merge,
    pieces_of,
    random_parts,
)
from tests.pallas_kernels.harness import and_on_a_gpu
from tests.pallas_kernels.lowering import lower_for_cuda

pytestmark = pytest.mark.skipif(bool(route.missing()), reason=route.missing() or "")
INTERPRETED = Launch(interpret=True, route="mosaic")
ROWS = np.array([33, 0, 640], np.int32)  # one has more pieces than a step of the loop takes
CASES = [(group, programs) for group in (1, 2, 3, 8, 16) for programs in (1, 90)]


def random_pieces(group: int, programs: int) -> tuple[Pieces, np.ndarray, np.ndarray]:
    """Return pieces with NaN in places without a unit, and the scores (-inf beyond a row's limit)
    and values of all tokens."""
    rng, padded = np.random.default_rng(1), 1 << (group - 1).bit_length()
    shape = BATCH, HEADS, int(ROWS.max())
    score, value = rng.normal(size=(*shape, padded)) * 4, rng.normal(size=(*shape, CHANNELS))
    pieces = pieces_of(ROWS, Schedule(programs, 4, BATCH, HEADS), score, value)
    live = np.arange(shape[2])[:, None] < ROWS[:, None, None, None]
    return pieces, np.where(live, score, -np.inf)[..., :group], value


@and_on_a_gpu(INTERPRETED)
@pytest.mark.parametrize(("group", "programs"), some(CASES, [(1, 1), (8, 90)]), ids=str)
def test_pieces_and_windows_are_the_softmax_of_all_tokens(
    group: int, programs: int, launch: Launch
):
    [window], *of_window = random_parts((1,), group)
    pieces, *of_body = random_pieces(group, programs)
    assert np.isnan(np.asarray(pieces.l)).any(), "no place is free: nothing is shown of those"
    scores, values = (np.concatenate(two, axis=2) for two in zip(of_window, of_body, strict=True))
    part, out = merge([window, pieces], POSITIONS, group, jnp.float32, launch)

    def attention(scores: np.ndarray) -> np.ndarray:
        weights = np.exp2(scores)
        mean = weights / weights.sum(axis=2, keepdims=True)
        return np.einsum("bktg,bkth->bkgh", mean, values)

    wanted = attention(scores)
    assert row_errors(part.o / part.l, wanted).max() < 1e-5
    mass = np.exp(np.asarray(part.m[..., 0], float)) * part.l[..., 0]
    np.testing.assert_allclose(mass, np.exp2(scores).sum(axis=2), rtol=1e-4)
    assert row_errors(out[:2], wanted[:2]).max() < 1e-5
    assert np.isnan(out[2]).all(), "a row past its capacity has a number"
    scores[:, :, np.argmax(scores[0, 0, :, 0])] = -np.inf
    assert row_errors(out[:1], attention(scores)[:1]).max() > 1e-3, "a token fewer would pass"


def test_no_token_is_zero():
    [part], _, _ = random_parts((3,), 2)
    empty = [Splits(*(a[:, :, 2:] for a in part))]
    part, out = merge(empty, POSITIONS, 2, jnp.bfloat16, INTERPRETED)
    assert out.dtype == jnp.bfloat16
    assert not np.asarray(out[:2], np.float32).any()
    assert not np.asarray(part.l).any()


def test_it_lowers_for_cuda_without_triton():
    pieces, _, _ = random_pieces(4, 5)
    [window], _, _ = random_parts((1,), 4)
    arrays = pieces.m, pieces.l, pieces.o, pieces.limits

    def text(launch: Launch) -> str:
        def function(window, arrays, row):
            parts = [window, Pieces(*arrays, pieces.schedule)]
            return merge(parts, row, 4, jnp.bfloat16, launch)

        return lower_for_cuda(function, window, arrays, POSITIONS)

    texts = [text(launch) for launch in (Launch(route="mosaic"), Launch())]
    assert ["mosaic_gpu" in text for text in texts] == [True, False]
    assert ["triton" in text for text in texts] == [False, True]
