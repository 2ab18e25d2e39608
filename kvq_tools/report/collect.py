"""Collect the numbers of a report, from a model, a text's tokens and caches."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

import kvq_jax as kvq
from kvq_jax.cache.accounting import layer_components
from kvq_models.calibration.progress import Progress, silent
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama
from kvq_tools.evaluation.defaults import CACHE_DTYPE
from kvq_tools.evaluation.results import Bucket, Evaluation, finite
from kvq_tools.evaluation.run import evaluate_caches
from kvq_tools.evaluation.settings import Settings
from kvq_tools.evaluation.text import TokenizedText
from kvq_tools.report import maps, schema, times


class ReportPlan(NamedTuple):
    """A request for numbers. buckets: parts of a window in numbers by position. contexts: of timed
    decode steps; () to time nothing. sample: tokens of magnitudes and errors."""

    model: str
    text: str
    command: str
    settings: Settings
    buckets: int
    contexts: tuple[int, ...]
    steps: int
    sample: int


def collect(
    plan: ReportPlan,
    plain: Llama,
    candidates: Sequence[times.PreparedCache],
    text: TokenizedText,
    progress: Progress | None = None,
    whole_progress: Progress | None = None,
) -> schema.CacheReport:
    """Collect all numbers. plain: the model without cache parameters. candidates: each cache with
    its prepared model. progress: of the windows and the times, which may end early; the numbers are
    then of those that were complete. whole_progress: of the other loops."""
    config, settings = plain.config, plan.settings
    started = time.perf_counter()
    pairs = [(c.llama, c.spec) for c in candidates]
    evaluations = evaluate_caches(
        pairs, text.ids, **settings._asdict(), token_bytes=text.bytes, progress=progress
    )
    seconds = time.perf_counter() - started
    inputs = maps.layer_inputs(plain, jnp.asarray(text.ids[: plan.sample]))
    shown = (whole_progress or silent)(candidates, "comparing keys and values")
    errors = [maps.errors(candidate.llama, candidate.spec, inputs) for candidate in shown]
    speed = times.decode_times(timed(plain, candidates), plan.contexts, plan.steps, progress)
    first = evaluations[0]
    parts = first.by_position(plan.buckets)
    return schema.CacheReport(
        format=schema.FORMAT,
        command=plan.command,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        model=_model(plan.model, plain),
        text=schema.TextFacts(plan.text, text.ids.size, first.tokens, first.utf8_bytes),
        request=schema.EvaluationRequest(
            **settings.stated(),
            capacity=first.window,
            bf16_bytes=kvq.size.dense_nbytes(config, 1, first.window),
            seconds=round(seconds, 1),
        ),
        positions=tuple(schema.Positions(p.first, p.last, p.tokens) for p in parts),
        exact=schema.Exact(
            finite(first.exact_perplexity),
            finite(first.exact_bits_per_byte),
            tuple(finite(p.exact_nats) for p in parts),
        ),
        caches=tuple(
            _cache(c.name, e, config, settings, e.by_position(plan.buckets), layer_errors)
            for c, e, layer_errors in zip(candidates, evaluations, errors, strict=True)
        ),
        speed=speed,
        tokens_of_sample=int(inputs[0].positions.size),
        magnitudes=maps.magnitudes(inputs, maps.spread(config.num_hidden_layers)),
    )


def timed(plain: Llama, candidates: Sequence[times.PreparedCache]) -> list[times.PreparedCache]:
    """Return the caches, with a dense one in front if none of them is dense."""
    if any(c.spec.exact for c in candidates):
        return list(candidates)
    return [times.PreparedCache("dense", kvq.parse("dense"), plain), *candidates]


def _model(name: str, llama: Llama) -> schema.ModelFacts:
    config = llama.config
    return schema.ModelFacts(
        name=name,
        family=config.model_type,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(llama)),
        layers=config.num_hidden_layers,
        query_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        positions=config.max_position_embeddings,
        dtype=llama.embed[...].dtype.name,
    )


def _cache(
    name: str,
    evaluation: Evaluation,
    config: LlamaConfig,
    settings: Settings,
    parts: Sequence[Bucket],
    errors: tuple[schema.LayerErrors, ...],
) -> schema.CacheNumbers:
    spec, capacity = evaluation.spec, evaluation.window
    layout = kvq.cache.layout(spec, config, 1, capacity, CACHE_DTYPE)
    size = kvq.size.of(spec, config, 1, capacity, CACHE_DTYPE)
    return schema.CacheNumbers(
        name=name,
        spec=str(spec),
        perplexity=finite(evaluation.perplexity),
        bits_per_byte=finite(evaluation.bits_per_byte),
        kl=finite(evaluation.mean_kl),
        agreement=evaluation.agreement,
        bytes=size.cache,
        ratio=kvq.size.dense_nbytes(config, 1, capacity) / size.cache,
        bits_per_element=size.stored_bits,
        body_bits_per_element=kvq.size.body_bits_per_element(spec, config, capacity),
        parameter_bytes=size.parameters,
        working_bytes=size.working,
        sink=spec.sink,
        recent=spec.recent,
        block=spec.block,
        quantized_tokens=settings.quantized_tokens(layout),
        window_kl=tuple(map(finite, evaluation.window_kl)),
        nats=tuple(finite(p.nats) for p in parts),
        kl_by_position=tuple(finite(p.kl) for p in parts),
        flips_by_position=tuple(p.flips for p in parts),
        flips=tuple(evaluation.flips.tolist()),
        sizes=tuple(
            tuple(schema.ArrayBytes(c.side, c.name, c.bytes) for c in layer if c.bytes)
            for layer in layer_components(layout)
        ),
        errors=errors,
    )
