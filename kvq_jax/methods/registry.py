"""The table of methods: each with its default options, under its name in a spec. A new method is a
folder in `methods/` and a line here."""

from __future__ import annotations

from kvq_jax.methods.base import Method
from kvq_jax.methods.dense import Dense
from kvq_jax.methods.floats import FP8, MXFP4, NVFP4
from kvq_jax.methods.formats import TokenFormat
from kvq_jax.methods.gear import Gear
from kvq_jax.methods.innerq import InnerQ
from kvq_jax.methods.kivi import Kivi
from kvq_jax.methods.kvquant import KVQuant
from kvq_jax.methods.polarquant import PolarQuant
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
