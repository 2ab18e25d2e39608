"""KV-cache quantization: specs, caches, and attention that reads packed bits.

import kvq_jax as kvq

dims = kvq.CacheDims(32, 32, 8, 128, 4096)
cache = kvq.init_cache("innerq:bits=2", dims, batch=1, capacity=4096)

step = kvq.begin(cache, tokens=1, prefill=False)      # in a decode step of any model
out, step = kvq.append_and_attend(step, q, k, v)      # in place of each layer's attention
cache = kvq.finish(step)

`layer_plan` keeps one layer's cache, and `roundtrip` says what a method does to keys and values. A
spec is a text, or made by the class of its method: Kivi(bits=2) is parse("kivi:bits=2").

    kvq.cache         types of caches and plans, their layout
    kvq.rows          trim, select, repeat, merge, replace and move the rows of caches
    kvq.files         save, load, seal and verify
    kvq.size          bytes, bits, tokens in the body, outliers
    kvq.parameters    calibrate and prepare methods that have parameters
    kvq.methods       the table of methods, and `register` for more
    kvq.types         named axes, layer inputs, rotary positions

The names of `__all__` and those of the groups are stable: they change with a release that says so,
after one release that warns. Everything else may change with any release. Names are imported when
they are first used, so that reading a configuration does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvq_jax import cache, files, methods, parameters, rows, size, types
    from kvq_jax.cache.cache import CacheDims, init_cache
    from kvq_jax.cache.layer_plans import layer_plan
    from kvq_jax.cache.roundtrip import roundtrip
    from kvq_jax.cache.spec import parse
    from kvq_jax.cache.step import append_and_attend, begin, finish
    from kvq_jax.layer.attention import Attention
    from kvq_jax.placement.placement import Placement

__version__ = "0.1.0"  # the distribution's version, which pyproject.toml reads from here

__all__ = [
    "Attention",
    "CacheDims",
    "Placement",
    "__version__",
    "append_and_attend",
    "begin",
    "cache",
    "files",
    "finish",
    "init_cache",
    "layer_plan",
    "methods",
    "parameters",
    "parse",
    "roundtrip",
    "rows",
    "size",
    "types",
]


_GROUPS = ("cache", "files", "methods", "parameters", "rows", "size", "types")
_MODULES = {
    "Attention": "layer.attention",
    "CacheDims": "cache.cache",
    "Placement": "placement.placement",
    "append_and_attend": "cache.step",
    "begin": "cache.step",
    "finish": "cache.step",
    "init_cache": "cache.cache",
    "layer_plan": "cache.layer_plans",
    "parse": "cache.spec",
    "roundtrip": "cache.roundtrip",
}


def __getattr__(name: str) -> Any:
    if name in _GROUPS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _MODULES:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value  # later look-ups do not come here
        return value
    from kvq_jax.moved_names import MOVED, moved

    if name in MOVED:
        return moved(name)
    if name[:1].isupper():
        from kvq_jax.cache.spec_classes import spec_class

        try:
            made = spec_class(name)
        except ValueError as error:  # a package's method cannot be imported
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}: {error}"
            ) from error
        if made is not None:
            return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    from kvq_jax.cache.spec_classes import names

    return sorted({*globals(), *__all__, *names()})
