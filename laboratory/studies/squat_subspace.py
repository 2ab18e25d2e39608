"""Measure how well a prompt's queries predict where later ones lie: Figure 2 of the SQuat paper.

The model reads a prompt and writes a response without quantization, so that errors do not change
the text (Appendix E.1). This is repeated for several windows of a text, and every window's numbers
are kept.

    deviation = mean |q - proj(q)| / |q|
        of the response's queries q, from the r largest singular directions of other queries
    error = mean |q . (k^ - k)| / sqrt(H)
        of the response's queries with the prompt's keys, all of them quantized to 2 bits

Figure 2 looks at queries and keys before RoPE. Scores are made after it, so both are measured here;
and also the errors if other queries span the subspace or meet the keys (the prompt's own, the
response's, the prompt's turned to the response's positions).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvq_jax as kvq
from benchmarks.progress import progress
from kvq_jax.methods.squat import subspace
from kvq_jax.types.array_types import PositionsBT, ValidBT
from kvq_models import Llama, Sampling, generate, load_llama
from kvq_models.llama.model import HiddenBTD, Layer, causal_attention
from kvq_models.llama.rope import Ropes, ropes_for

ROOT = pathlib.Path(__file__).parents[2]
RANKS = (1, 2, 3, 5, 8, 12, 16, 24, 32, 48, 64)
SCORE_RANKS = (1, 5, 20, 64)
LAMS = (1e-5, 1e-4, 1e-3, 1e-2)


def continued(
    llama: Llama, prompt: Int[np.ndarray, " P"], count: int, seed: int
) -> Int[np.ndarray, " T"]:
    """Return a prompt and the `count` tokens that the model writes after it, at temperature 1 and
    without quantization."""
    cache = kvq.init_cache("dense", llama.config, 1, len(prompt) + count, "float32")
    out = generate(
        llama,
        cache,
        prompt[None],
        max_new_tokens=count,
        sampling=Sampling(temperature=1.0),
        key=jax.random.key(seed),
    )
    return np.concatenate([prompt, np.asarray(out.tokens)[0, -count:]])


def layer_inputs(llama: Llama, tokens: Int[np.ndarray, " T"]) -> list[kvq.types.LayerInputs]:
    """Return queries, keys and values of one sequence at every layer, from the exact forward
    pass."""
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    valid, rope = positions >= 0, ropes_for(llama.config, len(tokens))
    hidden = llama.embed_tokens(jnp.asarray(tokens, jnp.int32)[None])
    inputs_of = []
    for layer in llama.layers:
        inputs, hidden = _layer(layer, hidden, positions, valid, rope)
        inputs_of.append(inputs)
    return inputs_of


@jax.jit
def _layer(
    layer: Layer, hidden: HiddenBTD, positions: PositionsBT, valid: ValidBT, rope: Ropes
) -> tuple[kvq.types.LayerInputs, HiddenBTD]:
    """Return what attention sees in a layer, and the layer's output."""
    inputs = layer.attention_inputs(hidden, positions, valid, rope)
    attended = causal_attention(
        inputs.q_rot, inputs.k_rot, inputs.v, valid, layer.attention, layer.sink_logits()
    )
    return inputs, layer.finish(hidden, attended)


def tokens_of(inputs: kvq.types.LayerInputs, start: int, stop: int) -> kvq.types.LayerInputs:
    """Return tokens start .. stop - 1 alone; positions are kept."""
    cut: dict[str, Any] = {
        f: getattr(inputs, f)[:, :, start:stop] for f in ("q_pre", "q_rot", "k_pre", "k_rot", "v")
    }
    return dataclasses.replace(
        inputs,
        x=None,
        residual=None,
        positions=inputs.positions[:, start:stop],
        valid=inputs.valid[:, start:stop],
        **cut,
    )


def before_rope(inputs: kvq.types.LayerInputs) -> kvq.types.LayerInputs:
    """Return the layer's inputs as in a model without RoPE, where Figure 2 looks."""
    assert inputs.q_pre is not None
    assert inputs.k_pre is not None
    return dataclasses.replace(inputs, q_rot=inputs.q_pre, k_rot=inputs.k_pre)


