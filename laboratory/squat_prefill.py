"""Prefill of one layer, attention included, on this machine's first JAX device: what SQuat's
subspace and corrections add to KIVI's.

The error is that of one token decoded from the cache afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import kvq_jax as kvq
from benchmarks.cpu.attention import attended
from benchmarks.cpu.timing import (
    Candidate,
    Shape,
    add_heads,
    argument_parser,
    layer_plan,
    parsed,
    relative_error,
    run,
    shapes_of,
)
from benchmarks.report_file import arguments
from kvq_jax.cache.update import decode_layer, prefill_layer
from kvq_jax.layer.plan import LayerPlan, LayerState
from kvq_jax.types.rope import rotate

CACHES = ("kivi", "squat", "squat:rank=60,block_channels=32", "kivi:pre_rope=true", "squat_pre")


def candidate(shape: Shape, spec: str) -> Candidate:
    """Return one layer that takes a prompt of `tokens` tokens in each row, from empty."""
    plan = layer_plan(shape, spec)

    @jax.jit
    def prefill(state: LayerState, inputs: kvq.types.LayerInputs) -> tuple[Array, LayerState]:
        out, state, _ = prefill_layer(plan, (), state, inputs, ())
        return out, state

    empty, prompt = plan.init(shape.batch, "float32"), _inputs(shape, 0, shape.tokens)
    program = prefill.lower(empty, prompt).compile()
    _, state = program(empty, prompt)
    return Candidate(
        spec,
        "float32",
        lambda: jax.block_until_ready(program(empty, prompt)),
        relative_error(*_decoded(plan, state, _inputs(shape, shape.tokens, 1))),
        kvq.size.nbytes(state),
        program.memory_analysis(),
    )


@functools.partial(jax.jit, static_argnums=0)
def _decoded(
    plan: LayerPlan, state: LayerState, inputs: kvq.types.LayerInputs
) -> tuple[Array, Array]:
    """Return (attention of one more token, the same by its definition over the rows that the cache
    stands for)."""
    out, state, _ = decode_layer(plan, (), state, inputs, ())
    return out, attended(plan, (), state, inputs, inputs.rope)


def _inputs(shape: Shape, start: int, tokens: int) -> kvq.types.LayerInputs:
    rng = np.random.default_rng(start)

    def normal(heads: int) -> Array:
        return jnp.asarray(
            rng.standard_normal((shape.batch, heads, tokens, shape.head_dim), np.float32)
        )

    q, k, v = normal(shape.kv_heads * shape.group), normal(shape.kv_heads), normal(shape.kv_heads)
    positions = jnp.broadcast_to(
        jnp.arange(start, start + tokens, dtype=jnp.int32), (shape.batch, tokens)
    )
    rope = kvq.types.Rope(
        jnp.asarray(1e4 ** (-np.arange(shape.head_dim // 2) / (shape.head_dim // 2)), jnp.float32),
        jnp.ones((), jnp.float32),
    )
    q_rot, k_rot = (rotate(rows, positions, rope) for rows in (q, k))
    return kvq.types.LayerInputs(None, q, q_rot, k, k_rot, v, positions, positions >= 0, rope)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(
        "squat_prefill",
        (__doc__ or "").partition("\n")[0],
        tokens=(512, 1024),
        batch=(1,),
        rounds=9,
    )
    parser.prog, parser.epilog = "python -m laboratory.squat_prefill", None
    parser.set_defaults(cache=CACHES)
    add_heads(parser, (128,))
    args = parsed(parser, argv)
    command = ("laboratory.squat_prefill", *arguments(argv))
    title = "Prefill of one layer with SQuat"
    run(
        title,
        command,
        shapes_of(args),
        lambda shape: [candidate(shape, spec) for spec in args.cache],
        args.rounds,
        args.json,
    )


if __name__ == "__main__":
    main()
