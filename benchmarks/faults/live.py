"""Faults in what an engine holds: pieces of prefixes in files and in memory, live caches, clocks.

Each injection asks the same questions of an engine with the embedded model, and compares tokens and
log-probabilities, bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import jax
import numpy as np

from benchmarks.faults.outcome import Inject, Kind, Outcome, damaged, flip, logged, unchecked
from kvq_jax.cache.cache import Cache
from kvq_jax.cache.verification import _arrays
from kvq_models import EMBEDDED, load_llama
from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.pieces import RowPiece, RowPieces
from kvq_models.inference.engine.prefix_folder import PrefixFolder
from kvq_models.inference.engine.prefixes import PrefixStore
from kvq_models.inference.engine.requests import Ended, Event, Request, Token
from kvq_models.inference.engine.sweep import Sweep
from kvq_models.inference.sampling import Sampling

SPEC, SLOTS, CAPACITY, WIDTHS = "kivi:bits=2,recent=16,block=32", 2, 160, (64,)
LIMIT = 1 << 24  # bytes of prefixes
PROMPT = tuple(range(5, 106))  # two chunks
QUESTIONS = (
    Request(PROMPT, 8),
    Request(PROMPT[:64], 8, Sampling(0.9), seed=3, frequency_penalty=0.2),
    Request((7, 8, 9), 20, Sampling(0.8, top_k=40), seed=4),
)
ROOM = 400_000  # bytes of a folder in which not all prompts fit
YEARS = 30 * 365 * 24 * 3600

Answers: TypeAlias = list[tuple[list[tuple[int, float]], str]]


def engine_of(prefixes: PrefixStore, *, sweep: Sweep | None = None) -> Engine:
    """Return a compiled engine whose calls are single steps, so that a fault may come before any.
    sweep: in place of the one that takes a hundredth of the time."""
    llama, _ = load_llama(EMBEDDED, dtype="float32")
    engine = Engine(
        llama,
        SPEC,
        slots=SLOTS,
        capacity=CAPACITY,
        widths=WIDTHS,
        steps=1,
        prefixes=prefixes,
        verify=True,
    )
    if sweep is not None:
        engine._sweep = sweep
    engine.warm_up()
    return engine


def answers(
    engine: Engine, requests: Sequence[Request], between: Callable[[int], None] = lambda step: None
) -> Answers:
    """Return the tokens with their log-probabilities, and why each answer ended. between(step) is
    called before each step."""
    tickets, events = [engine.submit(request) for request in requests], list[Event]()
    step = 0
    while not engine.idle:
        between(step)
        events += engine.advance()
        step += 1
    tokens: dict[int, list[tuple[int, float]]] = {ticket: [] for ticket in tickets}
    reasons: dict[int, str] = {}
    for event in events:
        if isinstance(event, Token):
            tokens[event.ticket].append((event.token, event.logprob))
        elif isinstance(event, Ended):
            reasons[event.ticket] = event.reason
    return [(tokens[ticket], reasons[ticket]) for ticket in tickets]


def _judged(given: Answers, expected: Answers, detected: bool) -> Outcome:
    """Compare answers. One that ended with an error may have any tokens."""
    pairs = list(zip(given, expected, strict=True))
    if any(one != right and one[1] not in ("damaged", "not-finite") for one, right in pairs):
        return Outcome(detected, "wrong", str(next(one for one, right in pairs if one != right)))
    refused = any(one[1] in ("damaged", "not-finite") for one in given)
    return Outcome(detected or refused, "refused" if refused else "right")


@contextlib.contextmanager
def prefix_files(folder: Path) -> Iterator[Inject]:
    """Damage a file of a prefix, or let two files take each other's place, before an engine starts
    that finds them."""
    kept = PrefixFolder(folder / "kept", LIMIT)
    engine = engine_of(PrefixStore(LIMIT, kept))
    expected = answers(engine, QUESTIONS[:2])
    kept.close()
    files = sorted((folder / "kept").iterdir())
    assert len(files) == 2, "both chunks of the prompt are on disk"

    def inject(number: int, checked: bool) -> Outcome:
        rng, copy = np.random.default_rng(number), folder / "copy"
        shutil.copytree(folder / "kept", copy)
        if rng.random() < 0.1:
            one, other = (copy / file.name for file in files)
            content = one.read_bytes()
            one.write_bytes(other.read_bytes())
            other.write_bytes(content)
        else:
            file = copy / rng.choice([file.name for file in files])
            file.write_bytes(damaged(file.read_bytes(), rng))
        before = engine.counts.prefix_tokens
        with contextlib.nullcontext() if checked else unchecked(), logged("kvq.prefixes"):
            store = PrefixFolder(copy, LIMIT)
            assert engine._rows is not None
            engine._rows._store = PrefixStore(LIMIT, store)
            given = answers(engine, QUESTIONS[:2])
            store.close()
        shutil.rmtree(copy)
        whole = engine.counts.prefix_tokens - before == len(PROMPT) + 64
        return _judged(given, expected, not whole)

    yield inject


@contextlib.contextmanager
def prefix_memory(folder: Path) -> Iterator[Inject]:
    """Flip a bit in the host's memory of a prefix."""
    store = PrefixStore(LIMIT)
    engine = engine_of(store)
    expected = answers(engine, QUESTIONS[:1])

    def inject(number: int, checked: bool) -> Outcome:
        rng, before = np.random.default_rng(number), engine.counts.prefix_tokens
        key = list(store._pieces)[int(rng.integers(len(store._pieces)))]
        piece, crc32 = store._pieces[key]
        arrays = [np.array(array) for array in (*piece.arrays, piece.logits)]
        flip(arrays[int(rng.choice([i for i, array in enumerate(arrays) if array.size]))], rng)
        piece = dataclasses.replace(piece, arrays=tuple(arrays[:-1]), logits=arrays[-1])
        store._pieces[key] = piece, crc32
        trusting = mock.patch.object(RowPiece, "crc32", return_value=crc32)
        with contextlib.nullcontext() if checked else trusting, logged("kvq.prefixes"):
            given = answers(engine, QUESTIONS[:1])
        whole = engine.counts.prefix_tokens - before == len(PROMPT)
        if not checked:
            store._pieces.clear()
            store.nbytes = 0
            answers(engine, QUESTIONS[:1])
        return _judged(given, expected, not whole)

    yield inject