def score_error(
    queries: Float[Array, "1 N R H"], keys: Float[Array, "1 K T H"], coded: Float[Array, "1 K T H"]
) -> float:
    """mean |q . (k^ - k)| / sqrt(H) over the queries of every KV head's group and its keys."""
    _, heads, _, head_dim = keys.shape
    grouped = queries.reshape(heads, -1, head_dim)
    return (
        float(jnp.mean(jnp.abs(jnp.einsum("krh,kth->krt", grouped, (coded - keys)[0]))))
        / head_dim**0.5
    )


@functools.partial(jax.jit, static_argnames="heads")
def deviations(
    spanning: Float[Array, "1 N T H"], queries: Float[Array, "1 N R H"], heads: int
) -> Float[Array, " H"]:
    """Mean deviation of `queries`, normalized, from the subspaces of rank 1, 2, ... H of
    `spanning`; both of the same KV heads."""
    matrix = subspace.gram(spanning, jnp.ones((1, spanning.shape[2]), bool), heads)
    _, vectors = subspace.directions(matrix, matrix.shape[-1])
    grouped = queries.reshape(heads, -1, queries.shape[-1])
    unit = grouped / jnp.linalg.norm(grouped, axis=-1, keepdims=True)
    inside = jnp.cumsum(jnp.square(jnp.einsum("kth,khr->ktr", unit, vectors[0])), axis=-1)
    return jnp.mean(jnp.sqrt(jnp.maximum(1 - inside, 0)), axis=(0, 1))


@dataclasses.dataclass(frozen=True)
class Setting:
    """A method beside KIVI on the prompt's keys: whose queries it sees, and which queries meet the
    keys."""

    name: str
    squat: str
    kivi: str
    given: kvq.types.LayerInputs
    asking: Float[Array, "1 N R H"]


