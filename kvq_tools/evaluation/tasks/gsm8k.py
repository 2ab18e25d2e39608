"""GSM8K (Cobbe et al. 2021) with the 8 worked examples of Wei et al. 2022, as the task gsm8k_cot of lm-evaluation-harness (version 3) asks
and scores it.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from pathlib import Path

from kvq_tools.evaluation.tasks.sample import Fields, Prompts, Sample, Scores, Task, read_rows

MAX_NEW_TOKENS = 256
FIELDS = Fields({"question": str, "answer": str})
SHOTS = 8
STOPS = ("Q:", "</s>", "<|im_end|>")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
STRICT = re.compile(r"The answer is (\-?[0-9\.\,]+).")
INVALID = "[invalid]"  # where a pattern finds nothing

RULES = {
    "prompt": "[shots, each 'Q: {question}\\nA: {answer}\\n\\n']Q: {question}\\nA:",
    "truncation": "none; a prompt that does not fit the model's positions is refused",
    "answer": f"what is generated before the first of {', '.join(map(repr, STOPS))}",
    "flexible": f"1 where the last match of {FLEXIBLE.pattern} is the answer, without commas, dollar signs and a full stop at the end",
    "strict": f"the same for the first match of {STRICT.pattern}",
}


@functools.cache
def shots() -> tuple[tuple[str, str], ...]:
    """(question, answer with its chain of thought) of each example."""
    resource = importlib.resources.files("kvq_tools.evaluation.tasks") / "gsm8k.json"
    return tuple((shot["question"], shot["answer"]) for shot in json.loads(resource.read_text(encoding="utf-8"))["shots"])


def score(sample: Sample, text: str) -> Scores:
    """`flexible` and `strict`, each 1 where the number that it finds before the first stop is the answer's, else 0."""
    text = _answer(text)
    return {"flexible": float(flexible(text) == sample.answers[0]), "strict": float(strict(text) == sample.answers[0])}


def finished(sample: Sample, text: str) -> bool:
    """A stop was generated."""
    return _answer(text) != text


TASK = Task(score, finished)


def flexible(text: str) -> str:
    """The last number in a text, normalized."""
    matches = FLEXIBLE.findall(text)
    return normalized(next(group for group in matches[-1] if group) if matches else INVALID)


def strict(text: str) -> str:
    """The number after "The answer is", normalized."""
    match = STRICT.search(text)
    return normalized(match.group(1) if match else INVALID)


def normalized(number: str) -> str:
    """As the harness compares: no commas and dollar signs, nothing up to the last '#### ', no full stop at the end."""
    number = re.sub(r"(?s).*#### ", "", number.strip().replace(",", "").replace("$", ""))
    return re.sub(r"\.$", "", number).lower()


def from_file(
    path: str | Path, prompts: Prompts, *, limit: int | None = None, examples: int = SHOTS, max_new_tokens: int = MAX_NEW_TOKENS
) -> list[Sample]:
    """Problems of a JSON-lines file with fields `question` and `answer`, whose last line is '#### ' and the number."""
    before = "".join(f"Q: {question}\nA: {answer}\n\n" for question, answer in shots()[:examples])
    return [
        Sample(
            tuple(prompts.ids(f"{before}Q: {row['question']}\n", "A:")),
            (normalized(row["answer"].split("####")[-1]),),
            max_new_tokens,
        )
        for row in read_rows(path, FIELDS, limit)
    ]


def _answer(text: str) -> str:
    return text[: min((at for at in map(text.find, STOPS) if at >= 0), default=len(text))]
