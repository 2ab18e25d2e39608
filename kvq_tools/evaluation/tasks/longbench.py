"""LongBench (Bai et al. 2023), from local JSON-lines files: prompts, generation lengths, middle truncation and metrics of the benchmark.

longbench.json holds what its config folder and its scripts say of each dataset. One thing is not as there: for samsum the benchmark
forbids a line break as the first token; here leading line breaks are skipped, as its scoring skips them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
from pathlib import Path
from typing import Any

from kvq_tools.evaluation.tasks.longbench_metrics import METRICS, needed
from kvq_tools.evaluation.tasks.sample import Fields, Prompts, Sample, Scores, Task, read_rows

FIELDS = Fields({"input": str, "context": str, "answers": list}, {"dataset": str, "all_classes": list})

RULES = {
    "prompt": "LongBench's dataset2prompt.json; with --chat as the user's turn, but for few-shot and code datasets",
    "truncation": "a prompt of more than --max-length tokens (default: what the model's positions and the new tokens leave): the texts of "
    "its first and its last max_length // 2 tokens, joined",
    "answer": "greedy, at most the benchmark's max_new_tokens; of trec, triviaqa, samsum and lsht the first line after leading line breaks",
    "score": "the best metric over the right answers; ROUGE-L as rouge 1.0.1, code similarity as fuzzywuzzy without python-Levenshtein",
}


@dataclasses.dataclass(frozen=True)
class Dataset:
    """What the benchmark fixes for one dataset. first_line: only that is scored. plain: never in a chat template."""

    prompt: str
    max_new_tokens: int
    metric: str
    first_line: bool
    plain: bool


@functools.cache
def datasets() -> dict[str, Dataset]:
    resource = importlib.resources.files("kvq_tools.evaluation.tasks") / "longbench.json"
    return {name: Dataset(**fields) for name, fields in json.loads(resource.read_text(encoding="utf-8"))["datasets"].items()}


def score(sample: Sample, text: str) -> Scores:
    """`score`, 0 to 1: the largest of the dataset's metric over the right answers."""
    dataset = datasets()[sample.labels["dataset"]]
    text = _first_line(text) if dataset.first_line else text
    metric = METRICS[dataset.metric]
    return {"score": max(metric(text, answer, sample.facts["classes"]) for answer in sample.answers)}


def finished(sample: Sample, text: str) -> bool:
    """The first line has ended, where the dataset scores no other."""
    return datasets()[sample.labels["dataset"]].first_line and "\n" in text.lstrip("\n")


TASK = Task(score, finished)


def from_file(
    path: str | Path,
    prompts: Prompts,
    positions: int,
    *,
    dataset: str | None = None,
    limit: int | None = None,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
) -> list[Sample]:
    """Samples of a JSON-lines file with LongBench's fields input, context, answers, all_classes, length.

    dataset: its name where neither a field `dataset` of the rows nor the file's name says it (LongBench-E's ..._e are known by the same
    names). positions: the model's. max_length: tokens of a prompt above which its middle is cut (default: what positions and new tokens
    leave). max_new_tokens: the benchmark's where None. ValueError where the dataset is unknown, or a package for its metric is missing.
    """
    samples = []
    for row in read_rows(path, FIELDS, limit):
        name = _dataset_name(dataset or row.get("dataset") or Path(path).stem)
        chosen = datasets()[name]
        new = max_new_tokens or chosen.max_new_tokens
        text = chosen.prompt.format(**{field: row[field] for field in ("input", "context")})
        room = positions - new
        if room < 2:
            raise ValueError(f"{new} new tokens leave no room for a prompt in {positions} positions")
        ids, cut = truncated(text, prompts, min(max_length or room, room), room, plain=chosen.plain)
        facts = {"classes": row.get("all_classes") or (), "cut_tokens": cut}
        samples.append(Sample(tuple(ids), tuple(row["answers"]), new, {"dataset": name} | _length_label(row), facts))
    return samples


def truncated(text: str, prompts: Prompts, max_length: int, room: int, *, plain: bool) -> tuple[list[int], int]:
    """(tokens of the prompt, how many tokens were cut out of its middle).

    The first and the last half of `max_length` tokens are decoded, joined and encoded again, as the benchmark does, which may give a few
    more tokens, and more with a chat template. Where those are over `room`, as many tokens less are kept.
    """
    whole = list(prompts.tokenizer(text, verbose=False).input_ids)
    keep, cut = max_length, 0
    while True:
        if len(whole) > keep:
            half = keep // 2
            text, cut = prompts.decode(whole[:half]) + prompts.decode(whole[len(whole) - half :]), len(whole) - 2 * half
        ids = prompts.ids(text, plain=plain)
        if len(ids) <= room:
            return ids, cut
        keep = min(keep, len(whole)) - (len(ids) - room)
        if keep < 2:
            raise ValueError(f"the model's positions leave {room} tokens for a prompt, too few for its chat template")


def _dataset_name(name: str) -> str:
    known = datasets()
    name = name.removesuffix("_e")
    if name not in known:
        raise ValueError(f"{name!r} is no dataset of LongBench; known: {', '.join(known)}")
    if (package := needed(known[name].metric)) is not None:
        raise ValueError(f"{name} is scored by words that {package} finds: pip install {package}")
    return name


def _length_label(row: dict[str, Any]) -> dict[str, str]:
    """LongBench-E's classes of length, in words (characters of Chinese) as the benchmark counts them."""
    length = row.get("length")
    if not isinstance(length, int):
        return {}
    return {"words": "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"}


def _first_line(text: str) -> str:
    return text.lstrip("\n").split("\n")[0]
