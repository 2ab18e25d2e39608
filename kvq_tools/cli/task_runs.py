"""Run one task through several caches, for `kvq passkey`, `kvq niah` and `kvq ruler`: arguments,
answers, tables."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import kvq_jax as kvq
from kvq_models.llama.config import LlamaConfig
from kvq_tools import json_lines
from kvq_tools.cli import cache_sizes, console, inputs, text_input
from kvq_tools.cli.model_loading import load_model, prepared
from kvq_tools.cli.options.tasks import MAX_DEFAULT_LENGTH, MAX_SAMPLES, SAMPLES
from kvq_tools.cli.tables import print_table
from kvq_tools.cli.until_pressed import UntilPressed
from kvq_tools.evaluation.defaults import CACHE_DTYPE
from kvq_tools.evaluation.intervals import share_interval
from kvq_tools.evaluation.tasks.filler import NoRoomError
from kvq_tools.evaluation.tasks.runner import ScoredAnswer, capacity, check_samples, run
from kvq_tools.evaluation.tasks.sample import AnswerRule, TaskPrompts, TaskSample

CHAT_RULE = (
    "the prompt is the user's turn in the tokenizer's chat template; the first words of the answer"
    " follow the template"
)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def hiding_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return depths and text, for the `generated` of a task that hides facts."""
    return {
        "depths": options.depths or DEPTHS,
        "text": None if options.text is None else text_input.read_text(options.text),
    }


