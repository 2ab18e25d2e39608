"""The spec of a cache and its one-line grammar.

    SPEC    = METHOD | k=METHOD+v=METHOD[+cache:OPTIONS]
    METHOD  = name[:OPTIONS]                         OPTIONS = option=value[,option=value ...]
    preset=NAME stands for a method's named set of options. Options given with it override it
    values  : 2 | 0.01 | true | hybrid | 0-2/31 (a list of layers) | 4@0-2/2 (4 in layers 0 to 2,
            else 2)

`sink`, `recent`, `block`, `skip_layers` and `subtract_bias` belong to the cache. In a single METHOD
they are written among its options. In a mixed cache those that a value's preset names override
those of a key's, and `cache:` both. `parse(str(spec)) == spec`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from kvq_jax.cache.dims import CacheDims
from kvq_jax.cache.method_text import (
    MAX_LAYERS,
    check_method,
    check_ranges,
    method_text,
    named,
    read_method,
    read_range,
    read_value,
    split_options,
    unknown_hint,
    with_preset,
    write_layers,
)
from kvq_jax.codecs.bias_subtracting import OPTION, BiasSubtracting
from kvq_jax.codecs.codec import Codec
from kvq_jax.layer.attention import of_layer
from kvq_jax.layer.plan import LayerPlan
from kvq_jax.layer.regions import Regions
from kvq_jax.methods.base import CACHE_OPTIONS, Method
from kvq_jax.methods.dense import Dense
from kvq_jax.types.array_types import ModelDims
from kvq_jax.types.integers import integer


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """The description of a cache: the methods of both sides and the windows. Build it with `parse`.

    Frozen and hashable, so it can be a static argument of a jitted function.

    Attributes:
        k: the method of keys.
        v: the method of values.
        sink: the number of first tokens that stay in full precision.
        recent: the least number of newest tokens in full precision.
        block: the number of tokens that leave the recent window together.
        skip_layers: the layers that stay in full precision.
        subtract_bias: keys are cached without k_proj's bias (codecs/bias_subtracting.py).
    """

    k: Method
    v: Method
    sink: int
    recent: int
    block: int
    skip_layers: tuple[int, ...] = ()
    subtract_bias: bool = False

    def __post_init__(self) -> None:
        """Refuse what `parse` would refuse: the text of every spec is read back."""
        check_method("k", self.k)
        check_method("v", self.v)
        for option in ("sink", "recent", "block"):
            minimum = int(option == "block")
            size = integer(value := getattr(self, option), minimum)
            if size is None or size >= 1 << 31:
                raise ValueError(f"{option}={value} must be at least {minimum} and below 2**31")
            object.__setattr__(self, option, size)  # an integer of NumPy has another type
        given = {integer(layer, 0) for layer in self.skip_layers}
        layers = [layer for layer in given if layer is not None and layer < MAX_LAYERS]
        if len(layers) < len(given):
            raise ValueError(
                f"skip_layers={self.skip_layers} must be layers from 0 to {MAX_LAYERS - 1}"
            )
        object.__setattr__(self, "skip_layers", tuple(sorted(layers)))

    def __str__(self) -> str:
        default = _defaults(self.k, self.v)
        cache = [
            f"{o}={getattr(self, o)}"
            for o in ("sink", "recent", "block")
            if getattr(self, o) != getattr(default, o)
        ]
        if self.skip_layers:
            cache.append(f"skip_layers={write_layers(self.skip_layers)}")
        if self.subtract_bias:
            cache.append(OPTION)
        k, v = method_text(self.k), method_text(self.v)
        if self.k == self.v:
            separator = "," if ":" in k else ":"
            return k + separator + ",".join(cache) if cache else k
        return f"k={k}+v={v}" + (f"+cache:{','.join(cache)}" if cache else "")

    def _check(self) -> None:
        if self.k != self.v:
            _check_value_method(self.v)
        for method in (self.k, self.v):
            first = method.carries_from()
            late = [] if first is None else [layer for layer in self.skip_layers if layer >= first]
            if late:
                raise ValueError(
                    f"skip_layers names layer {late[0]}: layers in full precision must lie before"
                    f" layer {first}, where {method.name} starts"
                )

    def _without_bias(self, keys: Codec) -> Codec:
        if keys.facts.joint and not keys.facts.rebuilds:
            raise ValueError(
                f"{OPTION} has no meaning for keys of {method_text(self.k)}, which share a row"
                " with values; leave it out"
            )
        if keys.facts.exact or keys.facts.rebuilds:
            why = (
                "caches no keys and rebuilds them with their bias"
                if keys.facts.rebuilds
                else "keeps keys in full precision"
            )
            raise ValueError(
                f"{OPTION} has no meaning for keys of {method_text(self.k)}, which {why}; leave"
                " it out"
            )
        return BiasSubtracting(keys)

    @property
    def exact(self) -> bool:
        """Return True if neither method quantizes anything, whatever its options."""
        return self.k.exact and self.v.exact

    @property
    def reads_queries(self) -> bool:
        """Return True if a method needs the queries of new tokens."""
        return self.k.reads_queries or self.v.reads_queries

    def regions(self, capacity: int, window: int | None = None) -> Regions:
        """Return the regions of a layer of `capacity` tokens. With a sliding window it has no sink,
        whose tokens would be out of reach, and exact tokens only within the window."""
        if window is None:
            return Regions(self.sink, self.recent, self.block, capacity)
        return Regions(0, min(self.recent, window), self.block, capacity, window)

    def layer(self, index: int, dims: ModelDims, capacity: int, dtype: str) -> LayerPlan:
        """Return the plan of one layer: resolved codecs and regions. Raise ValueError if the
        options do not fit the model."""
        self._check()
        dims = dims.at(index) if isinstance(dims, CacheDims) else dims
        k, v = (Dense(), Dense()) if index in self.skip_layers else (self.k, self.v)
        k_codec = k.resolved("k", index, dims, self.block, dtype)
        v_codec = v.resolved("v", index, dims, self.block, dtype)
        if (k_codec.facts.joint or v_codec.facts.joint) and k != v:
            joint = k if k_codec.facts.joint else v
            raise ValueError(
                f"{str(self)!r}: {method_text(joint)} keeps one body for keys and values of this"
                " model; use it for both"
            )
        if self.subtract_bias and index not in self.skip_layers:
            k_codec = self._without_bias(k_codec)
        attention = of_layer(getattr(dims, "attention", ()), index).within(capacity)
        if k_codec.facts.cross_layer and attention.window is not None:
            raise ValueError(
                f"{str(self)!r} rebuilds a token from the differences of all layers below, and"
                f" layer {index} keeps only a window of {attention.window} tokens; take another"
                " method, such as 'xquant'"
            )
        return LayerPlan(
            k_codec,
            v_codec,
            self.regions(capacity, attention.window),
            dims.num_key_value_heads,
            dims.head_dim,
            attention,
        )


def _defaults(k: Method, v: Method) -> CacheSpec:
    a, b = k.windows(), v.windows()
    return CacheSpec(k, v, max(a.sink, b.sink), max(a.recent, b.recent), math.lcm(a.block, b.block))


def parse(text: str | CacheSpec) -> CacheSpec:
    """Return the spec that a text describes.

        parse("kivi:bits=2,recent=128")
        parse("k=kivi:bits=4+v=kivi:bits=2+cache:sink=4")

    Args:
        text: METHOD, or k=METHOD+v=METHOD[+cache:OPTIONS], with METHOD = name[:OPTIONS] and
            OPTIONS = option=value[,option=value ...]. A `CacheSpec` is returned unchanged.

    Raises:
        ValueError: in one line, which names the unknown part and lists the allowed ones.
    """
    if isinstance(text, CacheSpec):
        return text
    if not isinstance(text, str):
        raise ValueError(f"a cache is a text such as 'kivi:bits=2', got {type(text).__name__}")
    parts = re.split(r"\+(?![0-9])", text.strip())  # 1e+16 is a number
    if len(parts) == 1 and parts[0][:2] not in ("k=", "v="):
        name, options = split_options(parts[0])
        options = with_preset(name, options)
        cache = {key: options.pop(key) for key in CACHE_OPTIONS if key in options}
        k = v = read_method(name, options)
    else:
        k, v, cache = _mixed(parts, text)
    return _with_cache_options(_defaults(k, v), cache)


def _mixed(parts: list[str], text: str) -> tuple[Method, Method, dict[str, str]]:
    sides: dict[str, str] = {}
    for part in parts:
        head = "cache:" if part.startswith("cache:") else part[:2]
        if head not in ("k=", "v=", "cache:") or head in sides:
            raise ValueError(
                f"cache {text!r}: a mixed cache is written"
                " k=METHOD+v=METHOD[+cache:sink=..,recent=..]"
            )
        sides[head] = part.removeprefix(head)
    if "k=" not in sides or "v=" not in sides:
        raise ValueError(f"cache {text!r}: name both sides, k=METHOD+v=METHOD")
    methods, windows = list[Method](), dict[str, str]()
    for side in ("k=", "v="):
        name, options = split_options(sides[side])
        misplaced = [o for o in CACHE_OPTIONS if o in options]
        if misplaced:
            raise ValueError(
                f"cache {text!r}: {misplaced[0]} belongs to the cache; write"
                f" +cache:{misplaced[0]}={options[misplaced[0]]}"
            )
        options = with_preset(name, options)
        if side == "v=":
            _check_value_method(named(name))
        # a preset may name windows
        windows |= {o: options.pop(o) for o in CACHE_OPTIONS if o in options}
        methods.append(read_method(name, options))
    cache = split_options("cache:" + sides["cache:"])[1] if "cache:" in sides else {}
    unknown = [o for o in cache if o not in CACHE_OPTIONS]
    if unknown:
        raise ValueError(
            f"unknown cache option {unknown[0]!r}; options: {', '.join(CACHE_OPTIONS)}"
            f"{unknown_hint(unknown[0], CACHE_OPTIONS)}"
        )
    return methods[0], methods[1], windows | cache


def _with_cache_options(spec: CacheSpec, options: dict[str, str]) -> CacheSpec:
    changes: dict[str, Any] = {}
    for key, text in options.items():
        try:
            changes[key] = (
                [read_range(item) for item in text.split("/")]
                if key == "skip_layers"
                else read_value(text, type(getattr(spec, key)))
            )
        except ValueError:
            expected = {
                "skip_layers": "layers such as 0-2/31",
                "subtract_bias": "true or false",
            }.get(key, "a number of tokens")
            raise ValueError(f"{key}={text} cannot be read; expected {expected}") from None
        if key == "skip_layers":
            check_ranges(f"{key}={text}", changes[key])
            changes[key] = tuple(
                sorted({layer for first, last in changes[key] for layer in range(first, last + 1)})
            )
    return dataclasses.replace(spec, **changes)


def _check_value_method(method: Method) -> None:
    if method.keys_only:
        raise ValueError(
            f"v={method.name} has no meaning: {method.name} quantizes keys only; write v=dense"
        )
