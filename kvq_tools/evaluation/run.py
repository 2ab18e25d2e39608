"""Evaluate a text through one cache (`evaluate`) or several (`evaluate_caches`) against full
precision, or rows of tokens (`measure`, `measure_rows`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvq_jax as kvq
from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.placement.placement import Placement
from kvq_jax.types.array_types import Integers
from kvq_jax.types.integers import int32
from kvq_models.calibration.progress import Progress, silent
from kvq_models.llama.model import HiddenBTD, Llama
from kvq_models.llama.packed_loading import with_activations
from kvq_tools.evaluation import program_memory
from kvq_tools.evaluation.cache_run import CacheRun, Reference, WindowBatch, read_only, slices
from kvq_tools.evaluation.defaults import BATCH, CHUNK, STEP, Mode
from kvq_tools.evaluation.results import Evaluation, Quality
from kvq_tools.evaluation.settings import (
    Choices,
    Settings,
    check_request,
    check_steps,
    default_prompt,
    prompt_for,
)
from kvq_tools.evaluation.windows import opened, windows

# a model that is prepared for the cache (`kvq_models.prepare`), and the cache
Candidate = tuple[Llama, CacheSpec | str]


class Options(Choices, total=False):
    """The keyword arguments of `evaluate_caches`."""

    token_bytes: Integers | None
    progress: Progress[Any] | None
    placement: Placement | None


def evaluate(
    llama: Llama, spec: CacheSpec | str, token_ids: Integers, **options: Unpack[Options]
) -> Evaluation:
    """Compare the predictions of a text through a cache with the full-precision model's:
    `evaluate_caches` for one cache."""
    return evaluate_caches([(llama, spec)], token_ids, **options)[0]


def evaluate_caches(
    candidates: Sequence[Candidate],
    token_ids: Integers,
    *,
    token_bytes: Integers | None = None,
    progress: Progress[Any] | None = None,
    placement: Placement | None = None,
    **choices: Unpack[Choices],
) -> tuple[Evaluation, ...]:
    """Compare the predictions of a text through each cache with the full-precision model's.

    Args:
        candidates: models that differ only in `cache_parameters`, each with its cache. If their
            activations are int8, the full-precision model's are not.
        token_ids: the text, [n] integers.
        choices: settings by name, as in `Settings`: window (at most the model's positions; default
            those, or 2048), stride (default: half a window), mode, batch, chunk, prompt, step.
        token_bytes: [n], UTF-8 bytes of each token (`tokenize`), for bits per byte.
        progress: wraps the loop over slices of windows, as tqdm would. If it ends early, windows of
            the batches that are complete by then are scored.
        placement: of the caches, if the models are on a mesh. If rows are split, a batch is filled
            up to a multiple of their parts.

    Every token is scored once, after at least window - stride others (windows.py), and all caches
    are scored on the same tokens. If the text begins with the model's token that opens texts, so
    does each window. A prompt lies inside the overlap of a later window, and the first
    window's is not scored, nor is the token after a prompt, which is predicted before a cache is
    read. The default is `default_prompt` if one of the caches takes statistics from a prompt, else
    0. In `chunked` such statistics come from a window's first chunk, in `fake` from the whole
    window.

    Full-precision rows of a cache have the model's dtype. Memory besides weights and caches: the
    hidden states of a batch, and logits of a slice, twice at most 256 MiB (in `chunked`: of a
    chunk).

    Raises ValueError, in one line, if the request does not fit the text or the model.
    """
    ids = np.asarray(int32("token_ids", token_ids))
    specs = [parse(spec) for _, spec in candidates]
    settings = check_request(candidates[0][0].config, ids, specs, **choices)
    width = min(settings.window, ids.size)
    cut = windows(ids.size, settings.window, settings.stride, settings.prompt)
    begins = np.array([w.begin for w in cut])
    lengths = np.array([w.end - w.begin for w in cut], np.int32)
    inside = np.arange(width)[None] < lengths[:, None]
    rows = np.where(inside, ids[np.minimum(begins[:, None] + np.arange(width), ids.size - 1)], 0)
    exact, compared = _run(
        candidates,
        opened(rows, ids, candidates[0][0].config.bos_token_id),
        lengths,
        settings,
        progress,
        placement=placement,
        first=settings.prompt + 1,
    )
    counted = inside & (np.arange(width)[None] >= np.array([w.first for w in cut])[:, None])
    row, position = np.nonzero(counted[: len(exact)])
    index = begins[row] + position
    utf8_bytes = None if token_bytes is None else int(np.asarray(token_bytes)[index].sum())
    return tuple(
        Evaluation(
            spec=spec,
            mode=settings.mode,
            window=width,
            prompt=settings.prompt,
            index=index,
            position=position,
            exact_nats=exact[row, position],
            nats=nats[row, position],
            kl=kl[row, position],
            agrees=agrees[row, position],
            utf8_bytes=utf8_bytes,
        )
        for spec, (nats, kl, agrees) in zip(specs, compared, strict=True)
    )


class RowQuality(NamedTuple):
    """The scored tokens of each row, and the share of outliers without a slot.

    token_nats, token_kl, agrees: [R, n], of each scored token, as in `Evaluation`. dropped: over
    all rows' caches at the end, the share of the outliers of each side ("k", "v") that have no
    slot, or {} if a cache stores no outliers or is not run (`fake`).
    """

    token_nats: Float[np.ndarray, "R n"]
    token_kl: Float[np.ndarray, "R n"]
    agrees: Bool[np.ndarray, "R n"]
    dropped: dict[str, float]

    @property
    def tokens(self) -> int:
        return self.token_kl.shape[1]

    @property
    def nats(self) -> Float[np.ndarray, "R"]:
        return self.token_nats.mean(axis=1, dtype=np.float64)

    @property
    def kl(self) -> Float[np.ndarray, "R"]:
        return self.token_kl.mean(axis=1, dtype=np.float64)

    @property
    def agreement(self) -> Float[np.ndarray, "R"]:
        return self.agrees.mean(axis=1, dtype=np.float64)


def measure_rows(
    candidates: Sequence[Candidate],
    rows: Int[Array, "R T"] | Int[np.ndarray, "R T"],
    *,
    prompt: int | None = None,
    scored: int | None = None,
    mode: Mode = "decode",
    batch: int = BATCH,
    step: int = STEP,
    progress: Progress[Any] | None = None,
    kept: dict[int, HiddenBTD] | None = None,
) -> tuple[RowQuality, ...]:
    """Score rows of tokens through each cache, row by row. All caches are compared with one
    full-precision model.

    Args:
        candidates, mode, batch, step, progress: as for `evaluate_caches`.
        rows: [R, T] token ids.
        prompt: the first tokens of a row, which are not scored and, in mode `decode`, prefilled.
            The default is 0, or at most PROMPT and half of a row if a cache takes statistics from a
            prompt (a key norm, a query subspace).
        scored: the last tokens of a row, which alone are scored (default: all after the prompt and
            the first token that follows it). Logits of the others are not computed.
        kept: the full-precision model's last outputs by batch, which are computed if they are
            missing and left there for further calls with the same rows and batches.

    Raises ValueError if there is no such mode or no row, a size is not positive, the rows do not
    fit the vocabulary, the prompt leaves fewer than two tokens or fewer than are scored, or a cache
    with such statistics gets no prompt.
    """
    check_steps(mode, batch, CHUNK, step)
    tokens = np.asarray(rows, np.int32)
    if tokens.ndim != 2 or not tokens.size:
        raise ValueError(f"rows must be tokens of at least one row, not of shape {tokens.shape}")
    count, length = tokens.shape
    config = candidates[0][0].config
    if not 0 <= tokens.min() <= tokens.max() < config.vocab_size:
        raise ValueError(f"token ids must be between 0 and {config.vocab_size - 1}")
    if mode == "decode":
        prompt = prompt_for(
            config,
            [parse(spec) for _, spec in candidates],
            prompt,
            default_prompt(length, length, length),
        )
    prompt = prompt or 0
    if not 0 <= prompt <= length - 2:
        raise ValueError(f"a prompt of {prompt} tokens leaves fewer than two of {length} to score")
    if scored is not None and not 1 <= scored <= length - prompt - 1:
        raise ValueError(f"{scored=} must be between 1 and {length - prompt - 1}")
    first = prompt + 1 if scored is None else length - scored
    prefilled = prompt if mode == "decode" else 0
    settings = Settings(length, length, mode, batch, prompt=prefilled, step=step)
    outliers: list[dict[str, kvq.size.OutlierTotals]] = [{} for _ in candidates]

    def count_outliers(runs: Sequence[CacheRun], fresh: int) -> None:
        for totals_by_side, run in zip(outliers, runs, strict=True):
            rows = kvq.rows.select(run.cache, np.arange(fresh))
            for layer in kvq.size.outlier_totals(rows):
                for side, totals in layer.items():
                    so_far = totals_by_side.get(side, kvq.size.OutlierTotals())
                    totals_by_side[side] = so_far + totals

    _, compared = _run(
        candidates,
        tokens,
        np.full(count, length, np.int32),
        settings,
        progress,
        None if mode == "fake" else count_outliers,
        first=first,
        kept=kept,
    )
    qualities = []
    for terms, totals_by_side in zip(compared, outliers, strict=True):
        nats, kl, agrees = (term[:, first:] for term in terms)
        dropped = {side: totals.share_dropped for side, totals in totals_by_side.items()}
        qualities.append(RowQuality(nats, kl, agrees, dropped))
    return tuple(qualities)


def measure(
    llama: Llama, spec: CacheSpec | str, rows: Int[Array, "B T"], prompt: int | None = None
) -> Quality:
    """Score rows of tokens through one cache, all rows at once. Return the means of `measure_rows`,
    with its arguments and errors.

    Give the prompt to compare caches, so that all of them score the same tokens.
    """
    (terms,) = measure_rows([(llama, spec)], rows, prompt=prompt, batch=len(rows))
    return Quality(
        len(rows) * terms.tokens,
        *(float(term.mean()) for term in (terms.nats, terms.kl, terms.agreement)),
    )


def _run(
    candidates: Sequence[Candidate],
    rows: Int[np.ndarray, "R T"],
    lengths: Int[np.ndarray, "R"],
    settings: Settings,
    progress: Progress[Any] | None,
    at_end: Callable[[Sequence[CacheRun], int], None] | None = None,
    placement: Placement | None = None,
    first: int = 0,
    kept: dict[int, HiddenBTD] | None = None,
) -> tuple[Float[np.ndarray, "S T"], list[tuple[np.ndarray, ...]]]:
    """Return (-log p of the full-precision model, (nats, kl, agrees) of each candidate), arrays [S,
    T] of the rows whose batches `progress` let finish.

    Entry [r, t] is about token t of row r, predicted from the tokens before it. Entries without a
    prediction (the first, the prompt's, padding) are unspecified, and entries before token `first`
    may be. `at_end` is called after each batch with its caches and the number of its rows that are
    not repetitions.
    """
    count, width = rows.shape
    parts_of_rows = 1 if placement is None else placement.size("rows")
    size = -(-min(settings.batch, count) // parts_of_rows) * parts_of_rows
    batches = -(-count // size)
    parts = slices(settings, width, size, candidates[0][0].config.vocab_size)
    padded = parts[-1].stop + 1
    exact = np.full((batches * size, padded), np.nan, np.float32)
    compared = [(exact.copy(), exact.copy(), np.zeros(exact.shape, bool)) for _ in candidates]
    specs = [parse(spec) for _, spec in candidates]
    reference, runs = None, []
    full_precision = with_activations(candidates[0][0], "float32")
    work, complete = [(number, part) for number in range(batches) for part in parts], 0
    for number, part in (progress or silent)(work, "evaluating"):
        here = np.arange(number * size, (number + 1) * size)
        if part is parts[0]:
            batch = _batch(rows, lengths, here, padded)
            reference = Reference(full_precision, batch, (kept or {}).get(number))
            if kept is not None:
                kept[number] = reference.hidden
            runs = [
                CacheRun(llama, spec, settings, batch, placement)
                for (llama, _), spec in zip(candidates, specs, strict=True)
            ]
        assert reference is not None, "the first slice made it"
        predicted = slice(part.first + 1, part.stop + 1)
        if predicted.stop <= first and settings.mode == "decode":
            read_only(runs, part)
            program_memory.drop_if_many()
            continue
        logits, exact[here, predicted] = reference(part)
        for terms, run in zip(compared, runs, strict=True):
            for whole, term in zip(terms, run(part, logits), strict=True):
                whole[here, predicted] = term
            program_memory.drop_if_many()
        if part is parts[-1]:
            complete = min((number + 1) * size, count)
            if at_end is not None:
                at_end(runs, complete - number * size)
    return exact[:complete, :width], [
        tuple(term[:complete, :width] for term in terms) for terms in compared
    ]


def _batch(
    rows: Int[np.ndarray, "R T"],
    lengths: Int[np.ndarray, "R"],
    index: Int[np.ndarray, "B"],
    padded: int,
) -> WindowBatch:
    """Return the rows of a batch. The last row is repeated to fill the batch, so that all batches
    have one size and share one program."""
    index = np.minimum(index, len(rows) - 1)
    tokens = np.pad(rows[index], ((0, 0), (0, padded - rows.shape[1])))
    return WindowBatch(
        jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths[index], jnp.int32), rows.shape[1]
    )
