"""A multi-head variant of a small GQA model: every KV head is copied for each of its query heads, then training takes the copies apart.

    W'[:, n] = W[:, n // G] (1 + noise)       W of keys and values, by heads; n a query head, G query heads share a KV head

With noise = 0 the logits are those of the model it was made from. XQuant caches the layer's input where a model has as many KV heads as
query heads, and latents of it where KV heads are shared: this is how the same trained model serves to measure both.

    python -m benchmarks.quality.mha_variant --corpus DIR --out DIR

writes a Hugging Face directory that `kvq` and `load_llama` read, history.json with perplexity and similarity of the heads before and
after, and loss.png. An interrupted run goes on with the same command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from kvq_jax.files import whole
from kvq_models import EMBEDDED, LlamaConfig, load_llama
from kvq_models.llama.model import Llama, abstract_llama
from tools.embedded_model import corpus, export, state, train
from tools.embedded_model.objective import token_losses
from tools.embedded_model.synthetic import SyntheticRows
from tools.embedded_model.tokenizer import load_tokenizer, save_tokenizer

SIDES = {"k": "k_proj", "v": "v_proj"}
ROW = 1024  # tokens of the rows that perplexity is measured on


def repeat_kv_heads(llama: Llama) -> Llama:
    """Return the same function of its tokens with a KV head for each query head. A bias is repeated like a column of its kernel."""
    config = llama.config
    group = config.num_attention_heads // config.num_key_value_heads

    def repeated(name: str, leaf: jax.Array) -> jax.Array:
        if not any(f"/{projection}/" in name for projection in SIDES.values()):
            return leaf
        heads = leaf.reshape(*leaf.shape[:-1], config.num_key_value_heads, config.head_dim)
        return jnp.repeat(heads, group, axis=-2).reshape(*leaf.shape[:-1], -1)

    parameters = {name: repeated(name, leaf) for name, leaf in state.parameters_of(llama).items()}
    wide = dataclasses.replace(config, num_key_value_heads=config.num_attention_heads)
    return state.with_parameters(abstract_llama(wide, llama.embed[...].dtype), parameters)


def disturb(llama: Llama, noise: float, seed: int) -> Llama:
    """Normal noise on the kernels of keys and values, `noise` times the root mean square of each kernel."""
    rng = np.random.default_rng(seed)
    parameters = state.parameters_of(llama)
    for name, leaf in parameters.items():
        if any(f"/{projection}/kernel" in name for projection in SIDES.values()):
            size = noise * jnp.sqrt(jnp.mean(jnp.square(leaf)))
            parameters[name] = leaf + size * jnp.asarray(rng.standard_normal(leaf.shape, np.float32), leaf.dtype)
    return state.with_parameters(llama, parameters)


def sibling_cosines(llama: Llama, group: int) -> dict[str, list[float]]:
    """For keys and values, one number for each layer: the mean cosine between the projections [D, H] of heads that were copies of one.

    `group` heads, next to each other, were copies of one head; ValueError where that is fewer than two.
    """
    if group < 2:
        raise ValueError(f"{group=}: there are no siblings where every query head had a KV head of its own")
    pairs = np.triu_indices(group, 1)

    def cosine(kernel: np.ndarray) -> float:
        heads = kernel.reshape(kernel.shape[0], -1, group, llama.config.head_dim).transpose(1, 2, 0, 3)  # [families, group, D, H]
        vectors = heads.reshape(*heads.shape[:2], -1)
        vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
        return float(np.mean((vectors @ vectors.swapaxes(1, 2))[:, *pairs]))

    return {
        side: [cosine(np.array(getattr(layer, projection).kernel[...], np.float64)) for layer in llama.layers]
        for side, projection in SIDES.items()
    }


def perplexity(llama: Llama, rows: np.ndarray) -> float:
    """exp of the mean loss over rows [rows, ROW + 1], each without context from before."""
    loss = jax.jit(lambda model, row: jnp.mean(token_losses(model, row)))
    return math.exp(np.mean([float(loss(llama, row[None])) for row in rows]))


def read_streams(corpus_dir: Path, run: Path, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """The streams 'train' and 'held_out' in the model's own tokens, encoded once and kept in the run directory."""
    file = run / "streams.safetensors"
    if not file.exists():
        train_documents, held_out = corpus.split_documents(corpus.read_documents(corpus_dir))
        print(f"{len(train_documents)} training documents, {len(held_out)} held out; encoding ...", flush=True)
        parts = {"train": train_documents, "held_out": held_out}
        with whole.replacing(file) as unfinished:
            save_file({name: corpus.encode_documents(tokenizer, documents) for name, documents in parts.items()}, unfinished)
    return load_file(file)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.mha_variant", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="directory of *.txt files; a line <|endoftext|> ends a document")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to; DIR/training holds the run itself")
    parser.add_argument("--model", type=Path, default=EMBEDDED, help="a directory with a small GQA model (default: the embedded one)")
    parser.add_argument("--steps", type=int, default=800, help="updates of --tokens-per-step tokens (default %(default)s)")
    parser.add_argument("--tokens-per-step", type=int, default=2048, help="tokens of one update (default %(default)s)")
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=4.5e-3,
        help="peak, held for half of the steps, then falling linearly to zero (default %(default)s)",
    )
    parser.add_argument(
        "--noise", type=float, default=0.2, help="on the copies, relative to the weights' root mean square (default %(default)s)"
    )
    parser.add_argument("--held-out-rows", type=int, default=48, help=f"rows of {ROW} tokens of the perplexity (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the noise and the rows (default %(default)s)")
    return parser.parse_args(arguments)


