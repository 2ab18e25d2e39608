"""Run a task: prompts of similar length run together, and every token goes through the cache."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvq_jax.cache.cache import init_cache
from kvq_jax.cache.spec import CacheSpec
from kvq_models.calibration.progress import Progress
from kvq_models.inference import layer_by_layer
from kvq_models.inference.checked_input import right_padded
from kvq_models.inference.generation import (
    Generated,
    begun,
    generate_stream,
    generation_settings,
    stream,
)
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama
from kvq_tools.evaluation.tasks.sample import AnswerRule, Scores, TaskPrompts, TaskSample

SHORTEST = 64  # tokens of a cache, at least


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
    step = max(SHORTEST, 2 ** (max(need - 1, 1).bit_length() - 1) // 4)
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


def run_together(
    candidates: Sequence[tuple[Llama, CacheSpec]],
    task: AnswerRule,
    samples: Sequence[TaskSample],
    prompts: TaskPrompts,
    *,
    batch: int,
    go_on: Callable[[Sequence[ScoredAnswer]], bool],
    through: int = 0,
) -> tuple[list[ScoredAnswer], ...]:
    """Answer samples through several caches, which share the pass over a prompt. Return the answers
    of each, as from `run`.

    candidates: models that differ only in their caches' parameters. The first is asked first. The
    others are asked only while `go_on` of all answers of the first is true, so they may have fewer
    answers. through: the last tokens of a prompt, which are decoded, so that a question and the
    first token of its answer are read through the cache too.
    """
    answers_of_all: tuple[list[ScoredAnswer], ...] = tuple([] for _ in candidates)
    for indices in batches(samples, candidates[0][0].config, batch):
        chosen = [samples[i] for i in indices]
        for so_far, answers in zip(
            answers_of_all,
            _generated_together(candidates, task, chosen, prompts, through),
            strict=False,
        ):
            texts = dict(zip(indices, answers, strict=True))
            so_far += [
                ScoredAnswer(i, text, tokens, task.score(samples[i], text), finite)
                for i, (text, tokens, finite) in texts.items()
            ]
            if so_far is answers_of_all[0] and not go_on(so_far):
                break
    return answers_of_all


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
    room, max_new_tokens = capacity(samples[0], llama.config), samples[0].max_new_tokens
    tokens, lengths = right_padded([list(sample.prompt) for sample in samples])
    cache = init_cache(spec, llama.config, len(samples), room, llama.embed[...].dtype)
    ends = llama.config.eos_token_ids
    segments = generate_stream(
        llama, cache, tokens, lengths, max_new_tokens=max_new_tokens, eos_ids=ends
    )
    return _answers(segments, ends, task, samples, prompts)


def _generated_together(
    candidates: Sequence[tuple[Llama, CacheSpec]],
    task: AnswerRule,
    samples: list[TaskSample],
    prompts: TaskPrompts,
    through: int,
) -> Iterator[list[tuple[str, int, bool]]]:
    """Yield what `_generated` returns for each candidate. A cache is freed before the next one is
    read. Raises ValueError if `through` leaves nothing of a prompt."""
    config, new = candidates[0][0].config, samples[0].max_new_tokens
    room, ends = capacity(samples[0], config), config.eos_token_ids
    if not 0 <= through < (shortest := min(len(sample.prompt) for sample in samples)):
        raise ValueError(f"{through=} must be at least 0 and below {shortest}, a whole prompt")
    kept = [len(sample.prompt) - through for sample in samples]
    last = jnp.asarray([s.prompt[n:] for s, n in zip(samples, kept, strict=True)], jnp.int32)
    tokens, lengths = right_padded(
        [list(sample.prompt[:n]) for sample, n in zip(samples, kept, strict=True)]
    )
    # one width for all samples of this capacity
    tokens = np.pad(tokens, ((0, 0), (0, room - new - tokens.shape[1])))
    empty = [
        init_cache(spec, config, len(samples), room, llama.embed[...].dtype)
        for llama, spec in candidates
    ]
    logits, filled = layer_by_layer.prefill_together(
        [llama for llama, _ in candidates], empty, jnp.asarray(tokens), jnp.asarray(lengths)
    )
    del empty
    settings = generation_settings(new, eos_ids=ends)
    caches = list(filled[::-1])
    del filled
    for llama, _ in candidates:
        cache, after = caches.pop(), logits + 0  # a copy: the loop consumes its state
        if through:
            many = jnp.full(len(samples), through, jnp.int32)
            hidden, _, cache = layer_by_layer.decode(llama, cache, last, many)
            after = layer_by_layer.head(llama, hidden[:, -1:])[:, 0]
        state = begun(cache, after, new)
        yield _answers(stream(llama, state, settings), ends, task, samples, prompts)


def _answers(
    segments: Iterable[Generated],
    ends: Sequence[int],
    task: AnswerRule,
    samples: list[TaskSample],
    prompts: TaskPrompts,
) -> list[tuple[str, int, bool]]:
    """Return the texts of a stream as far as the task needs them."""
    answers: list[tuple[str, int, bool]] = []
    for so_far in segments:
        rows = [
            row[:count].tolist()
            for row, count in zip(
                np.asarray(so_far.tokens), np.asarray(so_far.lengths), strict=True
            )
        ]
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
