"""The outcome of one injected fault, and damage to bytes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias
from unittest import mock

import numpy as np

from kvq_jax.files.checksum import Checksum

# right: the answer without the fault. refused: an error in one line, and no answer. other: the
# answer of a file that is another valid one, in a format without a checksum
Result: TypeAlias = Literal["right", "refused", "other", "wrong", "crash", "hang"]


class Outcome(NamedTuple):
    """detected: kvq noticed the fault. note: what happened, for those who look for a reason."""

    detected: bool
    result: Result
    note: str = ""

    @property
    def bad(self) -> bool:
        return self.result in ("wrong", "crash", "hang")


Inject: TypeAlias = Callable[[int, bool], Outcome]
# A kind of fault prepares itself in an empty folder and yields inject(number, checked). Equal
# numbers inject equal faults, as far as time allows. Without `checked`, what protects kvq is
# switched off, so that the harness must see bad outcomes.
Kind: TypeAlias = Callable[[Path], AbstractContextManager[Inject]]

REFUSALS = (ValueError, OSError, NotImplementedError)  # what kvq's readers raise


def damaged(content: bytes, rng: np.random.Generator) -> bytes:
    """Return other bytes: a flipped bit, a file that ends early, or a part that was overwritten."""
    while True:
        new, at = bytearray(content), int(rng.integers(len(content)))
        size = int(rng.integers(1, 4097))
        match rng.choice(["bit", "bit", "bit", "end", "zeros", "noise"]):
            case "bit":
                new[at] ^= 1 << int(rng.integers(8))
            case "end":
                del new[at:]
            case "zeros":
                new[at : at + size] = bytes(len(new[at : at + size]))
            case "noise":
                new[at : at + size] = rng.bytes(len(new[at : at + size]))
        if new != content:
            return bytes(new)


def edited(content: bytes, rng: np.random.Generator) -> bytes:
    """Return the bytes of another valid file, probably: with another digit in one place."""
    new = bytearray(content)
    at = int(rng.choice([i for i, byte in enumerate(content) if byte in b"0123456789"]))
    new[at] = int(rng.choice([byte for byte in b"0123456789" if byte != new[at]]))
    return bytes(new)


def flip(array: np.ndarray, rng: np.random.Generator) -> None:
    """Flip one random bit of an array, in place."""
    bits = array.reshape(-1).view(np.uint8)
    bits[int(rng.integers(bits.size))] ^= np.uint8(1 << int(rng.integers(8)))


def unchecked() -> contextlib.AbstractContextManager[object]:
    """Accept files whatever their checksum is."""
    return mock.patch.object(Checksum, "check", new=_accepting)


def _accepting(*_: object, **__: object) -> None:
    pass


@contextlib.contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """Yield the messages of a logger as they come."""
    messages: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler, logger = Kept(), logging.getLogger(name)
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