def generated(
    options: argparse.Namespace, config: LlamaConfig, make: Callable[..., list[TaskSample]]
) -> list[TaskSample]:
    """Return the task's samples, from make(lengths=, count=, seed=).

    Default lengths that are too short for the question are skipped with a warning. UserError names
    the remedy if none is left, or if a length that was asked for is too short.
    """
    maximum = min(config.positions, MAX_DEFAULT_LENGTH)
    if beyond := [n for n in options.lengths or () if n > config.positions]:
        raise console.UserError(
            f"--lengths {beyond[0]} is beyond the {config.positions} positions of the model"
        )
    count = options.limit or SAMPLES
    if count > MAX_SAMPLES:
        raise console.UserError(
            f"--limit {count} is too many generated samples; give at most {MAX_SAMPLES}"
        )
    samples, short, needed = [], [], 0
    for length in options.lengths or (maximum // 4, maximum // 2, maximum):
        try:
            samples += make(lengths=(length,), count=count, seed=options.seed)
        except NoRoomError as error:
            short, needed = [*short, length], length + error.lacking
            if options.lengths:
                raise console.UserError(
                    f"--lengths {length}: {error}; try fewer --max-new-tokens or --lengths {needed}"
                ) from error
    if not samples and needed <= config.positions:
        raise console.UserError(
            f"prompt and answer take at least {needed} tokens, and the longest default is"
            f" {maximum}: use --lengths {needed}"
        )
    if not samples:
        raise console.UserError(
            f"prompt and answer take at least {needed} tokens, and the model was trained for"
            f" {config.positions} positions, which include --max-new-tokens (now"
            f" {options.max_new_tokens or 'the default'})"
        )
    if short:
        console.warn(
            f"no samples of {' and '.join(map(str, short))} tokens: the question needs about"
            f" {needed}; --lengths sets others"
        )
    return samples


def refuse_beside_data(options: argparse.Namespace, *names: str) -> None:
    """Raise UserError if --data comes with an option of generated samples, which get the default
    seed without it."""
    conflicts = [name for name in (*names, "seed") if getattr(options, name) is not None]
    if options.data is not None and conflicts:
        raise console.UserError(
            f"--{conflicts[0]} is for generated samples, but --data has ready-made ones"
        )
    if options.data is None and options.seed is None:
        options.seed = 0


def run_task(
    options: argparse.Namespace,
    task: AnswerRule,
    make: Callable[[TaskPrompts, LlamaConfig], list[TaskSample]],
    *,
    rules: Mapping[str, str],
    groups: Sequence[str],
    settings: Mapping[str, Any],
) -> None:
    """Answer every sample through every cache and print the scores. Everything that needs no
    weights is checked before they are read.

    Args:
        task: how answers end and are scored.
        rules: what the output says about prompts, truncation and scores.
        groups: labels that get a table each, if samples have them.
        settings: parts of the command line that the output repeats.
    """
    options.dtype = inputs.model_dtype(options)
    caches = options.cache or [inputs.DENSE]
    config = inputs.read_config(options.model, *caches)
    files = inputs.calibrations(config, caches, options.calibration or [])
    if options.answers is not None and inputs.output_file(options, "answers").exists():
        raise console.UserError(f"--answers {options.answers!r} must be a new file, and it exists")
    tokenizer = text_input.need_tokenizer(options.model, "write prompts")
    prompts = TaskPrompts(
        tokenizer, partial(text_input.encode, tokenizer, chat=True) if options.chat else None
    )
    with console.progress("making prompts"), console.input_errors():
        samples = make(prompts, config)
        check_samples(samples, config)
    models = prepared(load_model(options), [spec for _, spec in caches], files)
    longest = max(len(sample.prompt) + sample.max_new_tokens for sample in samples)
    where = f"in samples of at most {longest} tokens"
    inputs.warn_if_nothing_quantized(caches, config, longest, longest - 1, where)
    measured, broken, batches = [], [], UntilPressed()
    for (text, _), (model, spec) in zip(caches, models, strict=True):
        started, answers = time.perf_counter(), []
        message = f"{options.command} with {text}"
        shown = dict(batch=options.batch, progress=batches, message=message)
        for answer in run(model, spec, task, samples, prompts, **shown):
            answers.append(answer)
            if not answer.finite:
                broken.append(text)
            _write(options.answers, {"cache": text} | described(samples[answer.index], answer))
        if measured and len(answers) < len(samples):
            break  # after Ctrl-C: scores of fewer samples are not comparable
        answers.sort(key=lambda answer: answer.index)
        seconds = {"seconds": time.perf_counter() - started}
        scores = summary(samples, answers, groups)
        measured.append({"name": text} | _sizes(spec, config, samples) | seconds | scores)
        if batches.pressed:
            break
    against_first(measured)
    result = _result(options, measured, rules, settings)
    if options.json:
        console.print_json("task", result)
    else:
        _print(result)
    console.check_finite(broken)
    if batches.pressed:
        raise KeyboardInterrupt(
            f"the scores are of {len(measured)} of {len(caches)} caches and {result['samples']} of"
            f" {len(samples)} samples"
        )


def _result(
    options: argparse.Namespace,
    measured: list[dict[str, Any]],
    rules: Mapping[str, str],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    lengths = [answer["prompt_tokens"] for answer in measured[0]["answers"]]
    return {
        "task": options.command,
        "model": options.model,
        **settings,
        "chat": options.chat,
        "dtype": options.dtype,
        "rules": dict(rules) | ({"chat": CHAT_RULE} if options.chat else {}),
        "samples": len(lengths),
        "prompt_tokens": [min(lengths), max(lengths)],
        "caches": measured,
    }


def _write(path: str | None, line: Mapping[str, Any]) -> None:
    if path is not None:
        with console.input_errors(), Path(path).open("ab") as file:
            json_lines.append(file, line)


def described(sample: TaskSample, answer: ScoredAnswer) -> dict[str, Any]:
    """Return one answer with the facts about its sample."""
    return {
        "index": answer.index,
        **sample.labels,
        **sample.facts,
        "prompt_tokens": len(sample.prompt),
        "right": list(sample.answers),
        "answer": answer.text,
        "new_tokens": answer.tokens,
        **answer.scores,
    }


def summary(
    samples: Sequence[TaskSample], answers: Sequence[ScoredAnswer], groups: Sequence[str]
) -> dict[str, Any]:
    """Return the mean scores, over all answers and for each value of each label, and the answers
    themselves."""
    by_label = {}
    for label in groups:
        parts = defaultdict[Any, list[ScoredAnswer]](list)
        for answer in answers:
            parts[samples[answer.index].labels.get(label)].append(answer)
        parts.pop(None, None)  # samples without the label
        by_label[label] = [
            {label: value, "samples": len(parts[value])} | _means(parts[value])
            for value in sorted(parts)
        ]
    return {
        "scores": _means(answers),
        "by": by_label,
        "intervals": {
            metric: list(share_interval(share, len(answers)))
            for metric, share in _means(answers).items()
        },
        "answers": [described(samples[a.index], a) for a in answers],
    }


def against_first(caches: Sequence[dict[str, Any]]) -> None:
    """Add to each cache on how many samples its first score is above and below that of the first
    cache."""
    metric = next(iter(caches[0]["scores"]))
    firsts = [answer[metric] for answer in caches[0]["answers"]]
    for cache in caches:
        pairs = list(zip((answer[metric] for answer in cache["answers"]), firsts, strict=True))
        cache["won"] = sum(score > first for score, first in pairs)
        cache["lost"] = sum(score < first for score, first in pairs)


def _means(answers: Sequence[ScoredAnswer]) -> dict[str, float]:
    return {
        metric: sum(a.scores[metric] for a in answers) / len(answers)
        for metric in answers[0].scores
    }


def _sizes(
    spec: kvq.cache.CacheSpec, config: LlamaConfig, samples: Sequence[TaskSample]
) -> dict[str, Any]:
    """Return the sizes of the longest sample's cache."""
    longest = max(capacity(sample, config) for sample in samples)
    layout = kvq.cache.layout(spec, config, 1, longest, CACHE_DTYPE)
    read = max(len(sample.prompt) + sample.max_new_tokens for sample in samples) - 1
    return {
        "cache": str(spec),
        "capacity": longest,
        "quantized_tokens": kvq.size.quantized_tokens(layout, read),
        **cache_sizes.of(spec, config, longest, CACHE_DTYPE),
    }


def _print(result: dict[str, Any]) -> None:
    """Print the rules of a task, the scores of each cache, and the scores by each label."""
    for name, rule in result["rules"].items():
        print(f"{name}: {rule}".replace("\n", "\\n"))
    first = result["caches"][0]
    title = (
        f"\n{result['model']}: {result['task']}, {console.counted(result['samples'], 'samples')}"
        f" with prompts of {result['prompt_tokens'][0]} to {result['prompt_tokens'][1]} tokens;"
        f" scores in percent [95 % interval]; bytes at {first['capacity']} tokens;"
        f" {result['dtype']}"
    )
    rows = [
        {"cache": c["name"]}
        | {
            metric: f"{_percent(score)} [{', '.join(map(_percent, c['intervals'][metric]))}]"
            for metric, score in c["scores"].items()
        }
        | ({"won, lost": f"{c['won']}, {c['lost']}"} if c is not first else {"won, lost": ""})
        | cache_sizes.size_cells(c)
        for c in result["caches"]
    ]
    print_table(title, rows)
    metric = next(iter(first["scores"]))
    for label, parts in first["by"].items():
        if len(parts) > 1:
            rows = [
                {"cache": c["name"]}
                | {f"{p[label]} ({p['samples']})": _percent(p[metric]) for p in c["by"][label]}
                for c in result["caches"]
            ]
            print_table(f"{metric} by {label} (samples)", rows)


def _percent(score: float) -> str:
    return f"{100 * score:.1f}"
