"""What the PolarQuant paper's Table 4 times: q K^T alone, over keys that PolarQuant, KIVI and KVQuant store, and exact ones.

The paper prints head dim 128 and lengths, not how many heads; its fp16 times fit about as many as Llama-3.1-8B has query heads, each with
keys of its own. So the shapes are those of InnerQ's tables.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from benchmarks import kvquant_candidates, product_candidates
from benchmarks.common import Shape
from benchmarks.device_timing import first, random_words, uniform
from benchmarks.kernel_candidates import Planned, Task, bytes_of, checked_part, codecs_of, leaves_of, name_of, side_of
from kvq_jax.body import load_body
from kvq_jax.polar import Polar as Body
from pallas_kernels import matvec
from pallas_kernels._launch import Launch

SECTION = "polarquant keys"
MODEL = "Llama-3.1-8B"
SPEC = "polarquant"
EXACT, KIVI, KVQUANT = product_candidates.EXACT, "kivi:bits=4", "nuq4-1%"


def table_tasks(shape: Shape, hows: Sequence[Launch]) -> list[Planned]:
    """The paper's rows."""
    known = {
        EXACT: functools.partial(product_candidates.scores_task, shape, EXACT, tuple(hows)),
        KIVI: functools.partial(product_candidates.scores_task, shape, KIVI, tuple(hows)),
        KVQUANT: functools.partial(kvquant_candidates.total_of_keys, shape, tuple(hows)),
        SPEC: functools.partial(_polar, shape, tuple(hows)),
    }
    return [Planned(SECTION, name, make) for name, make in known.items()]


def random_polar(leaves: Body, seed: Array) -> Body:
    """Radii of about 0.2 to 1.4, arcs of 1 to 2 radians anywhere on the circle."""
    words = tuple(random_words(w.shape, seed + jnp.uint32(1000 * i)) for i, w in enumerate(leaves.words))
    ranges = {"radius_scale": (0.06, 0.08), "radius_zero": (0.1, 0.3), "angle_scale": (0.06, 0.12), "angle_zero": (-3.1, 3.1)}
    found = {
        name: getattr(leaves, name).store(uniform(getattr(leaves, name).shape, seed + jnp.uint32(i), *bounds, getattr(leaves, name).dtype))
        for i, (name, bounds) in enumerate(ranges.items())
    }
    return Body(words, **found, format=leaves.format)


def _polar(shape: Shape, hows: tuple[Launch, ...]) -> Task:
    codec = codecs_of(SPEC, shape)[0]
    leaves = leaves_of(codec, shape)
    side = side_of(codec, leaves)

    def kernel(how: Launch, q: Array, copy: Any) -> Array:
        return matvec.scores(q, side, codec.kernel_arrays((), copy), capacity=shape.tokens, how=how)

    def check(q: Array, copy: Any, out: Array) -> tuple[Array, Array]:
        q, out = checked_part((q, out))
        rows = codec.decode((), (), load_body(leaves, checked_part(copy)))
        return out, jnp.einsum("bkgh,bksh->bkgs", q, rows, precision="highest")

    return Task(
        False,
        bytes_of(leaves),
        bytes_of(leaves),
        0,
        start=lambda: uniform((1, shape.kv_heads, 1, shape.head_dim), jnp.uint32(17), -3.0, 3.0),
        copy=lambda seed: random_polar(leaves, seed),
        calls=tuple((name_of(how), jax.jit(functools.partial(kernel, how))) for how in hows),
        feed=lambda q, out: q + first(out),
        check=check,
    )
