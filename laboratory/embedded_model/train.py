"""Train the small embedded Llama.

    python -m laboratory.embedded_model.train --corpus DIR --out DIR

The run can be stopped at any time (Ctrl-C ends it after a step) and continued with the same
command: checkpoint.safetensors holds the weights, the optimizer state and the step, and the rows of
a step depend on the seed and the step alone. history.json and loss.png show the curve;
`laboratory.embedded_model.export` ships the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from kvq_jax.files import whole
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama
from kvq_models.llama.rope_config import RopeConfig
from laboratory.embedded_model import corpus, state
from laboratory.embedded_model.history import plot_history, read_history, write_history
from laboratory.embedded_model.initialization import wire_induction
from laboratory.embedded_model.objective import token_losses, training_logits, weighted_loss
from laboratory.embedded_model.options import parse_arguments
from laboratory.embedded_model.synthetic import ANSWER_WEIGHT, SyntheticRows
from laboratory.embedded_model.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

PROBE_LENGTH = 1024
PROBE_ROWS = 6
ROPE_THETA = 500_000.0  # many slow pairs: content can be matched over the whole context


class Progress(NamedTuple):
    """The state that a step changes."""

    step: int
    parameters: state.Parameters
    optimizer_state: Any


@dataclasses.dataclass(frozen=True)
class Probe:
    """Fixed held-out rows, and synthetic rows with True at the answers."""

    text_rows: np.ndarray
    synthetic_rows: np.ndarray
    answers: np.ndarray


def model_config(options: argparse.Namespace) -> LlamaConfig:
    """Return the config of a Llama with 64-wide heads, 2 query heads per KV head and a tied
    head."""
    return LlamaConfig(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden_size // 64,
        num_key_value_heads=options.hidden_size // 128,
        head_dim=64,
        max_position_embeddings=corpus.WINDOW,
        rope=RopeConfig(theta=ROPE_THETA),
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_ids=(0,),
    )


def prepare_data(
    corpus_dir: Path, out: Path, vocab_size: int
) -> tuple[Tokenizer, dict[str, np.ndarray]]:
    """Return the tokenizer and the streams 'train' and 'held_out', made once and kept in the run
    directory."""
    streams_file = out / "streams.safetensors"
    if not streams_file.exists():
        train, held_out = corpus.split_documents(corpus.read_documents(corpus_dir))
        print(
            f"{len(train)} training documents, {len(held_out)} held out; training the"
            " tokenizer ...",
            flush=True,
        )
        tokenizer = train_tokenizer(train, vocab_size)
        save_tokenizer(tokenizer, out, corpus.WINDOW)
        streams = {
            "train": corpus.encode_documents(tokenizer, train),
            "held_out": corpus.encode_documents(tokenizer, held_out),
        }
        with whole.replacing(streams_file) as unfinished:
            save_file(streams, unfinished)
    return load_tokenizer(out), load_file(streams_file)


def make_probe(streams: dict[str, np.ndarray], tokenizer: Tokenizer) -> Probe:
    synthetic = SyntheticRows(tokenizer, streams["held_out"])
    rngs = (np.random.default_rng((7, row)) for row in range(PROBE_ROWS))
    made = [synthetic.row(PROBE_LENGTH, rng) for rng in rngs]
    text_rows = corpus.evaluation_rows(streams["held_out"], PROBE_LENGTH, PROBE_ROWS)
    return Probe(
        text_rows,
        np.stack([tokens for tokens, _ in made]),
        np.stack([weights == ANSWER_WEIGHT for _, weights in made]),
    )


def make_step(llama: Llama, optimizer: optax.GradientTransformation) -> Callable:
    """Return the jitted (parameters, optimizer_state, rows, weights) -> (parameters,
    optimizer_state, loss); the first two are donated."""

    def step(
        parameters: state.Parameters, optimizer_state: Any, rows: jax.Array, weights: jax.Array
    ) -> tuple[state.Parameters, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(
            lambda p: weighted_loss(state.with_parameters(llama, p), rows, weights)
        )(parameters)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        return jax.tree.map(jnp.add, parameters, updates), optimizer_state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def make_probe_function(
    llama: Llama, probe: Probe
) -> Callable[[state.Parameters], dict[str, float]]:
    """Return the function of held-out loss in nats per token and the share of answer tokens that
    the model ranks first."""

    @jax.jit
    def text_loss(parameters: state.Parameters, row: jax.Array) -> jax.Array:
        return jnp.mean(token_losses(state.with_parameters(llama, parameters), row))

    @jax.jit
    def ranked_first(parameters: state.Parameters, row: jax.Array) -> jax.Array:
        return (
            jnp.argmax(training_logits(state.with_parameters(llama, parameters), row[:, :-1]), -1)
            == row[:, 1:]
        )

    def run(parameters: state.Parameters) -> dict[str, float]:
        losses = [text_loss(parameters, row[None]) for row in probe.text_rows]
        right = np.concatenate(
            [ranked_first(parameters, row[None]) for row in probe.synthetic_rows]
        )
        return {
            "held_out_loss": float(np.mean(losses)),
            "answer_accuracy": float(right[probe.answers].mean()),
        }

    return run


def train(
    llama: Llama,
    source: corpus.RowSource,
    plan: state.OptimizerPlan,
    probe: Probe,
    out: Path,
    options: argparse.Namespace,
) -> Progress:
    """Train from the checkpoint in `out`, or from the weights of `llama`, to the end of the
    curriculum."""
    optimizer = state.make_optimizer(plan)
    history = read_history(out)
    progress, segments = _start(llama, optimizer, out)
    history = [entry for entry in history if entry["step"] <= progress.step]
    segments = [
        *segments,
        {"from_step": progress.step, "curriculum": options.curriculum, **dataclasses.asdict(plan)},
    ]
    step_function, probe_function = make_step(llama, optimizer), make_probe_function(llama, probe)
    best = min(
        (entry["held_out_loss"] for entry in history if "held_out_loss" in entry),
        default=float("inf"),
    )
    stop = _stop_requested()
    clock = time.monotonic()
    until = min(options.until or plan.total_steps, plan.total_steps)
    last = progress.step >= until
    while not last:
        batch = source.batch(progress.step)
        parameters, optimizer_state, loss = step_function(
            progress.parameters, progress.optimizer_state, batch.tokens, batch.weights
        )
        progress = Progress(progress.step + 1, parameters, optimizer_state)
        entry: dict[str, Any] = {
            "step": progress.step,
            "loss": float(loss),
            "length": batch.weights.shape[1],
            "tokens": batch.weights.size,
        }
        clock, entry["seconds"] = time.monotonic(), time.monotonic() - clock
        history.append(entry)
        finished = progress.step == plan.total_steps
        last = progress.step >= until or stop.is_set()
        if finished or progress.step % options.probe_every == 0:
            entry |= probe_function(parameters)
            if entry["held_out_loss"] < best:
                best = entry["held_out_loss"]
                with whole.replacing(out / "best.safetensors") as unfinished:
                    save_file(
                        {name: np.asarray(leaf) for name, leaf in parameters.items()}, unfinished
                    )
        if last or progress.step % options.checkpoint_every == 0:
            notes = {"segments": segments}
            state.save_checkpoint(
                out / "checkpoint.safetensors", progress.step, parameters, optimizer_state, notes
            )
            write_history(out, history)
        if last or progress.step % 10 == 0:
            _report(history, source, plan)
    return progress


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments, __doc__)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        curriculum = corpus.parse_curriculum(options.curriculum)
        tokenizer, streams = prepare_data(options.corpus, options.out, options.vocab_size)
        config = dataclasses.replace(model_config(options), vocab_size=tokenizer.get_vocab_size())
        plan = state.OptimizerPlan(
            learning_rate=options.learning_rate,
            embedding_rate=options.embedding_rate,
            warmup_steps=options.warmup_steps,
            decay_steps=options.decay_steps,
            total_steps=sum(phase.steps for phase in curriculum),
            weight_decay=options.weight_decay,
            clip_norm=1.0,
        )
        whole.write(options.out / "config.json", json.dumps(config.to_hf(), indent=2) + "\n")
        llama = Llama(config, rngs=nnx.Rngs(options.seed))
        if options.initialization == "induction":
            llama = wire_induction(
                llama, np.bincount(streams["train"], minlength=config.vocab_size), options.seed
            )
        print(
            f"{sum(leaf.size for leaf in jax.tree.leaves(llama)):,} parameters,"
            f" {len(streams['train']):,} training tokens, {plan}",
            flush=True,
        )
        source = corpus.RowSource(
            streams["train"],
            SyntheticRows(tokenizer, streams["train"]),
            curriculum,
            options.tokens_per_step,
            options.seed,
        )
        train(llama, source, plan, make_probe(streams, tokenizer), options.out, options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    plot_history(read_history(options.out), options.out / "loss.png")
    return 0


def _stop_requested() -> threading.Event:
    """Return an event that an interrupt or a termination signal sets: the run then ends after its
    step, with a checkpoint."""
    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
    return stop


def _start(
    llama: Llama, optimizer: optax.GradientTransformation, out: Path
) -> tuple[Progress, list[dict[str, Any]]]:
    """Return the progress of the run and the settings of the segments that led to it."""
    parameters = state.parameters_of(llama)
    optimizer_state = optimizer.init(parameters)
    checkpoint = out / "checkpoint.safetensors"
    if not checkpoint.exists():
        return Progress(0, parameters, optimizer_state), []
    step, notes = state.checkpoint_notes(checkpoint)
    print(f"continuing at step {step}", flush=True)
    return (
        Progress(step, *state.load_checkpoint(checkpoint, parameters, optimizer_state)),
        notes["segments"],
    )


def _report(
    history: list[dict[str, Any]], source: corpus.RowSource, plan: state.OptimizerPlan
) -> None:
    recent = history[-10:]
    speed = sum(entry["tokens"] for entry in recent) / sum(entry["seconds"] for entry in recent)
    last = history[-1]
    minutes = (plan.total_steps - last["step"]) * source.tokens_per_step / speed / 60
    probed = "".join(
        f", {name} {last[name]:.3f}"
        for name in ("held_out_loss", "answer_accuracy")
        if name in last
    )
    loss = np.mean([entry["loss"] for entry in recent])
    print(
        f"step {last['step']}/{plan.total_steps}, rows of {last['length']}, loss"
        f" {loss:.3f}{probed}, {speed:.0f} tokens/s, {minutes:.0f} min left at this speed",
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
