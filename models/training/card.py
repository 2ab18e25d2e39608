"""The model card of the embedded Llama, generated from config.json and evaluation.json: no number is typed by hand."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

_CARD = string.Template("""\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# The embedded Llama

A Llama of $parameters parameters that ships with kvq, so that demonstrations, tests and evaluations run on the keys, values and attention
of a trained model without a network. It is a laboratory animal, not an assistant: its text has the shape of English, code and RFC prose,
and little sense.

| | |
|---|---|
| architecture | LlamaForCausalLM, $num_hidden_layers layers, width $hidden_size, MLP $intermediate_size |
| attention | $num_attention_heads query heads / $num_key_value_heads KV heads of $head_dim, RoPE base $rope_theta |
| head | tied to the embedding, $vocab_size tokens |
| context | $max_position_embeddings tokens |
| weights | bf16 (trained in fp32) |
| tokenizer | byte-level BPE, every digit a token of its own, `<|endoftext|>` opens every text and ends every document |

## Quality

Held-out text, in windows of $window tokens, each after `<|endoftext|>` and without context from the window before; bf16 weights, fp32
arithmetic, exact attention. Perplexity per token depends on the tokenizer: compare bits per byte.

$text_table

Pass keys: a five-digit key is stated once, a number of tokens of held-out text follows, then the key is asked for. Greedy decoding,
$passkey_trials prompts per distance.

$recall_table

Greedy continuations:

$samples

## Training

$steps steps on $tokens tokens ($hours hours on two shared CPU cores), rows and steps per phase `$curriculum`, one row in three synthetic,
an opening `<|endoftext|>` in every row. Muon for the matrices (update RMS 0.2), AdamW (0.9, 0.95) for embedding and norms, peak learning
rate $learning_rate, $warmup_steps steps of warm-up, constant, linear decay to zero over the last $decay_steps steps, weight decay
$weight_decay on matrices, gradient norm clipped to $clip_norm. Loss on held-out training documents at the end: $final_held_out_loss nats
per token. Curve: loss.png, history.json.

    python -m models.training.train --corpus CORPUS --out RUN --curriculum $curriculum --decay-steps $decay_steps
    python -m models.training.export --run RUN --out models/embedded --text NAME=FILE ...

Data: 63 MB of text: public-domain books (folklore, novels, poetry, dictionaries of quotations) and speeches (State of the Union and
inaugural addresses, from nltk_data), Python Enhancement Proposals (public domain), Ethereum Improvement Proposals (CC0) and Rust RFCs
(MIT or Apache-2.0). The run read less than one pass over it. Moby Dick, Pride and Prejudice, The Virginian, the NASA report and
WikiText-2 were not trained on. Synthetic documents (pass keys, several keys among text, key-value lines, repeated token sequences) are
made around the training text by `models/training/synthetic.py`.

## Limits

- A short training run: the text is poor, facts are not to be believed, and recall is only what the table says.
- Few training rows were as long as the context; quality falls towards its end.
- Perplexities here compare cache methods with one another on this model. They say nothing about larger models.
""")


def model_card(config: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """README.md of the shipped directory."""
    training = results["training"]
    return _CARD.substitute(
        {**config, **training["plan"]},
        parameters=f"{training['parameters']:,}",
        window=results["window"],
        text_table=_text_table(results["texts"]),
        passkey_trials=results["passkey_trials"],
        recall_table=_recall_table(results["passkey_recall"]),
        samples="\n\n".join(_quoted(text) for text in results["greedy"].values()),
        steps=f"{training['steps']:,}",
        tokens=f"{training['tokens']:,}",
        hours=f"{training['hours']:.1f}",
        curriculum=training["curriculum"],
        final_held_out_loss=f"{training['final_held_out_loss']:.3f}",
    )


def _text_table(texts: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        f"| {name} | {score['characters']:,} | {score['tokens']:,} | {score['perplexity']:.2f} | {score['bits_per_byte']:.3f} |"
        for name, score in texts.items()
    ]
    return "\n".join(["| text | characters | tokens | perplexity | bits per byte |", "|---|---|---|---|---|", *rows])


def _recall_table(recall: Mapping[Any, Mapping[str, float]]) -> str:
    rows = [f"| {distance} | {100 * score['exact']:.0f} % | {100 * score['digits']:.0f} % |" for distance, score in recall.items()]
    return "\n".join(["| tokens between | whole key right | digits right |", "|---|---|---|", *rows])


def _quoted(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
