"""Arrays of a warp as Mosaic GPU's kernels hold them: a register of each lane for a matrix."""

import numpy as np

WARPS, SIDE = 4, 8


def registers(words: np.ndarray) -> np.ndarray:
    """Return 16-bit numbers [rows, columns] by matrix: lanes [8, 4] of two neighbours each."""
    rows, columns = (size // SIDE for size in words.shape)
    cut = words.reshape(rows, SIDE, columns, SIDE).swapaxes(1, 2)
    grid = np.empty((rows, columns), dtype=object)
    for place in np.ndindex(grid.shape):
        grid[place] = np.ascontiguousarray(cut[place]).view(np.uint32)
    return grid


def numbers(grid: np.ndarray) -> np.ndarray:
    """Return the 16-bit numbers [rows, columns] of registers."""
    rows = [np.concatenate([lanes.view(np.uint16) for lanes in row], axis=1) for row in grid]
    return np.concatenate(rows)
