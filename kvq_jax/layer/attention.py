"""The attention of one layer: everything that the scores and the softmax depend on besides queries,
keys and values.

    s_t = c tanh(scale q . k_t / c)
    out = sum_t exp(s_t) v_t / (exp(sink) + sum_t exp(s_t))         over p - window < t <= p

for a query at position p. Without a soft cap, s_t = scale q . k_t. Sources: Child et al., Sparse
Transformers (windows); Gemma Team, Gemma 2 (soft cap); the gpt-oss model card (learned sinks).
kvq_jax/attention/logits.py computes s_t. This file imports no JAX: configurations are read by it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

# of the numbers below, which fp32 holds with their squares
MIN_NUMBER, MAX_NUMBER = 2.0**-62, 2.0**62


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention of one layer. Hashable. `Attention()` is the plain one.

    Attributes:
        window: the number of tokens that a query sees, itself included, or None for all: a query at
            position p sees the positions s with p - window < s <= p.
        scale: the factor of the scores, or None for head_dim ** -0.5.
        soft_cap: the bound c of the scores, c * tanh(score / c), or None.
        sinks: True if each query head has a learned logit that takes part in the softmax and has no
            value.

    Raises:
        ValueError: in one line, for a window, scale or cap that is not positive and finite, or
            beyond 2**-62 to 2**62.
    """

    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        for name, plain in (("window", operator.index), ("scale", float), ("soft_cap", float)):
            value = getattr(self, name)
            if value is None:
                continue
            try:
                number = 0 if isinstance(value, bool | str) else plain(value)
            except (TypeError, ValueError, OverflowError):
                number = 0
            if not MIN_NUMBER <= number < MAX_NUMBER:
                raise ValueError(
                    f"attention {name}={value!r} must be positive and finite, or None: from 2**-62"
                    " to 2**62"
                )
            if not isinstance(value, int):  # a scalar of NumPy or JAX
                object.__setattr__(self, name, number)
        if not isinstance(self.sinks, bool):
            raise ValueError(f"attention sinks={self.sinks!r} must be True or False")

    def __str__(self) -> str:
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return ", ".join(f"{name}={value}" for name, value in fields if value) or "plain"

    def factor(self, head_dim: int) -> float:
        """Return the scale, whatever it is."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def within(self, capacity: int) -> Attention:
        """Return the attention in sequences of at most `capacity` tokens: a window that
        holds all of them is none."""
        if self.window is None or self.window < capacity:
            return self
        return dataclasses.replace(self, window=None)


PLAIN = Attention()


def of_layer(layers: Sequence[Attention], layer: int) -> Attention:
    """Return the attention of one layer, plain if no layer says what its attention is."""
    return layers[layer] if layers else PLAIN


def to_json(layers: Sequence[Attention]) -> list[dict[str, Any]]:
    """Return plain values from which `from_json` makes the same attentions."""
    return [dataclasses.asdict(attention) for attention in layers]


def from_json(layers: Any) -> tuple[Attention, ...]:
    """Return attentions from plain values. Raise TypeError or ValueError for others."""
    return tuple(Attention(**fields) for fields in layers)
