"""Samples of tasks on the embedded model, for tests."""

import functools
import json

from kvq_models import EMBEDDED
from kvq_tools.evaluation.tasks import niah, passkey
from kvq_tools.evaluation.tasks.sample import TaskPrompts

TEXT = " ".join(f"Sentence {i} of the text says little, and says it slowly." for i in range(400))
DEPTHS = (0.0, 0.3, 1.0)


@functools.cache
def embedded_prompts():
    from kvq_models.llama.hf_directory import load_tokenizer

    return TaskPrompts(load_tokenizer(EMBEDDED))


def passkeys(**changes):
    settings = {"lengths": (200, 400), "depths": DEPTHS, "count": 2, "seed": 0, "text": None}
    return passkey.generated(embedded_prompts(), **settings | changes)


def needles(kind, **changes):
    settings = {
        "lengths": (500,),
        "depths": DEPTHS,
        "count": 2,
        "seed": 0,
        "text": TEXT,
        "max_new_tokens": 32,
    }
    return niah.generated(embedded_prompts(), kind, **settings | changes)


def prompt_text(sample):
    return embedded_prompts().decode(list(sample.prompt))


def lines(path, *rows):
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"
    )
    return path
