"""The kernel on Mosaic GPU that merges pieces and windows, interpreted with a detector of races,
against the softmax over all tokens at once."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention.schedule import Pieces
from pallas_kernels.launch import Launch
from tests.exhaustive import some
from tests.pallas_kernels.decode_attention.test_merge import (
    MOSAIC,
    POSITIONS,
    check_pieces,
    merge,
    random_parts,
    random_pieces,
)
from tests.pallas_kernels.harness import and_on_a_gpu
from tests.pallas_kernels.lowering import lower_for_cuda, needs_mosaic

pytestmark = needs_mosaic
ROWS = np.array([33, 0, 640], np.int32)  # one has more pieces than a step of the loop takes
CASES = [(group, programs) for group in (1, 2, 3, 8, 16) for programs in (1, 90)]


@and_on_a_gpu(MOSAIC)
@pytest.mark.parametrize(("group", "programs"), some(CASES, [(1, 1), (8, 90)]), ids=str)
def test_pieces_and_windows_are_the_softmax_of_all_tokens(
    group: int, programs: int, launch: Launch
):
    check_pieces(ROWS, group, programs, launch)


def test_it_lowers_for_cuda_without_triton():
    pieces, _, _ = random_pieces(ROWS, 4, 5)
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
