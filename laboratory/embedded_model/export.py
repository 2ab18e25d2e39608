"""Ship a training run.

    python -m laboratory.embedded_model.export --run DIR --out DIR --text NAME=FILE ...

The command writes the Hugging Face directory (bf16 weights, tokenizer), evaluation.json and the
model card README.md. The evaluation is of the shipped weights: they are read back from the written
checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from kvq_jax.files import whole
from kvq_models.llama.checkpoint import load_llama, save_llama
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import abstract_llama
from laboratory.embedded_model import state
from laboratory.embedded_model.card import model_card
from laboratory.embedded_model.evaluate import greedy_text, passkey_recall, score_text
from laboratory.embedded_model.history import plot_history, read_history
from laboratory.embedded_model.tokenizer import load_tokenizer, save_tokenizer

SAMPLE_PROMPTS = (
    "The ship had been at sea for",
    "Abstract\n========\n\nThis PEP proposes",
    (
        "The pass key is 48213. Remember it. 48213 is the pass key.\nThe sky is blue.\nWhat is the"
        " pass key? The pass key is "
    ),
)
HISTORY_ENTRIES = 500  # about as many entries are shipped; every held-out loss is kept
RECALL_DISTANCES = (32, 64, 128, 256, 512, 900, 1500, 1900)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m laboratory.embedded_model.export",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--run", type=Path, required=True, help="run directory of laboratory.embedded_model.train"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument(
        "--text",
        action="append",
        required=True,
        metavar="NAME=FILE",
        help="held-out text to score (repeatable); the first also fills the recall prompts",
    )
    parser.add_argument(
        "--characters",
        type=int,
        default=100_000,
        help="characters of each text (default %(default)s)",
    )
    parser.add_argument(
        "--window",
        type=int,
        default=1024,
        help="tokens scored without context from before (default %(default)s)",
    )
    parser.add_argument(
        "--trials", type=int, default=25, help="pass-key prompts per distance (default %(default)s)"
    )
    return parser.parse_args(arguments)


def ship(run: Path, out: Path) -> None:
    """Write the final weights of the run in bf16, the tokenizer and the loss curve."""
    config = LlamaConfig.from_hf(json.loads((run / "config.json").read_text()))
    weights = load_file(run / "checkpoint.safetensors")
    parameters = {
        name.removeprefix("parameters/"): jnp.asarray(leaf, jnp.bfloat16)
        for name, leaf in weights.items()
        if name.startswith("parameters/")
    }
    save_llama(state.with_parameters(abstract_llama(config, jnp.bfloat16), parameters), out)
    save_tokenizer(load_tokenizer(run), out, config.max_position_embeddings)
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "pad_token_id": config.eos_token_ids[0],
    }
    whole.write(
        out / "generation_config.json",
        json.dumps(generation | {"do_sample": False}, indent=2) + "\n",
    )
    plot_history(read_history(run), out / "loss.png")


def evaluate(out: Path, texts: dict[str, str], window: int, trials: int) -> dict[str, Any]:
    """Measure everything the card says about quality, from the shipped weights in fp32
    arithmetic."""
    llama, _ = load_llama(out, dtype="float32")
    tokenizer = load_tokenizer(out)
    filler = next(iter(texts.values()))
    distances = [d for d in RECALL_DISTANCES if d + 80 <= llama.config.max_position_embeddings]
    return {
        "window": window,
        "texts": {
            name: dataclasses.asdict(score_text(llama, tokenizer, text, window))
            for name, text in texts.items()
        },
        "passkey_trials": trials,
        "passkey_recall": passkey_recall(llama, tokenizer, filler, distances, trials),
        "greedy": {prompt: greedy_text(llama, tokenizer, prompt, 60) for prompt in SAMPLE_PROMPTS},
    }


def training_facts(run: Path) -> dict[str, Any]:
    """Return the facts of the run, from its history and the header of its checkpoint."""
    history = read_history(run)
    step, notes = state.checkpoint_notes(run / "checkpoint.safetensors")
    return {
        "parameters": sum(
            leaf.size
            for name, leaf in load_file(run / "checkpoint.safetensors").items()
            if name.startswith("parameters/")
        ),
        "steps": step,
        "tokens": int(np.sum([entry["tokens"] for entry in history])),
        "hours": float(np.sum([entry["seconds"] for entry in history])) / 3600,
        "final_held_out_loss": next(
            entry["held_out_loss"] for entry in reversed(history) if "held_out_loss" in entry
        ),
        "segments": notes["segments"],
    }


def _thinned(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    every = -(-len(history) // HISTORY_ENTRIES)
    return [entry for entry in history if entry["step"] % every == 0 or "held_out_loss" in entry]


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        named = [text.partition("=") for text in options.text]
        texts = {
            name: Path(file).read_text(encoding="utf-8")[: options.characters]
            for name, _, file in named
        }
        ship(options.run, options.out)
        results = evaluate(options.out, texts, options.window, options.trials) | {
            "training": training_facts(options.run)
        }
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    whole.write(options.out / "evaluation.json", json.dumps(results, indent=2) + "\n")
    config = json.loads((options.out / "config.json").read_text())
    whole.write(options.out / "README.md", model_card(config, results))
    whole.write(
        options.out / "history.json",
        json.dumps(_thinned(read_history(options.run)), indent=0) + "\n",
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