def flipped(cache: Cache, rng: np.random.Generator, slot: int | None = None) -> Cache:
    """Return the cache with one flipped bit: anywhere, or, if a slot is given, in what has been in
    that slot for at least one token."""
    leaves, structure = jax.tree.flatten(cache)
    if slot is None:
        place = int(rng.choice([i for i, leaf in enumerate(leaves) if leaf.size]))
        array = np.array(leaves[place])
        flip(array, rng)
    else:
        place, array = _flipped_in(cache, leaves, rng, slot)
    leaves[place] = jax.device_put(array, leaves[place].sharding)
    return jax.tree.unflatten(structure, leaves)


def _flipped_in(
    cache: Cache, leaves: list[jax.Array], rng: np.random.Generator, slot: int
) -> tuple[int, np.ndarray]:
    length, layer = int(cache.lengths[slot]), int(rng.integers(len(cache.layers)))
    names = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(cache)]
    while True:
        one = _arrays(cache, layer)[int(rng.integers(len(_arrays(cache, layer))))]
        stays = one.stays(cache.plans[layer].regions, length - 1, length)
        if not stays.any():
            continue
        place = names.index(f".layers[{layer}]{one.path}")
        array = np.array(leaves[place])
        batch, tokens = one.axes
        index: list[Any] = [slice(None)] * array.ndim
        index[batch] = slot
        if tokens is not None:
            index[tokens] = int(rng.choice(np.flatnonzero(stays)))
        part = np.array(array[tuple(index)]).reshape(-1)
        flip(part, rng)
        array[tuple(index)] = part.reshape(array[tuple(index)].shape)
        return place, array


