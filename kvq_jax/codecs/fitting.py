"""Checks of the rows that calibrations are fitted to, and roots of matrices. NumPy."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

# cached rows of a text, or the gradients of the mean loss with respect to them
Rows = Float[np.ndarray, "tokens K H"]


def check_rows(rows: Rows, gradients: Rows, *, weighted: bool = False) -> None:
    """Raise ValueError, in one line, if there are fewer than two tokens, or if rows or gradients
    are not finite.

    weighted: True if gradients weigh the fit, and so must not all be 0.
    """
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} tokens are too few to calibrate with")
    for name, array in (("activations", rows), ("gradients", gradients)):
        if not np.isfinite(array).all():
            raise ValueError(
                f"{name} are not finite ({np.count_nonzero(~np.isfinite(array))} of {array.size})"
            )
    if weighted and not gradients.any():
        raise ValueError("all gradients are 0: no channel can be weighted")


def square_roots(
    matrices: Float[np.ndarray, "K H H"],
) -> tuple[Float[np.ndarray, "K H H"], Float[np.ndarray, "K H H"]]:
    """Return M^1/2 and M^-1/2 of symmetric matrices. Eigenvalues count as at least 1e-12 of the
    largest one."""
    eigenvalues, basis = np.linalg.eigh(matrices)
    root = np.sqrt(np.maximum(eigenvalues, eigenvalues[:, -1:] * 1e-12))
    transposed = np.swapaxes(basis, 1, 2)
    return basis * root[:, None] @ transposed, basis / root[:, None] @ transposed
