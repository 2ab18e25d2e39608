"""Greedy decoding of one sequence with prompt-lookup drafts and without, on texts that repeat
themselves and on texts that do not.

Every text is decoded `--repeats` times each way, in turns, after both programs are compiled; times
are of decoding alone, and the tokens must be the same. A step that drafts N tokens computes 1 + N
places, accepted or not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvq_jax as kvq
from benchmarks.report_file import cores
from kvq_models import load_llama, prepare
from kvq_models.llama.model import Llama
from kvq_tools.chat_template import rendered
from kvq_tools.cli.timed import TimedGeneration

PASSAGE = (
    "The river rises in the hills behind the old mill and runs for eleven miles before it meets the"
    " sea. In spring it floods the lower meadows, and the farmers drive their cattle to the ridge;"
    " in autumn it is so low that children cross it on stones. The mill has not turned since the"
    " war. Its wheel was sold for timber, its stones lie in the garden of the inn, and only the"
    " weir is kept in order, because the inn's cellar would flood without it."
)
CODE = '''def mean(values: list[float]) -> float:
    """Return the mean of the values."""
    if not values:
        raise ValueError("give at least one value")
    return sum(values) / len(values)


def variance(values: list[float]) -> float:
    """Return the variance of the values."""
    if not values:
        raise ValueError("give at least one value")
'''
TEXTS = {  # how a prompt is asked, and whether it is a message of a conversation
    "a passage is continued": (PASSAGE, False),
    "code is continued": (CODE, False),
    "a passage is copied": (f"Repeat this text word for word:\n\n{PASSAGE}", True),
    "a passage is summarized": (f"Summarize this text in three sentences:\n\n{PASSAGE}", True),
    "a short question": ("Name three rivers of Europe and say where each of them ends.", True),
}


def prompt_of(tokenizer: Any, text: str, message: bool) -> list[int]:
    """Return the tokens of a prompt; a message is rendered with the tokenizer's chat template if it
    has one."""
    if message and tokenizer.chat_template:
        return tokenizer(
            rendered(tokenizer, [{"role": "user", "content": text}]), add_special_tokens=False
        )["input_ids"]
    return tokenizer(text)["input_ids"]


def rows_of(
    llama: Llama,
    cache: str,
    capacity: int,
    text: str,
    prompt: list[int],
    ways: Sequence[int],
    new: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """Decode one text each way, in turns; what is compiled first is not timed. ways: numbers of
    drafts, the first of them 0."""
    tokens, steps = dict[int, list[int]](), dict[int, int]()
    seconds: dict[int, list[float]] = {drafts: [] for drafts in ways}
    for _ in range(repeats):
        for drafts in ways:
            empty = kvq.init_cache(cache, llama.config, 1, capacity, "float32")
            timed = TimedGeneration(
                llama,
                empty,
                prompt,
                max_new_tokens=new,
                eos_ids=llama.config.eos_token_ids,
                drafts=drafts,
            )
            done = timed.run()
            tokens[drafts] = np.asarray(done.tokens)[0, : int(done.lengths[0])].tolist()
            steps[drafts] = timed.steps
            seconds[drafts].append(round(timed.decode_seconds, 4))
    return [
        {
            "text": text,
            "drafts": drafts,
            "prompt_tokens": len(prompt),
            "new_tokens": len(tokens[drafts]),
            "steps": steps[drafts],
            "same_tokens": tokens[drafts] == tokens[0],
            "seconds": seconds[drafts],
        }
        for drafts in ways
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cache", default="kivi:bits=4", metavar="SPEC")
    add("--drafts", nargs="+", type=int, default=[2, 4], metavar="N", help="drafted tokens a step")
    add("--new", type=int, default=96, metavar="N", help="tokens to generate")
    add("--repeats", type=int, default=3, metavar="N", help="times that each is decoded")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each text and number of drafts (0: without), with the seconds of decoding
    of each repeat."""
    if min(*options.drafts, options.new, options.repeats) < 1:
        raise ValueError("--drafts, --new and --repeats are at least 1")
    plain, tokenizer = load_llama(options.model, dtype="float32", weights="dense")
    llama, rows = prepare(plain, options.cache), []
    prompts = {
        text: prompt_of(tokenizer, prompt, message) for text, (prompt, message) in TEXTS.items()
    }
    capacity, ways = max(map(len, prompts.values())) + options.new, (0, *options.drafts)
    for text, prompt in prompts.items():
        rows += rows_of(
            llama, options.cache, capacity, text, prompt, ways, options.new, options.repeats
        )
    return {"cores": cores(), "rows": rows}
