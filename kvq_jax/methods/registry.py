"""The table of methods: each with its default options, under its name in a spec.

A new method of ours is a folder in `methods/` and a line here. Yours can live in your own package:
call `register(MyMethod())`, or name it in your package's metadata, and it is there once it is
installed:

    [project.entry-points."kvq_jax.methods"]
    mymethod = "my_package.method:MyMethod"

Such a method has the whole interface of docs/adding_a_method.md, which may change with any release.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import re
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from kvq_jax.methods.base import CACHE_OPTIONS, Method

# name in a spec: folder, class, and the arguments of its default instance
_BUILT_IN: dict[str, tuple[Any, ...]] = {
    "dense": ("dense", "Dense"),
    "kivi": ("kivi", "Kivi"),
    "innerq": ("innerq", "InnerQ"),
    "kvquant": ("kvquant", "KVQuant"),
    "polarquant": ("polarquant", "PolarQuant"),
    "squat": ("squat", "Squat"),
    "squat_pre": ("squat", "SquatPre"),
    "waterfill": ("waterfill", "Waterfill"),
    "gear": ("gear", "Gear"),
    "zipcache": ("zipcache", "ZipCache"),
    "turboquant": ("turboquant", "TurboQuant"),
    "kvarn": ("kvarn", "KVarN"),
    "oscar_omni": ("oscar_omni", "OscarOmni"),
    "oscar_spectral": ("oscar_spectral", "OscarSpectral"),
    "optr": ("optr", "OptR"),
    "block_gtq": ("block_gtq", "BlockGTQ"),
    "pq": ("pq", "ProductQuantization"),
    "xquant": ("xquant", "XQuant"),
    "xquant_cl": ("xquant", "XQuantCL"),
    "int2": ("formats", "TokenFormat", "int", 2),
    "int3": ("formats", "TokenFormat", "int", 3),
    "int4": ("formats", "TokenFormat", "int", 4),
    "int8": ("formats", "TokenFormat", "int", 8),
    "nf2": ("formats", "TokenFormat", "nf", 2),
    "nf3": ("formats", "TokenFormat", "nf", 3),
    "nf4": ("formats", "TokenFormat", "nf", 4),
    "fp8": ("floats", "FP8"),
    "mxfp4": ("floats", "MXFP4"),
    "nvfp4": ("floats", "NVFP4"),
}


class MethodTable(MutableMapping[str, Method]):
    """The methods by name, in the order in which they are listed. A method of ours is imported when
    it is looked up, so that a program pays for the methods that it uses."""

    def __init__(self, built_in: Mapping[str, tuple[Any, ...]]) -> None:
        self._built_in = built_in
        self._methods: dict[str, Method | None] = dict.fromkeys(built_in)

    def __getitem__(self, name: str) -> Method:
        method = self._methods[name]
        if method is None:
            folder, class_name, *arguments = self._built_in[name]
            module = importlib.import_module(f"kvq_jax.methods.{folder}")
            method = self._methods[name] = getattr(module, class_name)(*arguments)
        return method

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def __len__(self) -> int:
        return len(self._methods)

    def __contains__(self, name: object) -> bool:
        return name in self._methods

    def __setitem__(self, name: str, method: Method) -> None:
        self._methods[name] = method

    def __delitem__(self, name: str) -> None:
        del self._methods[name]

    def classes(self) -> dict[str, tuple[str, bool]]:
        """Return the name of each method's class, and whether the method is ours, none of which is
        imported for it."""
        made = {
            name: self._built_in[name][1] if method is None else type(method).__name__
            for name, method in self._methods.items()
        }
        return {name: (class_name, name in self._built_in) for name, class_name in made.items()}


METHODS = MethodTable(_BUILT_IN)

ENTRY_POINTS = "kvq_jax.methods"  # the group in a package's metadata


def register(method: Method) -> None:
    """Add a method to the table, under its name.

    Its options must have the defaults of its class, because a spec names only those that differ
    from them. A class that is defined again, as in a notebook, takes the place of the one before.

    Raises:
        ValueError: in one line, if the name is taken by another class, or no spec can write the
            name or an option.
        TypeError: if it is not an instance of `Method`.
    """
    if not isinstance(method, Method):
        raise TypeError(
            f"register takes an instance of kvq_jax.methods.base.Method, got {method!r}"
        )
    for text in ("name", "summary", "source"):
        if not isinstance(getattr(method, text, None), str):
            raise ValueError(f"{type(method).__name__} needs {text}: ClassVar[str] = ...")
    name = method.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"a method's name is lower-case letters, digits and _, got {name!r}")
    _check_options(method)
    before = METHODS.get(name, method)
    if _origin(before) != _origin(method):
        raise ValueError(
            f"the name {name!r} is taken by {type(before).__name__}: give {type(method).__name__}"
            " another"
        )
    if before != method or name not in METHODS:
        METHODS[name] = method


def _origin(method: Method) -> tuple[str, str]:
    """Return the place of a method's class in the source, which a class defined again shares."""
    return type(method).__module__, type(method).__qualname__


def _check_options(method: Method) -> None:
    """Raise ValueError, in one line, if a spec could not set or write an option of a method."""
    name = type(method).__name__
    for base in type(method).__mro__:
        for field, value in vars(base).items():
            if isinstance(value, dataclasses.Field):
                raise ValueError(
                    f"{field} of {base.__name__} is no option yet: put"
                    " @dataclasses.dataclass(frozen=True) above the class"
                )
    for field in dataclasses.fields(method):
        given = field.default
        if "help" not in field.metadata:
            if given is not dataclasses.MISSING:
                raise ValueError(
                    f"{field.name} of {name} is no option that a spec can set: declare it as"
                    f" {field.name} = option({given!r}, 'what it does')"
                )
            continue
        if field.name in (*CACHE_OPTIONS, "preset"):
            raise ValueError(
                f"{field.name} of {name} has the name of an option of every cache: give it another"
            )
        if not isinstance(given, bool | int | float | str):
            raise ValueError(
                f"{field.name} of {name} must have a default that is a truth value, a number or a"
                f" text, got {given!r}"
            )
        if (value := getattr(method, field.name)) != given:
            raise ValueError(
                f"register {name} with its default options: {field.name}={value!r} belongs into its"
                f" class, as option({value!r}, ...)"
            )


@functools.cache
def register_installed() -> None:
    """Register the methods that installed packages name in their metadata. It runs once, when a
    name is not in the table or the table is listed.

    Raises:
        ValueError: in one line, if one cannot be imported or registered.
    """
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            value = point.load()
            register(value() if isinstance(value, type) else value)
        except Exception as error:
            raise ValueError(f"the method {point.name!r} of {point.value!r}: {error}") from error