def live_memory(each: int, share: float, anywhere: bool) -> Kind:
    """Return the kind that flips a bit in the cache of the slots, or in the row of a prompt that is
    being read, before a random step, while a sweep with these settings verifies them."""

    @contextlib.contextmanager
    def kind(folder: Path) -> Iterator[Inject]:
        sweep = Sweep(each, share)
        engine = engine_of(PrefixStore(LIMIT), sweep=sweep)
        expected = answers(engine, QUESTIONS)

        def inject(number: int, checked: bool) -> Outcome:
            rng, before = np.random.default_rng(number), engine.counts.damaged
            at, done = int(rng.integers(20)), False
            engine._sweep = sweep if checked else None
            assert engine._rows is not None
            engine._rows._store = PrefixStore(LIMIT)

            def between(step: int) -> None:
                nonlocal done
                taken = [slot for slot, one in enumerate(engine._slots) if one is not None]
                if step < at or done or not (taken or engine._reading):
                    return
                done = True
                if engine._reading is not None and (not taken or rng.random() < 0.5):
                    engine._row = flipped(engine._row, rng, None if anywhere else 0)
                    return
                slot = None if anywhere else int(rng.choice(taken))
                engine.cache = flipped(engine.cache, rng, slot)

            with logged("kvq.engine"):
                given = answers(engine, QUESTIONS, between)
                detected = engine.counts.damaged > before
                outcome = _judged(given, expected, detected)
                again = _judged(answers(engine, QUESTIONS[:2]), expected[:2], detected)
            return outcome if outcome.bad or not again.bad else again

        yield inject

    return kind


@contextlib.contextmanager
def clock_jumps(folder: Path) -> Iterator[Inject]:
    """Let the time of day jump by up to 30 years at every look at it, while prefixes are kept in a
    folder that holds one of the prompts, and files are dated at random."""
    engine = engine_of(PrefixStore(LIMIT))
    requests = [
        dataclasses.replace(QUESTIONS[i % 2], prompt=PROMPT[i:] + PROMPT[:i]) for i in range(4)
    ]
    expected = answers(engine, requests)
    assert engine._rows is not None
    now = time.time_ns()

    def inject(number: int, checked: bool) -> Outcome:
        rng, place = np.random.default_rng(number), folder / "jumping"
        order = rng.permutation(len(requests)).tolist()

        def jumping() -> int:
            return now + int(rng.integers(-YEARS, YEARS)) * 10**9

        with (
            mock.patch("time.time_ns", jumping),
            mock.patch("time.time", side_effect=lambda: jumping() / 1e9),
            contextlib.nullcontext() if checked else _misplaced(),
            logged("kvq.prefixes") as messages,
        ):
            given: Answers = [([], "")] * len(requests)
            for part in (order[:2], order[2:], order[::2]):
                kept = PrefixFolder(place, ROOM)
                assert engine._rows is not None
                engine._rows._store = PrefixStore(0, kept)
                for i, answer in zip(
                    part, answers(engine, [requests[i] for i in part]), strict=True
                ):
                    given[i] = answer
                kept.close()
        shutil.rmtree(place)
        return _judged(given, expected, bool(messages))

    yield inject


def _misplaced() -> contextlib.AbstractContextManager[object]:
    """Let a store give pieces of other prompts."""
    joined = RowPieces.joined

    def wrong(self: RowPieces, pieces: Sequence[RowPiece]) -> Cache:
        other = [
            dataclasses.replace(piece, arrays=tuple(np.roll(a, 1, -1) for a in piece.arrays))
            for piece in pieces
        ]
        return joined(self, other)

    return mock.patch.object(RowPieces, "joined", wrong)
