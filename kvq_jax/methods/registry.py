"""The table of methods: each with its default options, under its name in a spec.

A new method of ours is a folder in `methods/` and a line here. Yours can live in your own package:
call `register(MyMethod())`, or name it in your package's metadata, and it is there once it is
installed:

    [project.entry-points."kvq_jax.methods"]
    mymethod = "my_package.method:MyMethod"

Such a method has the whole interface of docs/adding_a_method.md, which may change with any release.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re

from kvq_jax.methods.base import Method
from kvq_jax.methods.block_gtq import BlockGTQ
from kvq_jax.methods.dense import Dense
from kvq_jax.methods.floats import FP8, MXFP4, NVFP4
from kvq_jax.methods.formats import TokenFormat
from kvq_jax.methods.gear import Gear
from kvq_jax.methods.innerq import InnerQ
from kvq_jax.methods.kivi import Kivi
from kvq_jax.methods.kvarn import KVarN
from kvq_jax.methods.kvquant import KVQuant
from kvq_jax.methods.optr import OptR
from kvq_jax.methods.oscar_omni import OscarOmni
from kvq_jax.methods.oscar_spectral import OscarSpectral
from kvq_jax.methods.polarquant import PolarQuant
from kvq_jax.methods.pq import ProductQuantization
from kvq_jax.methods.squat import Squat, SquatPre
from kvq_jax.methods.turboquant import TurboQuant
from kvq_jax.methods.waterfill import Waterfill
from kvq_jax.methods.xquant import XQuant, XQuantCL
from kvq_jax.methods.zipcache import ZipCache

METHODS: dict[str, Method] = {
    "dense": Dense(),
    "kivi": Kivi(),
    "innerq": InnerQ(),
    "kvquant": KVQuant(),
    "polarquant": PolarQuant(),
    "squat": Squat(),
    "squat_pre": SquatPre(),
    "waterfill": Waterfill(),
    "gear": Gear(),
    "zipcache": ZipCache(),
    "turboquant": TurboQuant(),
    "kvarn": KVarN(),
    "oscar_omni": OscarOmni(),
    "oscar_spectral": OscarSpectral(),
    "optr": OptR(),
    "block_gtq": BlockGTQ(),
    "pq": ProductQuantization(),
    "xquant": XQuant(),
    "xquant_cl": XQuantCL(),
    "int2": TokenFormat("int", 2),
    "int3": TokenFormat("int", 3),
    "int4": TokenFormat("int", 4),
    "int8": TokenFormat("int", 8),
    "nf2": TokenFormat("nf", 2),
    "nf3": TokenFormat("nf", 3),
    "nf4": TokenFormat("nf", 4),
    "fp8": FP8(),
    "mxfp4": MXFP4(),
    "nvfp4": NVFP4(),
}

ENTRY_POINTS = "kvq_jax.methods"  # the group in a package's metadata


def register(method: Method) -> None:
    """Add a method to the table, under its name.

    Raises:
        ValueError: in one line, if the name is taken by another method, or no spec can write it.
        TypeError: if it is not an instance of `Method`.
    """
    if not isinstance(method, Method):
        raise TypeError(
            f"register takes an instance of kvq_jax.methods.base.Method, got {method!r}"
        )
    name = method.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"a method's name is lower-case letters, digits and _, got {name!r}")
    if METHODS.setdefault(name, method) != method:
        raise ValueError(f"the name {name!r} is taken by {type(METHODS[name]).__name__}")


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
