"""Time one whole decode step of a random Llama through each cache.

It runs on this machine's first JAX device, with a small model or the shapes of a public one
(--model). Caches start full of random codes and grow by one token with every step. The samples
cover whole blocks of every cache, so exactly one in `block` quantizes an aged block, and a step's
time has its share of that (benchmarks/turns.py). The baseline is the dense cache. The error
compares logits with the logits of a dense cache that holds the dequantized rows of the quantized
cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

import kvq_jax as kvq
from benchmarks.cpu.timing import (
    DECODE_STEP,
    WARM,
    Candidate,
    Shape,
    argument_parser,
    parsed,
    random_layer,
    random_parameters,
    relative_error,
    run,
)
from benchmarks.report_file import arguments
from benchmarks.turns import check_rounds
from kvq_jax.attention import reference
from kvq_jax.layer import cross_layer
from kvq_models import Llama, LlamaConfig, decode_step, prepare
from kvq_models.calibration.needs import needs
from kvq_models.inference.method_parameters import parameters_for
from kvq_models.llama.rope import rope_for

QUERY_HEADS = 16
ROUNDS = 32  # a block of most methods

MODELS = {
    "smollm2": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
    ),
    "llama-3.2-1b": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
    ),
}


def small_config(layers: int, head_dim: int, group: int) -> LlamaConfig:
    """Return the shapes of a Llama of 16 query heads, `group` of them for each KV head, and Llama's
    other proportions."""
    width = QUERY_HEADS * head_dim
    return LlamaConfig(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=QUERY_HEADS // group,
        head_dim=head_dim,
        max_position_embeddings=1 << 17,
    )


@functools.cache
def random_llama(config: LlamaConfig) -> Llama:
    """Return a random Llama of these shapes, in fp32."""
    return Llama(config, rngs=nnx.Rngs(0))


def _prepared(plain: Llama, spec: str) -> Llama:
    """Return the model with what the cache's methods need. What they learn from a text is learned
    from random rows. `waterfill` has the widths of its template, whose step takes up to 4 % less
    than with those that calibration chose for SmolLM2 (laboratory/notes/cpu_attention.md)."""
    if not needs(kvq.parse(spec), plain.config):
        return prepare(plain, spec)
    plans = kvq.cache.layout(spec, plain.config, 1, plain.config.positions, "float32").plans
    llama = jax.tree.map(lambda leaf: leaf, plain)
    llama.cache_parameters = nnx.data(tuple(map(random_parameters, plans)))
    return llama


def random_cache(llama: Llama, spec: str, shape: Shape, capacity: int) -> kvq.cache.Cache:
    """Return a cache of `tokens` tokens with random contents."""
    cache = kvq.init_cache(spec, llama.config, shape.batch, capacity, "float32")
    layers = tuple(random_layer(plan, shape.batch, seed) for seed, plan in enumerate(cache.plans))
    return dataclasses.replace(
        cache, layers=layers, lengths=jnp.full_like(cache.lengths, shape.tokens)
    )


def decoded(llama: Llama, cache: kvq.cache.Cache) -> kvq.cache.Cache:
    """Return a dense cache of the rows that `cache` stands for."""
    rope = rope_for(llama.config, cache.capacity)
    dense = kvq.init_cache("dense", llama.config, cache.batch, cache.capacity, "float32")
    parameters = parameters_for(llama, cache.spec)
    layers, carry = [], ()
    for plan, layer_parameters, state, empty in zip(
        cache.plans, parameters, cache.layers, dense.layers, strict=True
    ):
        rows = reference.decode_vectors(plan, layer_parameters, state, cache.lengths, rope, carry)
        carry = cross_layer.advance(
            plan, layer_parameters, state, plan.regions.aged_tokens(cache.lengths), carry
        )
        layers.append(dataclasses.replace(empty, body=rows))
    return dataclasses.replace(dense, layers=tuple(layers), lengths=cache.lengths)


def candidates(
    config: LlamaConfig, shape: Shape, caches: Sequence[str], steps: int
) -> list[Candidate]:
    """Return the dense cache, then the others. `steps` is how often a candidate will run."""
    plain = random_llama(config)
    token = jnp.arange(shape.batch, dtype=jnp.int32)
    programs, chosen = {}, []
    for spec in dict.fromkeys(("dense", *caches)):
        llama = _prepared(plain, spec)
        cache = random_cache(llama, spec, shape, shape.tokens + steps)
        programs[spec] = (
            jax.jit(decode_step, donate_argnames="cache").lower(llama, cache, token).compile()
        )
        expected, _ = programs["dense"](plain, jax.jit(decoded)(llama, cache), token)
        chosen.append(_candidate(spec, llama, cache, token, programs[spec], expected))
    return chosen


def _candidate(
    spec: str,
    llama: Llama,
    cache: kvq.cache.Cache,
    token: Array,
    program: jax.stages.Compiled,
    expected: Array,
) -> Candidate:
    current_cache = [cache]
    size = kvq.size.nbytes(cache)

    def step() -> Array:
        logits, current_cache[0] = program(llama, current_cache[0], token)
        jax.block_until_ready(logits)
        return logits

    error = relative_error(step(), expected)
    return Candidate(spec, cache.dtype, step, error, size, program.memory_analysis())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(
        "decode_step",
        (__doc__ or "").partition("\n")[0],
        tokens=(1024, 4096, 16384),
        batch=(1, 4),
        rounds=ROUNDS,
    )
    parser.add_argument(
        "--model",
        choices=MODELS,
        help="take the shapes of this model; the next three options do not apply",
    )
    parser.add_argument("--layers", type=int, default=4, metavar="L", help="layers of the model")
    parser.add_argument(
        "--head-dim",
        type=int,
        default=64,
        metavar="H",
        help="channels of a head; the model is 16 heads wide",
    )
    parser.add_argument(
        "--group",
        type=int,
        default=4,
        metavar="G",
        choices=(1, 2, 4, 8, 16),
        help="query heads for each KV head",
    )
    args = parsed(parser, argv)
    config = (
        MODELS[args.model] if args.model else small_config(args.layers, args.head_dim, args.group)
    )
    heads, group = (
        config.num_key_value_heads,
        config.num_attention_heads // config.num_key_value_heads,
    )
    shapes = [Shape(b, n, config.head_dim, heads, group) for b in args.batch for n in args.tokens]
    if args.quick:
        args.rounds = ROUNDS
    try:
        check_rounds(args.cache, [tokens + WARM for tokens in args.tokens], args.rounds)
    except ValueError as error:
        parser.error(str(error))
    command = (DECODE_STEP, *arguments(argv))
    title = (
        "Decode step of a Llama with"
        f" {f'the shapes of {args.model}' if args.model else f'{args.layers} layers'}"
    )
    run(
        title,
        command,
        shapes,
        lambda shape: candidates(config, shape, args.cache, args.rounds + WARM),
        args.rounds,
        args.json,
        lengthened=WARM,
    )


if __name__ == "__main__":
    main()
