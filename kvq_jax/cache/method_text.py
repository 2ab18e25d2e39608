"""Read and write one METHOD of a spec, `name[:option=value,...]`, and the layers that options name.

`spec.py` has the whole grammar.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from kvq_jax.did_you_mean import hint
from kvq_jax.methods.base import CACHE_OPTIONS, Method, PerLayer
from kvq_jax.methods.registry import METHODS, register_installed

# that a spec can name: a range of layers is expanded before a model bounds it
MAX_LAYERS = 4096
# names that people give the exact cache
EXACT = ("none", "full", "exact", "bf16", "bfloat16", "fp16", "float16", "fp32", "float32")


def split_options(text: str) -> tuple[str, dict[str, str]]:
    """Return the name and the options, as text, of name[:option=value,...]."""
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


def named(name: str) -> Method:
    """Return the method with this name and its default options."""
    if name not in METHODS:
        register_installed()
    if name not in METHODS:
        raise ValueError(
            f"unknown cache method {name!r}; methods: {', '.join(METHODS)}{_method_hint(name)}"
        )
    return METHODS[name]


def _method_hint(name: str) -> str:
    if name.lower() in EXACT:
        return ". Did you mean dense?"
    first, comma, rest = name.lower().partition(",")
    if first in METHODS and comma:
        return f". Did you mean {first}:{rest}?"
    return unknown_hint(name, METHODS)


def unknown_hint(name: str, known: Iterable[str]) -> str:
    """Return the nearest known name as a sentence that ends a list of these names."""
    return f".{nearest}" if (nearest := hint(name, known)) else ""


def with_preset(name: str, options: dict[str, str]) -> dict[str, str]:
    """Return the options with `preset` replaced by its options. Other options override them."""
    presets = named(name).presets
    if not presets or "preset" not in options:
        return options
    chosen = options["preset"]
    if chosen not in presets:
        raise ValueError(f"{name}:preset={chosen} is unknown; presets: {', '.join(presets)}")
    others = {key: text for key, text in options.items() if key != "preset"}
    return split_options(f"{name}:{presets[chosen]}")[1] | others


def read_method(name: str, options: dict[str, str]) -> Method:
    """Return the method of this name with options that are given as text."""
    method = named(name)
    fields = {f.name: f for f in method.options()}
    values = {}
    for key, text in options.items():
        if key not in fields:
            allowed = (*fields, *(("preset",) if method.presets else ()), *CACHE_OPTIONS)
            raise ValueError(
                f"unknown option {key!r} of {name}; options: {', '.join(allowed)}"
                f"{unknown_hint(key, allowed)}"
            )
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
            else read_value(text, type(field.default))
        )
    except ValueError:
        kind = type(field.default)
        named = "true or false" if kind is bool else kind.__name__
        expected = " | ".join(map(str, choices)) or named
        raise ValueError(f"{where}={text} cannot be read; expected {expected}") from None
    _check_value(f"{where}={text}", value, choices)
    return value


def _check_value(written: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ValueError, in one line that begins with the option as `written`, if it cannot have
    this value."""
    if isinstance(value, PerLayer):
        check_ranges(written, [(first, last) for _, first, last in value.ranges])
    values = value.values() if isinstance(value, PerLayer) else (value,)
    if choices and any(v not in choices for v in values):
        raise ValueError(f"{written} is not allowed; choose from {', '.join(map(str, choices))}")
    numbers = () if choices else tuple(v for v in values if isinstance(v, int | float))
    if any(not 0 <= number < math.inf for number in numbers):
        raise ValueError(
            f"{written} must be {'finite and ' if isinstance(value, float) else ''}not negative"
        )


def check_method(side: str, method: Method) -> None:
    """Raise ValueError, in one line, if this is not a method, or an option has a value that no text
    could give it."""
    if not isinstance(method, Method):
        raise ValueError(
            f"{side} must be a method, such as kvq.parse('kivi').k, got {type(method).__name__}"
        )
    for field in method.options():
        value = getattr(method, field.name)
        written = f"{method.name}:{field.name}={value_text(value)}"
        _check_value(written, value, field.metadata["choices"])


def read_value(text: str, kind: type) -> Any:
    """Return the value of this type that a text stands for. Raise ValueError if there is none."""
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
        parsed.append((int(value), *read_range(layers)))
    return PerLayer(tuple(parsed), int(last))


def read_range(text: str) -> tuple[int, int]:
    """Return the first and the last layer of a range such as 0-2 or 31."""
    first, dash, last = text.partition("-")
    return int(first), int(last if dash else first)


def check_ranges(where: str, ranges: list[tuple[int, int]]) -> None:
    """Raise ValueError if a range holds no layer, or one beyond those that a spec names."""
    for first, last in ranges:
        if last < first:
            raise ValueError(f"{where}: no layer is in {first}-{last}; write {last}-{first}")
        if last >= MAX_LAYERS:
            raise ValueError(f"{where} names layer {last}; a spec names layers below {MAX_LAYERS}")


def write_layers(layers: tuple[int, ...]) -> str:
    """Return a list of layers as a spec writes it."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return "/".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def method_text(method: Method) -> str:
    """Return a method as a spec writes it, with the options that are not the defaults."""
    shown = [f for f in method.options() if getattr(method, f.name) != f.default]
    options = ",".join(f"{f.name}={value_text(getattr(method, f.name))}" for f in shown)
    return f"{method.name}:{options}" if options else method.name


def value_text(value: Any) -> str:
    """Return an option's value as a spec writes it."""
    if isinstance(value, PerLayer):
        ranges = [f"{v}@{a}" if a == b else f"{v}@{a}-{b}" for v, a, b in value.ranges]
        return "/".join((*ranges, str(value.default)))
    return str(value).lower() if isinstance(value, bool) else str(value)
