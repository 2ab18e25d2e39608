"""The model card of the embedded Llama, generated from config.json and evaluation.json: no number
is typed by hand."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

_CARD = string.Template("""\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# The embedded Llama

A Llama of $parameters parameters that ships with kvq, so that demonstrations, tests and evaluations
run on the keys, values and attention of a trained model without a network. It is a laboratory
animal, not an assistant: it recalls what its context says, and left to itself it soon repeats
itself.

| | |
|---|---|
| architecture | LlamaForCausalLM, $num_hidden_layers layers, width $hidden_size, MLP \
$intermediate_size |
| attention | $num_attention_heads query heads / $num_key_value_heads KV heads of $head_dim, RoPE \
base $rope_theta |
| head | tied to the embedding, $vocab_size tokens |
| context | $max_position_embeddings tokens |
| weights | bf16 (trained in fp32) |
| tokenizer | byte-level BPE, every digit a token of its own, `<|endoftext|>` opens every text and \
ends every document |

## Quality

Held-out text, in windows of $window tokens, each after `<|endoftext|>` and without context from the
window before; bf16 weights, fp32 arithmetic, exact attention. Perplexity per token depends on the
tokenizer: compare bits per byte.

$text_table

Pass keys: a five-digit key is stated once, a number of tokens of held-out text follows, then the
key is asked for. Greedy decoding, $passkey_trials prompts per distance.

$recall_table

Greedy continuations:

$samples

## Training

$steps steps on $tokens tokens ($hours hours on two shared CPU cores): Muon for the matrices (update
RMS 0.2), AdamW (0.9, 0.95) for embedding and norms, warm-up, then linear decay to zero, gradient
norm clipped to 1. Every row opens with `<|endoftext|>`; one row in four is synthetic. Loss on
held-out training documents at the end: $final_held_out_loss nats per token. Curve: loss.png,
history.json.

The run was too short to discover recall. It started from weights in which an induction circuit is
wired by hand (layers 0 and 1, `laboratory/embedded_model/initialization.py`) and all weights were
then trained. So the first two layers' attention has a designed origin: sharp heads that look one
and two tokens back, driven by one constant channel (its keys are outliers), and heads that match
pairs of tokens. Layers 2 and 3 grew from random weights.

Segments (each continued from the checkpoint of the one before; rows and steps per phase count from
step 0):

$segments

$commands
    python -m laboratory.embedded_model.export --run RUN --out models/kvq_models/embedded \
--text NAME=FILE ...

Data: 63 MB of text: public-domain books (folklore, novels, poetry, dictionaries of quotations) and
speeches (State of the Union and inaugural addresses, from nltk_data), Python Enhancement Proposals
(public domain), Ethereum Improvement Proposals (CC0) and Rust RFCs (MIT or Apache-2.0). The run
read less than one pass over it. Moby Dick, Pride and Prejudice, The Virginian, the NASA report and
WikiText-2 were not trained on. Synthetic documents (pass keys, several keys among text, key-value
lines, repeated token sequences) are made around the training text by
`laboratory/embedded_model/synthetic.py`.

## Limits

- A very short training run: the text is poor, facts are not to be believed, and recall is only what
  the table says.
- Recall rests on circuits that were wired before training. It shows how cache methods treat such
  circuits, not how models learn them.
- Few training rows were as long as the context; quality falls towards its end.
- Perplexities here compare cache methods with one another on this model. They say nothing about
  larger models.
""")


def model_card(config: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Return the text of the README.md of the shipped directory."""
    training = results["training"]
    return _CARD.substitute(
        config,
        parameters=f"{training['parameters']:,}",
        window=results["window"],
        text_table=_text_table(results["texts"]),
        passkey_trials=results["passkey_trials"],
        recall_table=_recall_table(results["passkey_recall"]),
        samples="\n\n".join(_quoted(text) for text in results["greedy"].values()),
        steps=f"{training['steps']:,}",
        tokens=f"{training['tokens']:,}",
        hours=f"{training['hours']:.1f}",
        segments=_segment_table(training["segments"]),
        commands=_commands(training["segments"], training["steps"]),
        final_held_out_loss=f"{training['final_held_out_loss']:.3f}",
    )


def _text_table(texts: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        f"| {name} | {score['characters']:,} | {score['tokens']:,} | {score['perplexity']:.2f} |"
        f" {score['bits_per_byte']:.3f} |"
        for name, score in texts.items()
    ]
    return "\n".join(
        [
            "| text | characters | tokens | perplexity | bits per byte |",
            "|---|---|---|---|---|",
            *rows,
        ]
    )


def _recall_table(recall: Mapping[Any, Mapping[str, float]]) -> str:
    rows = [
        f"| {distance} | {100 * score['exact']:.0f} % | {100 * score['digits']:.0f} % |"
        for distance, score in recall.items()
    ]
    return "\n".join(
        ["| tokens between | whole key right | digits right |", "|---|---|---|", *rows]
    )


def _segment_table(segments: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        f"| {segment['from_step']} | {segment['curriculum']} | {segment['learning_rate']} |"
        f" {segment['embedding_rate']} | {segment['warmup_steps']} | {segment['decay_steps']} of"
        f" {segment['total_steps']} | {segment['weight_decay']} |"
        for segment in segments
    ]
    names = (
        "| from step | curriculum | peak learning rate | embedding's share | warm-up | decay steps"
        " | weight decay |"
    )
    return "\n".join([names, "|---|---|---|---|---|---|---|", *rows])


def _commands(segments: Sequence[Mapping[str, Any]], steps: int) -> str:
    """Return the command of each segment; the last one runs to its end."""
    ends = [segment["from_step"] for segment in segments[1:]] + [steps]
    return "\n".join(
        "    python -m laboratory.embedded_model.train --corpus CORPUS --out RUN --curriculum"
        f" {segment['curriculum']} --learning-rate {segment['learning_rate']} --embedding-rate"
        f" {segment['embedding_rate']} --warmup-steps {segment['warmup_steps']} --decay-steps"
        f" {segment['decay_steps']} --until {end}"
        for segment, end in zip(segments, ends, strict=True)
    )


def _quoted(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
