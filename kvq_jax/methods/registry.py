"""All methods, by name. A new method is a folder in `methods/` and a line here."""

from __future__ import annotations

from kvq_jax.methods.base import Method
from kvq_jax.methods.dense import Dense
from kvq_jax.methods.formats import INT_METHODS, NORMAL_FLOAT_METHODS
from kvq_jax.methods.innerq import InnerQ
from kvq_jax.methods.kivi import Kivi
from kvq_jax.methods.kvquant import KVQuant
from kvq_jax.methods.polarquant import PolarQuant
from kvq_jax.methods.squat import Squat, SquatPre
from kvq_jax.methods.xquant import XQuant, XQuantCL

METHODS: dict[str, type[Method]] = {
    "dense": Dense,
    "kivi": Kivi,
    "innerq": InnerQ,
    "kvquant": KVQuant,
    "polarquant": PolarQuant,
    "squat": Squat,
    "squat_pre": SquatPre,
    "xquant": XQuant,
    "xquant_cl": XQuantCL,
    **{method.name: method for method in (*INT_METHODS, *NORMAL_FLOAT_METHODS)},
}
