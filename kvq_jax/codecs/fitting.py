"""What every calibration asks of the rows that it is fitted to."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

Rows = Float[np.ndarray, "tokens K H"]  # cached rows of a text, or the gradients of the mean loss with respect to them


def check_rows(rows: Rows, gradients: Rows) -> None:
    """Raise ValueError, in one line, where there are fewer than two tokens, or rows or gradients are not finite."""
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} tokens are too few to calibrate with")
    for name, array in (("activations", rows), ("gradients", gradients)):
        if not np.isfinite(array).all():
            raise ValueError(f"{name} are not finite ({np.count_nonzero(~np.isfinite(array))} of {array.size})")
