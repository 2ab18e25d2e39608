"""The levels of TurboQuant: the scalar quantizer of least mean squared error for one coordinate of
a random unit vector.

    f(t) = c (1 - t^2)^((d - 3) / 2),  -1 <= t <= 1
    level_i = E[t | t between the midpoints around level_i]

f is the density of a coordinate in d dimensions (a Beta density), and the second line is Lloyd and
Max's condition. A conditional mean is a first moment over a mass. The first has a closed form,
-c (1 - t^2)^((d - 1) / 2) / (d - 1). The second is summed on a grid. Lloyd's iteration from
quantiles converges to the one optimum, since f is log-concave for d >= 3. At 8 bits MAX_TURNS end
it before that, with a squared error about 0.2 % above the least. Source: Zandieh et al.,
TurboQuant, Lemma 1 and section 3.1; Max (1960), Lloyd (1982).
"""

from __future__ import annotations

import functools

import numpy as np

GRID = 1 << 16
TOLERANCE = 1e-12
MAX_TURNS = 20_000


@functools.cache
def sphere_levels(bits: int, channels: int) -> tuple[float, ...]:
    """Return 2^bits sorted levels in (-1, 1), symmetric around 0. Raises ValueError for fewer than
    3 channels."""
    if channels < 3:
        raise ValueError(
            f"head_dim {channels}: a coordinate of a random unit vector has this density from 3"
            " channels on"
        )
    t = np.linspace(-1, 1, GRID + 1)
    density = (1 - t**2) ** ((channels - 3) / 2)
    mass = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)]) * (t[1] - t[0])

    def mass_to(x: np.ndarray) -> np.ndarray:
        return np.interp(x, t, mass)

    def moment_to(x: np.ndarray) -> np.ndarray:
        return -((1 - x**2) ** ((channels - 1) / 2)) / (channels - 1)

    count = 2**bits
    levels = np.interp((np.arange(count) + 0.5) / count * mass[-1], mass, t)
    for _ in range(MAX_TURNS):
        ends = np.concatenate([[-1], (levels[1:] + levels[:-1]) / 2, [1]])
        new = np.diff(moment_to(ends)) / np.diff(mass_to(ends))
        new = (new - new[::-1]) / 2
        if np.abs(new - levels).max() < TOLERANCE:
            break
        levels = new
    return tuple(float(level) for level in levels)