def settings(inputs: kvq.types.LayerInputs, prompt: int) -> list[Setting]:
    plain, given, later = (
        before_rope(inputs),
        tokens_of(inputs, 0, prompt),
        inputs.q_rot[:, :, prompt:],
    )
    known = jnp.tile(later, (1, 1, -(-prompt // later.shape[2]), 1))[:, :, :prompt]
    pre = "kivi:pre_rope=true"
    return [
        Setting(
            "queries and keys before RoPE",
            "squat",
            "kivi",
            tokens_of(plain, 0, prompt),
            plain.q_rot[:, :, prompt:],
        ),
        Setting("squat", "squat", "kivi", given, later),
        Setting("squat, 4 bits", "squat:bits=4", "kivi:bits=4", given, later),
        Setting("squat, met by the prompt's own queries", "squat", "kivi", given, given.q_rot),
        Setting(
            "squat, spanned by the response's queries",
            "squat",
            "kivi",
            dataclasses.replace(given, q_rot=known),
            later,
        ),
        Setting("squat:ahead=256", "squat:ahead=256", "kivi", given, later),
        Setting(
            "squat:ahead=256,block_channels=8",
            "squat:ahead=256,block_channels=8",
            "kivi",
            given,
            later,
        ),
        Setting("squat_pre", "squat_pre", pre, given, later),
        Setting("squat_pre:block_channels=8", "squat_pre:block_channels=8", pre, given, later),
    ]


@functools.partial(jax.jit, static_argnums=0)
def _coded(spec: str, inputs: kvq.types.LayerInputs) -> Float[Array, "B K T H"]:
    return kvq.cache.roundtrip_layer(spec, inputs)[0]


def layer_errors(
    inputs: kvq.types.LayerInputs, prompt: int, ranks: Sequence[int], lams: Sequence[float]
) -> Iterator[tuple[tuple[str, int | None, float | None], float]]:
    """Yield (setting, rank, lam) and the error, for KIVI and SQuat on the prompt's keys in every
    setting."""
    for setting in settings(inputs, prompt):
        grid = [(rank, lam) for rank in ranks for lam in lams]
        specs: dict[tuple[int | None, float | None], str] = {(None, None): setting.kivi}
        specs |= {
            (
                rank,
                lam,
            ): f"{setting.squat}{',' if ':' in setting.squat else ':'}rank={rank},lam={lam:f}"
            for rank, lam in grid
        }
        for (rank, lam), spec in specs.items():
            coded = _coded(spec, setting.given)
            yield (
                (setting.name, rank, lam),
                round(score_error(setting.asking, setting.given.k_rot, coded), 6),
            )


def layer_deviations(
    response: kvq.types.LayerInputs, sources: dict[str, kvq.types.LayerInputs]
) -> Iterator[tuple[tuple[str, bool], tuple[float, ...]]]:
    """Yield (source, rope) and the deviations by rank, of the response's queries from the subspace
    of each source's."""
    heads = response.k_rot.shape[1]
    for rope in (False, True):
        for source, given in sources.items():
            spanning, queries = (
                i.q_rot if rope else before_rope(i).q_rot for i in (given, response)
            )
            by_rank = np.asarray(deviations(spanning, queries, heads))
            yield (
                (source, rope),
                tuple(round(float(by_rank[rank - 1]), 5) for rank in RANKS if rank <= len(by_rank)),
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text", metavar="FILE", type=pathlib.Path, default=ROOT / "kvq_tools/cli/passage.txt")
    add("--other-text", metavar="FILE", type=pathlib.Path, default=ROOT / "LICENSE")
    add("--windows", type=int, default=1, help="prompts, one after the other in the text")
    add("--prompt", type=int, default=512, help="tokens of a prompt")
    add("--response", type=int, default=256, help="tokens of a response")
    add("--rank", type=int, nargs="+", default=SCORE_RANKS, help="ranks of the errors")
    add("--lam", type=float, nargs="+", default=LAMS, help="lambdas of the errors")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return deviations and errors by layer, a number for each window.

    Raises ValueError if a text is too short or a rank exceeds head_dim.
    """
    prompt, total = options.prompt, options.prompt + options.response
    llama, tokenizer = load_llama(options.model, dtype="float32", weights="dense")
    ids, other_ids = (
        np.asarray(tokenizer(f.read_text(encoding="utf-8"), verbose=False).input_ids, np.int32)
        for f in (options.text, options.other_text)
    )
    head_dim, needed = llama.config.head_dim, options.windows * total
    if max(options.rank) > head_dim:
        raise ValueError(
            f"rank {max(options.rank)} must be at most the model's head_dim ({head_dim})"
        )
    if len(ids) < 2 * needed or len(other_ids) < needed:
        raise ValueError(
            f"{options.text.name} must have {2 * needed} tokens and {options.other_text.name}"
            f" {needed}; they have {len(ids)} and {len(other_ids)}"
        )
    windows, elsewhere, foreign = (
        part.reshape(-1, total) for part in (ids[:needed], ids[-needed:], other_ids[:needed])
    )
    deviations_of: dict[tuple, list[tuple[float, ...]]] = collections.defaultdict(list)
    errors_of: dict[tuple, list[float]] = collections.defaultdict(list)
    for window in range(options.windows):
        sequences = (
            continued(llama, windows[window, :prompt], options.response, seed=window),
            elsewhere[-1 - window],
            foreign[window],
        )
        for layer, (inputs, *others) in enumerate(
            zip(*(layer_inputs(llama, tokens) for tokens in sequences), strict=True)
        ):
            sources = {"prompt": tokens_of(inputs, 0, prompt), "prompt and response": inputs}
            sources |= zip(("another part", "another text"), others, strict=True)
            response = tokens_of(inputs, prompt, total)
            for (source, rope), values in layer_deviations(response, sources):
                deviations_of[source, rope, layer].append(values)
            for (setting, rank, lam), error in layer_errors(
                inputs, prompt, options.rank, options.lam
            ):
                errors_of[setting, rank, lam, layer].append(error)
        progress(f"window {window + 1} of {options.windows}")
    return {
        "ranks": [rank for rank in RANKS if rank <= head_dim],
        "deviations": [
            dict(zip(("source", "rope", "layer"), key, strict=True), windows=values)
            for key, values in deviations_of.items()
        ],
        "errors": [
            dict(zip(("setting", "rank", "lam", "layer"), key, strict=True), windows=values)
            for key, values in errors_of.items()
        ],
    }