def check_model(config: LlamaConfig) -> None:
    """ValueError where the model has no KV heads to take apart, or is more than the training loss computes."""
    if config.num_attention_heads == config.num_key_value_heads:
        raise ValueError(f"every one of the {config.num_attention_heads} query heads has a KV head of its own already")
    if config.qkv_bias or config.qk_norm or config.o_bias or config.mlp_bias or not config.tie_word_embeddings:
        raise ValueError("only models with a tied head and without biases and QK-norm can be trained here")


def uptrain(llama: Llama, streams: dict[str, np.ndarray], tokenizer: Tokenizer, run: Path, options: argparse.Namespace) -> train.Progress:
    """Three quarters of the steps on rows of 1024 tokens, the others on rows of 2048, by the embedded model's own recipe."""
    options.curriculum = f"{ROW}:{options.steps - options.steps // 4},{corpus.WINDOW}:{options.steps // 4}"
    options.until, options.probe_every, options.checkpoint_every = None, 50, 25
    source = corpus.RowSource(
        streams["train"],
        SyntheticRows(tokenizer, streams["train"]),
        corpus.parse_curriculum(options.curriculum),
        options.tokens_per_step,
        options.seed,
    )
    plan = state.OptimizerPlan(
        learning_rate=options.learning_rate,
        embedding_rate=0.1,
        warmup_steps=20,
        decay_steps=max(1, options.steps // 2),
        total_steps=options.steps,
        weight_decay=0.01,
        clip_norm=1.0,
    )
    return train.train(llama, source, plan, train.make_probe(streams, tokenizer), run, options)


def make(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the content of history.json, after everything else was written; None where the run was interrupted."""
    llama, _ = load_llama(options.model, dtype="float32")
    check_model(llama.config)
    group = llama.config.num_attention_heads // llama.config.num_key_value_heads
    tokenizer, run = load_tokenizer(options.model), options.out / "training"
    run.mkdir(parents=True, exist_ok=True)
    streams = read_streams(options.corpus, run, tokenizer)
    rows = corpus.evaluation_rows(streams["held_out"], ROW, options.held_out_rows)

    def described(model: Llama) -> dict[str, Any]:
        return {"perplexity": perplexity(model, rows), "cosines": sibling_cosines(model, group)}

    copies = repeat_kv_heads(llama)
    start = disturb(copies, options.noise, options.seed)
    found = {"original": {"perplexity": perplexity(llama, rows)}, "copies": described(copies), "disturbed": described(start)}
    for name, entry in found.items():
        print(_line(name, entry), flush=True)
    whole.write(run / "config.json", json.dumps(start.config.to_hf(), indent=2) + "\n")
    save_tokenizer(tokenizer, run, start.config.max_position_embeddings)
    if uptrain(start, streams, tokenizer, run, options).step < options.steps:
        return None
    export.ship(run, options.out)
    shipped, _ = load_llama(options.out, dtype="float32")
    found["uptrained"] = described(shipped)
    print(_line("uptrained", found["uptrained"]), flush=True)
    settings = {name: value for name, value in vars(options).items() if isinstance(value, int | float | str)}
    history = {"settings": settings, "held_out_tokens": rows[:, 1:].size, **found, "steps": train.read_history(run)}
    whole.write(options.out / "history.json", json.dumps(history, indent=1) + "\n")
    return history


def _line(name: str, entry: Mapping[str, Any]) -> str:
    line = f"{name}: held-out perplexity {entry['perplexity']:.3f}"
    if "cosines" in entry:
        means = {side: float(np.mean(layers)) for side, layers in entry["cosines"].items()}
        line += f"; mean cosine between copies: keys {means['k']:.3f}, values {means['v']:.3f}"
    return line


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        finished = make(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if finished is None:
        print("interrupted; the same command goes on", flush=True)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
