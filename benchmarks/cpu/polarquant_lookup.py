"""q . k over PolarQuant's codes in XLA, on this machine's first JAX device: what looking up costs,
by what the tables hold.

    keys          cos and sin of a code's angle make the halves of a key, which meet all query heads
                  in two dots
    joined keys   the halves are joined first, for one dot
    products      the angle's products with each query head are looked up, times the radius; no key
                  is made (the paper's way)
    plain tables  joined keys from 2^b cosines and as many sines, with nothing done to keep them out
                  of the loop over tokens

Read chunk by chunk, as attention reads a cache, which serves one query row with products and more
of them with keys (docs/decisions/queries_and_latents.md). Errors are relative to keys in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

import kvq_jax as kvq
from benchmarks.cpu.timing import (
    Candidate,
    Shape,
    argument_parser,
    parsed,
    relative_error,
    run,
    wait,
)
from benchmarks.report_file import arguments
from kvq_jax.arrays import polar_array
from kvq_jax.arrays.codebooks import look_up
from kvq_jax.arrays.packing import unpack
from kvq_jax.arrays.stored import load_chunk
from kvq_jax.attention.streaming import chunk_tokens
from kvq_jax.cache.cache import CacheDims
from kvq_jax.codecs.dots import dot_rows

CACHES = ("polarquant", "polarquant:angle_bits=3,radius_bits=3", "polarquant:grid=global")
Scores = Callable[[Array, polar_array.PolarArray, Array | None], Array]


def keys(
    q: Float[Array, "B K R H"], body: polar_array.PolarArray, step: Array | None
) -> Float[Array, "B K R T"]:
    (q_x, q_y), (k_x, k_y) = jnp.split(q, 2, axis=-1), polar_array.key_halves(body, step)
    return dot_rows(q_x, k_x) + dot_rows(q_y, k_y)


def joined_keys(
    q: Float[Array, "B K R H"], body: polar_array.PolarArray, step: Array | None
) -> Float[Array, "B K R T"]:
    return dot_rows(q, polar_array.dequantize(body, step))


def products(
    q: Float[Array, "B K R H"], body: polar_array.PolarArray, step: Array | None
) -> Float[Array, "B K R T"]:
    return jnp.concatenate(
        [polar_array.row_scores(q[:, :, r : r + 1], body, step) for r in range(q.shape[2])], axis=2
    )


def plain_tables(
    q: Float[Array, "B K R H"], body: polar_array.PolarArray, step: Array | None
) -> Float[Array, "B K R T"]:
    angle_codes, angles, radius = _polar(body, step)
    parts = [
        (radius * look_up(f(angles), angle_codes)).reshape(*q.shape[:2], -1, body.format.half)
        for f in (jnp.cos, jnp.sin)
    ]
    return dot_rows(q, jnp.concatenate(parts, axis=-1))


def _polar(body: polar_array.PolarArray, step: Array | None) -> tuple[Array, Array, Array]:
    """Return (angle codes, the angle of each code, radii): codes and radii [B, K, groups, size,
    H/2], one group on the global grid."""
    format = body.format
    codes = unpack(body.words, format.layout)
    codes = codes.reshape(
        *codes.shape[:2], -1, format.group_size if step is None else codes.shape[2], format.half
    )
    entries = jnp.arange(1 << format.angle_bits, dtype=jnp.float32).reshape(-1, 1, 1, 1, 1, 1)
    angle_codes, radius = (
        codes & np.uint16(entries.size - 1),
        (codes >> np.uint16(format.angle_bits)).astype(jnp.float32),
    )
    if step is not None:
        return (
            angle_codes,
            entries * (polar_array.TURN / entries.size) - np.pi,
            radius * step[:, :, None],
        )
    stored = [body.radius_scale, body.radius_zero, body.angle_scale, body.angle_zero]
    r_scale, r_zero, scale, zero = (
        s.astype(jnp.float32)[:, :, :, None] for s in stored if s is not None
    )
    return (
        angle_codes,
        (entries + 0.5) * scale[None] + zero[None],
        (radius + 0.5) * r_scale + r_zero,
    )


WAYS: dict[str, Scores] = {
    "keys": keys,
    "joined keys": joined_keys,
    "products": products,
    "plain tables": plain_tables,
}


def candidates(shape: Shape, spec: str) -> list[Candidate]:
    """Return every way to read the same codes of random keys."""
    heads = shape.kv_heads * shape.group
    dims = CacheDims(1, heads, shape.kv_heads, shape.head_dim, heads * shape.head_dim)
    plan = kvq.parse(spec).layer(0, dims, shape.tokens, "float32")
    codec, block = plan.k, plan.regions.block
    if shape.tokens % block:
        raise ValueError(
            f"--tokens {shape.tokens} must be a multiple of {block}, the block of {spec}"
        )
    rng = np.random.default_rng(0)
    rows, q = (
        jnp.asarray(
            rng.standard_normal((shape.batch, shape.kv_heads, n, shape.head_dim), np.float32)
        )
        for n in (shape.tokens, shape.group)
    )
    leaves, blocks = codec.body(1, 1, block), shape.tokens // block
    format: polar_array.PolarFormat = leaves.format
    step = (
        jnp.full((shape.batch, shape.kv_heads, 1, shape.head_dim // 2), 0.25, jnp.float32)
        if format.grid == "global"
        else None
    )
    body = polar_array.quantize(rows, format, step)
    part = chunk_tokens(block, shape.tokens, q) // block
    stored = jax.tree.map(lambda leaf, array: leaf.store(array), leaves, body)

    def scores(way: Scores, q: Array, stored: polar_array.PolarArray, step: Array | None) -> Array:
        def read(i: Array, out: Array) -> Array:
            at = jnp.minimum(i * part, blocks - part)
            return lax.dynamic_update_slice_in_dim(
                out, way(q, load_chunk(leaves, stored, at, part), step), at * block, 3
            )

        return lax.fori_loop(
            0, -(-blocks // part), read, jnp.zeros((*q.shape[:3], shape.tokens), jnp.float32)
        )

    codes, angles, radius = (np.asarray(a, np.float64) for a in _polar(body, step))
    theta = np.take_along_axis(
        np.broadcast_to(angles, (angles.shape[0], *codes.shape)), codes.astype(int)[None], axis=0
    )[0]
    exact = np.concatenate(
        [(radius * f(theta)).reshape(*rows.shape[:3], -1) for f in (np.cos, np.sin)], axis=-1
    )
    wanted = np.einsum("bkrh,bkth->bkrt", np.asarray(q, np.float64), exact)

    def one(name: str) -> Candidate:
        program = jax.jit(functools.partial(scores, WAYS[name])).lower(q, stored, step).compile()
        error = relative_error(program(q, stored, step), wanted)
        label = f"{spec}, {name}"
        return Candidate(
            label,
            "float32",
            lambda: wait(program(q, stored, step)),
            error,
            kvq.nbytes(stored),
            program.memory_analysis(),
        )

    return [one(name) for name in WAYS]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(
        "polarquant_lookup",
        (__doc__ or "").partition("\n")[0],
        tokens=(7040,),
        batch=(1,),
        rounds=31,
    )
    parser.set_defaults(cache=CACHES)
    parser.add_argument(
        "--head-dim", type=int, nargs="+", default=(128, 64), metavar="H", help="channels of a head"
    )
    parser.add_argument("--kv-heads", type=int, default=8, metavar="K", help="KV heads")
    parser.add_argument(
        "--group",
        type=int,
        nargs="+",
        default=(1, 2, 4),
        metavar="G",
        help="query heads for each KV head",
    )
    args = parsed(parser, argv)
    shapes = [
        Shape(b, n, h, args.kv_heads, g)
        for h in args.head_dim
        for b in args.batch
        for n in args.tokens
        for g in args.group
    ]
    command = ("benchmarks.cpu.polarquant_lookup", *arguments(argv))
    title = "Scores of PolarQuant's keys in XLA"
    try:
        report = run(
            title,
            command,
            shapes,
            lambda shape: [c for spec in args.cache for c in candidates(shape, spec)],
            args.rounds,
        )
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    if args.json:
        report.write(args.json)


if __name__ == "__main__":
    main()
