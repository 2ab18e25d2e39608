"""Specs as Python calls: `Kivi(bits=4, recent=32)` is `parse("kivi:bits=4,recent=32")`.

The callables are made from the table of methods, so their options, defaults, checks and errors are
those of the text.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from kvq_jax.cache.method_text import value_text, write_layers
from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.methods.base import CACHE_OPTIONS, Method
from kvq_jax.methods.registry import METHODS, register_installed
from kvq_jax.types.integers import integer


def names() -> dict[str, str]:
    """Return the name of each method's class, and the method's name in a spec. Methods that share a
    class are capitalized: int4 is Int4. A registered class of the name of one of ours is too."""
    ours = Counter(class_name for class_name, built_in in METHODS.classes().values() if built_in)
    public: dict[str, str] = {}
    for name, (class_name, built_in) in METHODS.classes().items():
        taken = ours[class_name] > 1 if built_in else class_name in ours or class_name in public
        public[name.capitalize() if taken else class_name] = name
    return public


def spec_class(name: str) -> Callable[..., CacheSpec] | None:
    """Return the callable of this name, or None if there is none."""
    if (method := names().get(name)) is None:
        register_installed()
        method = names().get(name)
    return None if method is None else _made(name, METHODS[method])


@functools.cache
def _made(public: str, method: Method) -> Callable[..., CacheSpec]:
    name = method.name
    options = {field.name: field for field in method.options()}

    def make(**values: Any) -> CacheSpec:
        written = {key: _written(name, key, value) for key, value in values.items()}
        texts = (f"{key}={text}" for key, text in written.items() if text is not None)
        return parse(":".join(filter(None, (name, ",".join(texts)))))

    parameters = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=field.default)
        for key, field in options.items()
    ]
    more = ("preset",) if method.presets else ()
    parameters += [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None)
        for key in (*more, *CACHE_OPTIONS)
    ]
    make.__name__ = make.__qualname__ = public
    make.__signature__ = inspect.Signature(parameters, return_annotation=CacheSpec)  # type: ignore[attr-defined]
    lines = [f"    {key}: {field.metadata['help']}." for key, field in options.items()]
    make.__doc__ = "\n".join(
        [
            f"Return the spec of a cache with {method.summary}.",
            "",
            f"Source: {method.source}",
            "",
            "Args:",
            *lines,
            "    sink, recent, block: tokens in full precision, and of a block.",
            "    skip_layers: a tuple of layers in full precision.",
            "    subtract_bias: cache keys without k_proj's bias.",
        ]
    )
    return make


def _written(method: str, option: str, value: Any) -> str | None:
    """Return an option's value as a spec writes it, or None to leave it out."""
    if value is None:
        return None
    if option == "skip_layers" and not isinstance(value, str | int):
        return _written_layers(value)
    if isinstance(value, list | tuple | dict):
        raise ValueError(
            f"{method}:{option}={value} must be one value; a text such as '4@0-1/2' gives layers 0"
            " and 1 another one"
        )
    return value_text(value)


def _written_layers(value: Any) -> str | None:
    """Return layers, or the number of one, as a spec writes them, or None if there are none."""
    layers = [value] if integer(value, 0) is not None else value
    numbers = [integer(layer, 0) for layer in layers] if isinstance(layers, Iterable) else [None]
    known = tuple(number for number in numbers if number is not None)
    if len(known) != len(numbers):
        raise ValueError(f"skip_layers={value!r} must be layers, such as (0, 1)")
    return write_layers(known) or None
