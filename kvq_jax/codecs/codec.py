"""The interface of codecs: how one side of one layer becomes a compressed body, and how attention
reads it.

A codec is a frozen dataclass of resolved static values (bits, group size, head dim). Its functions
are pure:

    rows, body, quantize, dequantize, vectors      the cached rows, their arrays, and the way back
    query, scores, weighted                        attention over a chunk of the body
    statistics, facts, kernels, learning           values: numbers that a prompt fixes, promises to
                                                   others, other readers of the body, parameters

Only `rows`, `body`, `quantize` and `dequantize` must be written. Attention then dequantizes. Write
`query`, `scores` and `weighted` if the algebra does better than dequantizing every element: a scale
times a partial dot product, a table look-up that query heads share. Nobody looks at a codec's
class. Accounting, commands and kernels ask its values.

In every signature, `params` are the method's parameters for this layer and side (calibrated tables,
bases; `()` if it has none), and `stats` its prompt statistics (`()` likewise).
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Literal, NamedTuple

from jaxtyping import Array, Float, Int

from kvq_jax.codecs.dots import dot_rows, weigh_rows
from kvq_jax.codecs.facts import Facts
from kvq_jax.codecs.kernels import Kernels, unserved
from kvq_jax.codecs.learning import Learning
from kvq_jax.codecs.prompt_statistics import Statistics
from kvq_jax.types.array_types import CachedRows, LayerInputs, RowsBKTH, Tree
from kvq_jax.types.rope import Rope, rotate

Side = Literal["k", "v"]


class TokensAt(NamedTuple):
    """The source of the rows that are quantized.

    positions: [B, T] int32, the tokens' indices in their sequences.
    prefill: True for tokens of a prompt, False for generated ones. Static.
    """

    positions: Int[Array, "#B T"]
    prefill: bool


class Codec(abc.ABC):
    """The quantizer of one side (K or V) of one layer's cache.

    Laws, tested over the table of methods:

    - `quantize` treats whole blocks independently: quantize(a ++ b) == quantize(a) ++ quantize(b)
      along tokens.
    - Rows of the batch are independent: a prompt has the same codes alone and inside a batch.
    - `scores(query(q), body) == q . vectors(dequantize(body))` and `weighted(p, body) == p .
      vectors(dequantize(body))`, to fp32 rounding.
    - An entry that is inf, NaN or beyond the range of the scales decodes to something finite and
      changes no other token's codes.
    - A wrapper that changes nothing changes nothing (`wrapper.Wrapper`).
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuse a class that defines arrays but takes its facts from one that knows others, or
        none."""
        super().__init_subclass__(**arguments)
        source = next(base for base in cls.__mro__ if "facts" in vars(base))
        if "body" in vars(cls) and source is not cls and "body" in vars(source):
            raise TypeError(
                f"{cls.__name__} defines body, so it must define facts too: those of"
                f" {source.__name__} say nothing of its arrays (return Facts() if there is nothing"
                " to say)"
            )

    @abc.abstractmethod
    def rows(self, params: Tree, inputs: LayerInputs) -> CachedRows:
        """Return the rows that are cached for new tokens: exact in the windows, quantized in the
        body."""

    @abc.abstractmethod
    def body(self, batch: int, heads: int, tokens: int) -> Tree:
        """Describe the body's arrays for `tokens` tokens, as a tree of `stored.BodySpec`."""

    @abc.abstractmethod
    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> Tree:
        """Quantize whole blocks of rows, whose tokens stand `at` these positions."""

    @abc.abstractmethod
    def dequantize(self, params: Tree, stats: Tree, body: Tree) -> CachedRows:
        """Return the rows that a body stands for, fp32 unless they are stored exactly."""

    def vectors(
        self, params: Tree, rows: CachedRows, positions: Int[Array, "#B T"], rope: Rope | None
    ) -> RowsBKTH:
        """Return keys after RoPE, or values, from cached rows at these positions."""
        return rows

    def query(self, params: Tree, stats: Tree, q: Float[Array, "B K R H"]) -> Tree:
        """Return the form of the queries that `scores` takes, computed once for all chunks.

        R = G * T query rows share a KV head. q is as the model made it. The caller scales scores.
        """
        return q

    def scores(
        self,
        params: Tree,
        stats: Tree,
        query: Tree,
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R C"]:
        """Return q . k for a chunk of the body, fp32."""
        keys = self.vectors(params, self.dequantize(params, stats, body), positions, rope)
        return dot_rows(query, keys)

    def weighted(
        self,
        params: Tree,
        stats: Tree,
        weights: Float[Array, "B K R C"],
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R H"]:
        """Return weights . v for a chunk of the body, fp32."""
        values = self.vectors(params, self.dequantize(params, stats, body), positions, rope)
        return weigh_rows(weights, values)

    @property
    def statistics(self) -> Statistics:
        """The statistics that a prompt fixes for the rest of its sequence, none for most codecs."""
        return Statistics()

    @property
    def facts(self) -> Facts:
        """The facts that the library may rely on."""
        return Facts()

    @property
    def kernels(self) -> Kernels:
        """The kernels that read and write the body, or the reason why none does."""
        name = type(self).__name__
        return unserved(f"{name} has no kernel", f"{name} has no CPU kernel")

    @property
    def learning(self) -> Learning:
        """The parameters that the codec needs, and their sources. Most codecs need none."""
        return Learning()

    def describe(self) -> dict[str, Any]:
        """Return the codec's name and its resolved options, without tables and arrays."""
        return {"codec": type(self).__name__, **_plain_fields(self)}


def _plain_fields(value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        entry = getattr(value, field.name)
        if dataclasses.is_dataclass(entry):
            plain |= _plain_fields(entry)
        elif isinstance(entry, str | int | float) and field.name != "side":
            plain[field.name] = entry
    return plain


class MissingInputError(ValueError):
    """A method reads an input of the layer that the caller did not supply."""


def side_rows(inputs: LayerInputs, side: Side, pre_rope: bool = False) -> RowsBKTH:
    """Return the rows that a method keeps for a side. Raises MissingInputError, naming them, if
    the caller did not supply them."""
    rows = inputs.v if side == "v" else inputs.k_pre if pre_rope else inputs.k_rot
    if rows is None:
        raise MissingInputError("this method caches keys before RoPE and needs k_pre: it is None")
    return rows


def rotate_keys(rows: RowsBKTH, positions: Int[Array, "#B T"], rope: Rope | None) -> RowsBKTH:
    """Return keys after RoPE from keys that were cached before it. Raises ValueError without
    `rope`."""
    return rotate(rows, positions, required_rope(rope))


def required_rope(rope: Rope | None) -> Rope:
    """Return `rope`. Raises ValueError if the caller did not supply it."""
    if rope is None:
        raise ValueError("keys cached before RoPE need the model's rope to be read: it is None")
    return rope
