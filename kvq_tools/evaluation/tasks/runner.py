"""Run a task: prompts of similar length run together, and every token goes through the cache."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvq_jax.cache.cache import init_cache
from kvq_jax.cache.spec import CacheSpec
from kvq_models.calibration.progress import Progress
from kvq_models.inference.checked_input import right_padded
from kvq_models.inference.generation import Generated, generate_stream
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama
from kvq_tools.evaluation.tasks.sample import AnswerRule, Scores, TaskPrompts, TaskSample

MIN_CAPACITY = 64  # tokens of a cache, at least


@dataclasses.dataclass(frozen=True)
class ScoredAnswer:
    """The text generated for the sample of this index, and its scores. finite: as in
    `Generated`."""

    index: int
    text: str
    tokens: int
    scores: Scores
    finite: bool = True


def check_samples(samples: Sequence[TaskSample], config: LlamaConfig) -> None:
    """Raise ValueError, in one line, if a sample is empty, has a token that the model does not
    know, or does not fit its positions."""
    for index, sample in enumerate(samples):
        if not sample.prompt:
            raise ValueError(f"sample {index} has an empty prompt")
        outside = [token for token in sample.prompt if not 0 <= token < config.vocab_size]
        if outside:
            raise ValueError(
                f"sample {index} has token id {outside[0]}, outside the model's vocabulary of"
                f" {config.vocab_size}"
            )
        need = len(sample.prompt) + sample.max_new_tokens
        if need > config.positions:
            raise ValueError(
                f"sample {index} needs {need} tokens ({len(sample.prompt)} prompt +"
                f" {sample.max_new_tokens} new), and the model was trained for {config.positions}"
                " positions: take a shorter one, or fewer new tokens"
            )


def capacity(sample: TaskSample, config: LlamaConfig) -> int:
    """Return the capacity of a sample's cache: at most a quarter more than it needs, within the
    model's positions, on which dynamic RoPE depends. There are few different capacities, because
    each is a program to compile."""
    need = len(sample.prompt) + sample.max_new_tokens
    step = max(MIN_CAPACITY, 2 ** (max(need - 1, 1).bit_length() - 1) // 4)
    return min(-(-need // step) * step, config.positions)


def run(
    llama: Llama,
    spec: CacheSpec,
    task: AnswerRule,
    samples: Sequence[TaskSample],
    prompts: TaskPrompts,
    *,
    batch: int,
    progress: Progress[Any] | None = None,
    message: str = "running",
) -> Iterator[ScoredAnswer]:
    """Answer samples greedily, in no particular order. `llama` is prepared for the cache
    (`kvq_models.prepare`). Full-precision rows have its dtype.

    batch: the most prompts that run together. The scores do not depend on it, except for the
    rounding of sums. Generation ends at the model's end-of-sequence tokens, at a sample's
    max_new_tokens, or when the task is finished with all texts of a batch. Samples must fit the
    model (`check_samples`).
    """
    rows = list(batches(samples, llama.config, batch))
    for indices in rows if progress is None else progress(rows, message):
        answers = _generated(llama, spec, task, [samples[i] for i in indices], prompts)
        for index, (text, tokens, finite) in dict(zip(indices, answers, strict=True)).items():
            yield ScoredAnswer(index, text, tokens, task.score(samples[index], text), finite)


def batches(samples: Sequence[TaskSample], config: LlamaConfig, batch: int) -> Iterator[list[int]]:
    """Yield the indices of samples that run together, the longest first, so that memory runs out at
    once or never. The last of several batches repeats its last sample: a smaller batch would be
    another program to compile."""

    def shape(index: int) -> tuple[int, int]:
        return capacity(samples[index], config), samples[index].max_new_tokens

    for _, group in itertools.groupby(
        sorted(range(len(samples)), key=shape, reverse=True), key=shape
    ):
        indices = list(group)
        for at in range(0, len(indices), batch):
            chunk = indices[at : at + batch]
            yield chunk + chunk[-1:] * (min(batch, len(indices)) - len(chunk))


def _generated(
    llama: Llama, spec: CacheSpec, task: AnswerRule, samples: list[TaskSample], prompts: TaskPrompts
) -> list[tuple[str, int, bool]]:
    """Return (text, number of tokens, True if all logits were finite) for each sample."""
    room, new = capacity(samples[0], llama.config), samples[0].max_new_tokens
    tokens, lengths = right_padded([list(sample.prompt) for sample in samples])
    cache = init_cache(spec, llama.config, len(samples), room, llama.embed[...].dtype)
    ends = llama.config.eos_token_ids
    segments = generate_stream(llama, cache, tokens, lengths, max_new_tokens=new, eos_ids=ends)
    return answers_of(segments, ends, task, samples, prompts)


def answers_of(
    segments: Iterable[Generated],
    ends: Sequence[int],
    task: AnswerRule,
    samples: list[TaskSample],
    prompts: TaskPrompts,
) -> list[tuple[str, int, bool]]:
    """Return the texts of a stream as far as the task needs them."""
    answers: list[tuple[str, int, bool]] = []
    for so_far in segments:
        rows = so_far.rows()
        answers = [
            (prompts.decode(row), len(row), bool(finite))
            for row, finite in zip(rows, np.asarray(so_far.finite), strict=True)
        ]
        if all(
            row[-1] in ends or task.finished(sample, text)
            for row, sample, (text, *_) in zip(rows, samples, answers, strict=True)
        ):
            break
    return answers
