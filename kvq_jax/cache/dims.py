"""The dimensions of a model that shape its caches."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from kvq_jax.files.json_text import parse_json
from kvq_jax.layer import attention as layer_attention
from kvq_jax.layer.attention import Attention
from kvq_jax.layer.known_attention import attention_of
from kvq_jax.layer.known_heads import head_dim_of, heads_of
from kvq_jax.types.array_types import ModelDims
from kvq_jax.types.integers import integer, positive


class LayerHeads(NamedTuple):
    """The heads of one layer: K, the number of KV heads, and H, the channels of a head."""

    kv_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True)
class CacheDims:
    """The dimensions of a model that shape its caches. Hashable.

    Attributes:
        num_hidden_layers: L, the number of layers.
        num_attention_heads: N, the number of query heads.
        num_key_value_heads: K, the number of key/value heads.
        head_dim: H, the channels of a head.
        hidden_size: D, the width of the model.
        attention: the attention of each layer. Empty if it is plain in all of them.
        layer_heads: (K, H) of each layer. Empty if all have the K and H above.
        kv_scales: True if the model's checkpoint brings the scales of an fp8 cache.
    """

    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_size: int
    attention: tuple[Attention, ...] = ()
    layer_heads: tuple[LayerHeads, ...] = ()
    kv_scales: bool = False

    def __post_init__(self) -> None:
        """Make integers of NumPy Python's, which files keep, and lists tuples, which can be
        hashed."""
        if isinstance(self.attention, Attention):
            raise ValueError(
                "attention must be a kvq.Attention for each layer, got one: give"
                " (attention,) * num_hidden_layers"
            )
        for name in ("attention", "layer_heads"):
            if not isinstance(getattr(self, name), Iterable):
                given = type(getattr(self, name)).__name__
                raise ValueError(f"{name} must have an entry for each layer, or none, got {given}")
        plain = {name: _plain(getattr(self, name)) for name in SIZES}
        heads = map(_layer_heads, self.layer_heads)
        plain |= {"attention": tuple(self.attention), "layer_heads": tuple(heads)}
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    def at(self, layer: int) -> CacheDims:
        """Return the dimensions with the K and H of one layer for all of them."""
        if not self.layer_heads:
            return self
        kv_heads, head_dim = self.layer_heads[layer]
        return dataclasses.replace(
            self, num_key_value_heads=kv_heads, head_dim=head_dim, layer_heads=()
        )

    def attending(self, attention: Attention) -> CacheDims:
        """Return the dimensions with the same attention in all layers."""
        return dataclasses.replace(self, attention=(attention,) * self.num_hidden_layers)

    def to_json(self) -> str:
        """Return the text from which `from_json` makes the same dimensions. Files keep it."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in SIZES}
        if self.attention:
            fields["attention"] = layer_attention.to_json(self.attention)
        if self.layer_heads:
            fields["layer_heads"] = self.layer_heads
        if self.kv_scales:
            fields["kv_scales"] = True
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> CacheDims:
        """Return the dimensions of a file. Raise TypeError or ValueError if it has none."""
        fields = parse_json(text)
        if not isinstance(fields, dict):
            raise TypeError(f"dimensions are an object, got {text[:40]!r}")
        attention = layer_attention.from_json(fields.pop("attention", ()))
        heads = tuple(LayerHeads(*layer) for layer in fields.pop("layer_heads", ()))
        dims = cls(**fields, attention=attention, layer_heads=heads)
        if not isinstance(dims.kv_scales, bool):
            raise TypeError(f"kv_scales={dims.kv_scales!r} must be true or false")
        return dims


# the fields of CacheDims that are numbers
SIZES = tuple(field.name for field in dataclasses.fields(CacheDims) if field.type == "int")


def _layer_heads(sizes: Any) -> LayerHeads:
    if not isinstance(sizes, Iterable) or len(pair := tuple(sizes)) != 2:
        raise ValueError(f"layer_heads must be (K, H) for each layer, got {sizes!r} for one")
    return LayerHeads(*map(_plain, pair))


def _plain(size: Any) -> Any:
    return int(size) if isinstance(size, np.integer) else size


def dims_of(config: ModelDims) -> CacheDims:
    """Return the dimensions of a model's config that shape its caches, and the attention of its
    layers. Raise NotImplementedError if kvq does not compute it, and ValueError if the config lacks
    a dimension."""
    if isinstance(config, CacheDims):
        return config
    heads = tuple(LayerHeads(*layer) for layer in heads_of(config))
    first = dict(zip(("num_key_value_heads", "head_dim"), heads[0], strict=True)) if heads else {}

    def size(name: str) -> int:
        stated = first[name] if name in first else getattr(config, name, None)
        if stated is None and name == "head_dim":
            stated = head_dim_of(config)
        if stated is None:
            raise ValueError(
                f"a config of type {type(config).__name__} has no {name}: pass kvq.CacheDims in its"
                " place"
            )
        return int(stated)

    sizes = [size(name) for name in SIZES]
    return CacheDims(
        *sizes,
        attention=attention_of(config),
        layer_heads=heads,
        kv_scales=bool(getattr(config, "brings_kv_scales", False)),
    )


def check_layer(layer: int, dims: CacheDims) -> None:
    """Raise ValueError if the model has no layer of this number."""
    layers = positive("num_hidden_layers", dims.num_hidden_layers)
    if integer(layer, 0) is None or layer >= layers:
        raise ValueError(f"{layer=}, but the model has layers 0 to {layers - 1}")


def check_sizes(dims: CacheDims) -> None:
    """Raise ValueError if a size is not positive, KV heads do not divide the query heads, or the
    attention of a layer is none."""
    for attention in dims.attention:
        if not isinstance(attention, Attention):
            raise ValueError(
                f"attention must be a kvq.Attention for each layer, got {type(attention).__name__}"
            )
    for name in SIZES:
        positive(name, getattr(dims, name))
    if not dims.layer_heads:
        if dims.num_attention_heads % dims.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={dims.num_key_value_heads} must divide"
                f" num_attention_heads={dims.num_attention_heads}: equally many query heads read"
                " each KV head"
            )
        return
    if len(dims.layer_heads) != dims.num_hidden_layers:
        raise ValueError(
            f"layer_heads has {len(dims.layer_heads)} entries for {dims.num_hidden_layers} layers:"
            " give (K, H) for each, or none if all are alike"
        )
    for layer, heads in enumerate(dims.layer_heads):
        whole = all(isinstance(size, int) and size > 0 for size in heads)
        if not whole or dims.num_attention_heads % heads[0]:
            raise ValueError(
                f"layer_heads of layer {layer} are {tuple(heads)}: K must divide"
                f" {dims.num_attention_heads} query heads, and H be positive"
            )
