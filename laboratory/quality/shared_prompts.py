"""Answers through several caches that share the pass over a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from kvq_jax.cache.cache import init_cache
from kvq_jax.cache.spec import CacheSpec
from kvq_models.inference import layer_by_layer
from kvq_models.inference.checked_input import right_padded
from kvq_models.inference.generation import begun, generation_settings, stream
from kvq_models.inference.layers import head
from kvq_models.llama.model import Llama
from kvq_tools.evaluation.tasks.runner import ScoredAnswer, answers_of, batches, capacity
from kvq_tools.evaluation.tasks.sample import AnswerRule, TaskPrompts, TaskSample


def run_together(
    candidates: Sequence[tuple[Llama, CacheSpec]],
    task: AnswerRule,
    samples: Sequence[TaskSample],
    prompts: TaskPrompts,
    *,
    batch: int,
    through: int = 0,
) -> tuple[list[ScoredAnswer], ...]:
    """Answer samples through several caches. Return the answers of each, as from `runner.run`.

    candidates: models that differ only in their caches' parameters. through: the last tokens of a
    prompt, which are decoded, so that a question and the first token of its answer are read through
    the cache too.
    """
    answers_of_all: tuple[list[ScoredAnswer], ...] = tuple([] for _ in candidates)
    for indices in batches(samples, candidates[0][0].config, batch):
        chosen = [samples[i] for i in indices]
        generated = _generated_together(candidates, task, chosen, prompts, through)
        for so_far, answers in zip(answers_of_all, generated, strict=True):
            texts = dict(zip(indices, answers, strict=True))
            so_far += [
                ScoredAnswer(i, text, tokens, task.score(samples[i], text), finite)
                for i, (text, tokens, finite) in texts.items()
            ]
    return answers_of_all


def _generated_together(
    candidates: Sequence[tuple[Llama, CacheSpec]],
    task: AnswerRule,
    samples: list[TaskSample],
    prompts: TaskPrompts,
    through: int,
) -> Iterator[list[tuple[str, int, bool]]]:
    """Yield the answers through each candidate. A cache is freed before the next one is read.
    Raises ValueError if `through` leaves nothing of a prompt."""
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
            after = head(llama, hidden[:, -1:])[:, 0]
        state = begun(cache, after, new)
        yield answers_of(stream(llama, state, settings), ends, task, samples, prompts)
