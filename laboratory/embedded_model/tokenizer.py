"""Byte-level BPE: trained on the documents, saved as a Hugging Face tokenizer.

Digits are tokens of their own: a number that was never seen can be copied digit by digit, and "is
4" and "is " + "4" are the same tokens. One special token, `<|endoftext|>`, opens every encoded text
(a position-0 sink, as in Llama) and separates documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvq_jax.files import whole

END_OF_TEXT = "<|endoftext|>"
END_ID = 0  # the trainer numbers special tokens first


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn `vocab_size` byte-level BPE tokens; END_OF_TEXT is END_ID, the next 256 are the single
    bytes, so any text has an encoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A $B",
        special_tokens=[(END_OF_TEXT, END_ID)],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, which `transformers.AutoTokenizer` loads."""
    directory.mkdir(parents=True, exist_ok=True)
    whole.write(directory / "tokenizer.json", tokenizer.to_str(pretty=True))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    whole.write(directory / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read the tokenizer.json of `directory`."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))
