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
from kvq_jax.codecs.bias_subtracting import OPTION, BiasSubtracting
from kvq_jax.codecs.codec import Codec
from kvq_jax.layer.attention import of_layer
from kvq_jax.layer.plan import LayerPlan
from kvq_jax.layer.regions import Regions
from kvq_jax.methods.base import Method, PerLayer
from kvq_jax.methods.dense import Dense
from kvq_jax.methods.registry import METHODS, register_installed
from kvq_jax.types.array_types import ModelDims

CACHE_OPTIONS = ("sink", "recent", "block", "skip_layers", "subtract_bias")
# that a spec can name: a range of layers is expanded before a model bounds it
MAX_LAYERS = 4096


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
        k, v = _method_text(self.k), _method_text(self.v)
        if self.k == self.v:
            separator = "," if ":" in k else ":"
            return k + separator + ",".join(cache) if cache else k
        return f"k={k}+v={v}" + (f"+cache:{','.join(cache)}" if cache else "")

    def _check(self) -> None:
        if self.block < 1:
            raise ValueError(f"block={self.block} is too small: a block is at least 1 token")
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
                f"{OPTION} has no meaning for keys of {_method_text(self.k)}, which share a row"
                " with values; leave it out"
            )
        if keys.facts.exact or keys.facts.rebuilds:
            why = (
                "caches no keys and rebuilds them with their bias"
                if keys.facts.rebuilds
                else "keeps keys in full precision"
            )
            raise ValueError(
                f"{OPTION} has no meaning for keys of {_method_text(self.k)}, which {why}; leave"
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
                f"{str(self)!r}: {_method_text(joint)} keeps one body for keys and values of this"
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
        name, options = _split(parts[0])
        options = _with_preset(name, options)
        cache = {key: options.pop(key) for key in CACHE_OPTIONS if key in options}
        k = v = _method(name, options)
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
        name, options = _split(sides[side])
        misplaced = [o for o in CACHE_OPTIONS if o in options]
        if misplaced:
            raise ValueError(
                f"cache {text!r}: {misplaced[0]} belongs to the cache; write"
                f" +cache:{misplaced[0]}={options[misplaced[0]]}"
            )
        options = _with_preset(name, options)
        if side == "v=":
            _check_value_method(_named(name))
        # a preset may name windows
        windows |= {o: options.pop(o) for o in CACHE_OPTIONS if o in options}
        methods.append(_method(name, options))
    cache = _split("cache:" + sides["cache:"])[1] if "cache:" in sides else {}
    unknown = [o for o in cache if o not in CACHE_OPTIONS]
    if unknown:
        raise ValueError(
            f"unknown cache option {unknown[0]!r}; options: {', '.join(CACHE_OPTIONS)}"
        )
    return methods[0], methods[1], windows | cache


def _split(text: str) -> tuple[str, dict[str, str]]:
    name, _, rest = text.strip().partition(":")
    options: dict[str, str] = {}
    for item in rest.split(",") if rest else []:
        key, equals, value = item.partition("=")
        if not equals or not value:
            raise ValueError(f"cache {text!r}: {item!r} is not option=value")
        if key.strip() in options:
            raise ValueError(f"cache {text!r}: option {key.strip()!r} is given twice")
        options[key.strip()] = value.strip()
    return name.strip(), options


def _named(name: str) -> Method:
    """Return the method with this name and its default options."""
    if name not in METHODS:
        register_installed()
    if name not in METHODS:
        raise ValueError(f"unknown cache method {name!r}; methods: {', '.join(METHODS)}")
    return METHODS[name]


def _with_preset(name: str, options: dict[str, str]) -> dict[str, str]:
    """Return the options with `preset` replaced by its options. Other options override them."""
    presets = _named(name).presets
    if not presets or "preset" not in options:
        return options
    chosen = options["preset"]
    if chosen not in presets:
        raise ValueError(f"{name}:preset={chosen} is unknown; presets: {', '.join(presets)}")
    others = {key: text for key, text in options.items() if key != "preset"}
    return _split(f"{name}:{presets[chosen]}")[1] | others


def _method(name: str, options: dict[str, str]) -> Method:
    method = _named(name)
    fields = {f.name: f for f in method.options()}
    values = {}
    for key, text in options.items():
        if key not in fields:
            allowed = ", ".join((*fields, *(("preset",) if method.presets else ()), *CACHE_OPTIONS))
            raise ValueError(f"unknown option {key!r} of {name}; options: {allowed}")
        values[key] = _value(f"{name}:{key}", text, fields[key])
    for key, others in method.replaces.items():
        beside = [other for other in others if other in values]
        if values.get(key) and beside:
            raise ValueError(
                f"{name}:{key}={options[key]} stands for {beside[0]}={options[beside[0]]}: give one"
                " of them"
            )
    return dataclasses.replace(method, **values)


def _value(where: str, text: str, field: dataclasses.Field) -> Any:
    choices = field.metadata["choices"]
    try:
        value = (
            _read_per_layer(text)
            if field.metadata["per_layer"]
            else _read(text, type(field.default))
        )
    except ValueError:
        expected = " | ".join(map(str, choices)) or type(field.default).__name__
        raise ValueError(f"{where}={text} cannot be read; expected {expected}") from None
    if isinstance(value, PerLayer):
        _check_ranges(f"{where}={text}", [(first, last) for _, first, last in value.ranges])
    values = value.values() if isinstance(value, PerLayer) else (value,)
    if choices and any(v not in choices for v in values):
        raise ValueError(
            f"{where}={text} is not allowed; choose from {', '.join(map(str, choices))}"
        )
    numbers = () if choices else tuple(v for v in values if isinstance(v, int | float))
    if any(not 0 <= number < math.inf for number in numbers):
        raise ValueError(
            f"{where}={text} must be {'finite and ' if isinstance(value, float) else ''}not"
            " negative"
        )
    return value


def _read(text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    return kind(text)


def _read_per_layer(text: str) -> int | PerLayer:
    *ranges, last = text.split("/")
    if not ranges:
        return int(last)
    parsed = []
    for item in ranges:
        value, at, layers = item.partition("@")
        if not at:
            raise ValueError(text)
        parsed.append((int(value), *_read_range(layers)))
    return PerLayer(tuple(parsed), int(last))


def _with_cache_options(spec: CacheSpec, options: dict[str, str]) -> CacheSpec:
    changes: dict[str, Any] = {}
    for key, text in options.items():
        try:
            changes[key] = (
                [_read_range(item) for item in text.split("/")]
                if key == "skip_layers"
                else _read(text, type(getattr(spec, key)))
            )
        except ValueError:
            expected = {
                "skip_layers": "layers such as 0-2/31",
                "subtract_bias": "true or false",
            }.get(key, "a number of tokens")
            raise ValueError(f"{key}={text} cannot be read; expected {expected}") from None
        if key == "skip_layers":
            _check_ranges(f"{key}={text}", changes[key])
            changes[key] = tuple(
                sorted({layer for first, last in changes[key] for layer in range(first, last + 1)})
            )
        minimum = int(key == "block")
        if key in ("sink", "recent", "block") and not minimum <= changes[key] < 1 << 31:
            raise ValueError(f"{key}={text} must be at least {minimum} and below 2**31")
    return dataclasses.replace(spec, **changes)


def _read_range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    return int(first), int(last if dash else first)


def _check_ranges(where: str, ranges: list[tuple[int, int]]) -> None:
    for first, last in ranges:
        if last < first:
            raise ValueError(f"{where}: no layer is in {first}-{last}; write {last}-{first}")
        if last >= MAX_LAYERS:
            raise ValueError(f"{where} names layer {last}; a spec names layers below {MAX_LAYERS}")


def _check_value_method(method: Method) -> None:
    if method.keys_only:
        raise ValueError(
            f"v={method.name} has no meaning: {method.name} quantizes keys only; write v=dense"
        )


def write_layers(layers: tuple[int, ...]) -> str:
    """Return a list of layers as a spec writes it."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return "/".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _method_text(method: Method) -> str:
    shown = [f for f in method.options() if getattr(method, f.name) != f.default]
    options = ",".join(f"{f.name}={value_text(getattr(method, f.name))}" for f in shown)
    return f"{method.name}:{options}" if options else method.name


def value_text(value: Any) -> str:
    """Return an option's value as a spec writes it."""
    if isinstance(value, PerLayer):
        ranges = [f"{v}@{a}" if a == b else f"{v}@{a}-{b}" for v, a, b in value.ranges]
        return "/".join((*ranges, str(value.default)))
    return str(value).lower() if isinstance(value, bool) else str(value)
