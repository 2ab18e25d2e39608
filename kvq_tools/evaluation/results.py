"""Results of an evaluation: numbers of every scored token and of the whole text.

    perplexity    = exp(mean nats)
    bits per byte = sum nats / (ln 2 * UTF-8 bytes of the scored tokens)

Means are taken in float64 on the host.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jaxtyping import Bool, Float, Int

from kvq_jax.cache import display
from kvq_jax.cache.spec import CacheSpec
from kvq_tools.evaluation.defaults import BUCKETS


@dataclasses.dataclass(frozen=True)
class Quality:
    """Means over the scored tokens: all but the first of each row, or all after the prompt and the
    first token that follows it."""

    tokens: int
    nats: float  # -log p(token)
    kl: float  # KL(p || q) of the full-precision model's distribution p and the cache's q
    agreement: float  # share of predictions whose likeliest token is the full-precision model's

    @property
    def perplexity(self) -> float:
        return exp(self.nats)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Tokens predicted at positions first .. last of their window (a position is the number of
    tokens before it). Means, nan if there are no such tokens, and the number of top-1 flips."""

    first: int
    last: int
    tokens: int
    exact_nats: float
    nats: float
    kl: float
    flips: int


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The predictions of a text through one cache, compared with the full-precision model's. The
    arrays have one entry per scored token, in the order of the text.

    spec, mode    the cache and how it was run
    window        tokens of a window, which is the cache's capacity
    prompt        tokens of each window that were prefilled. Neither they nor the next one is scored
    index         the token's place in the text
    position      tokens that its window holds before it
    exact_nats    -log p(token) of the full-precision model
    nats, kl      -log q(token) through the cache, and KL(p || q) of the whole distributions
    agrees        True if the likeliest token was the same
    utf8_bytes    of the scored tokens; None if the tokens' bytes were not given
    """

    spec: CacheSpec
    mode: str
    window: int
    prompt: int
    index: Int[np.ndarray, "n"]
    position: Int[np.ndarray, "n"]
    exact_nats: Float[np.ndarray, "n"]
    nats: Float[np.ndarray, "n"]
    kl: Float[np.ndarray, "n"]
    agrees: Bool[np.ndarray, "n"]
    utf8_bytes: int | None

    @property
    def tokens(self) -> int:
        return self.index.size

    @property
    def finite(self) -> bool:
        """Return False if the cache or the full-precision model computed nan or inf for some
        token."""
        return bool(
            np.isfinite(self.nats).all()
            and np.isfinite(self.kl).all()
            and np.isfinite(self.exact_nats).all()
        )

    @property
    def mean_nats(self) -> float:
        return _mean(self.nats)

    @property
    def perplexity(self) -> float:
        return exp(self.mean_nats)

    @property
    def exact_perplexity(self) -> float:
        """Return the perplexity of the model without a cache."""
        return exp(_mean(self.exact_nats))

    @property
    def bits_per_byte(self) -> float | None:
        return self._per_byte(self.nats)

    @property
    def exact_bits_per_byte(self) -> float | None:
        return self._per_byte(self.exact_nats)

    @property
    def mean_kl(self) -> float:
        return _mean(self.kl)

    @property
    def window_kl(self) -> list[float]:
        """Return the mean KL of each window, in the order of the text. The last one is left out if
        it scores fewer tokens than the one before and less than half as many as the fullest: it
        would count as much as they do."""
        windows, counts = np.unique(self.index - self.position, return_counts=True)
        short = windows.size > 1 and counts[-1] < min(counts[-2], counts.max() / 2)
        full = windows[:-1] if short else windows
        return [_mean(self.kl[self.index - self.position == first]) for first in full]

    @property
    def agreement(self) -> float:
        return _mean(self.agrees)

    def __repr__(self) -> str:
        return display.line("Evaluation", {"": self.spec} | self._facts())

    def _repr_html_(self) -> str:
        return display.table("Evaluation", {"spec": self.spec} | self._facts())

    def _facts(self) -> dict[str, object]:
        return {
            "mode": self.mode,
            "tokens": self.tokens,
            "perplexity": f"{self.perplexity:.3f}",
            "KL": f"{self.mean_kl:.5f}",
            "top-1 agreement": f"{self.agreement:.2%}",
        }

    @property
    def flips(self) -> Int[np.ndarray, "flips"]:
        """Return the tokens' places in the text at which the cache's likeliest token is not the
        full-precision model's."""
        return self.index[~self.agrees]

    def quality(self) -> Quality:
        return Quality(self.tokens, self.mean_nats, self.mean_kl, self.agreement)

    def by_position(self, buckets: int = BUCKETS) -> tuple[Bucket, ...]:
        """Return the numbers of equal parts of the window, at most `buckets` parts."""
        width = -(-self.window // buckets)
        return tuple(
            self._bucket(at, min(at + width, self.window) - 1)
            for at in range(0, self.window, width)
        )

    def _bucket(self, first: int, last: int) -> Bucket:
        inside = (self.position >= first) & (self.position <= last)
        exact_nats, nats, kl = (_mean(of[inside]) for of in (self.exact_nats, self.nats, self.kl))
        return Bucket(
            first, last, int(inside.sum()), exact_nats, nats, kl, int((~self.agrees[inside]).sum())
        )

    def _per_byte(self, nats: Float[np.ndarray, "n"]) -> float | None:
        if self.utf8_bytes:
            return float(nats.sum(dtype=np.float64)) / (math.log(2) * self.utf8_bytes)
        return None


def finite(value: float | None) -> float | None:
    """Return the value, or None if it is not finite: JSON has neither inf nor nan."""
    return value if value is not None and math.isfinite(value) else None


def exp(nats: float) -> float:
    """Return exp(nats), or inf if that is too large for a float."""
    with np.errstate(over="ignore"):
        return float(np.exp(nats))


def _mean(values: np.ndarray) -> float:
    return float(values.mean(dtype=np.float64)) if values.size else math.nan
