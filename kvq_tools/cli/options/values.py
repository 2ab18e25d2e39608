"""Parse the values of options. Their errors say what is allowed."""

from __future__ import annotations

import argparse
import re

from kvq_tools.cli.console import UserError

MOST_SEED = 2**32 - 1

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)


def refusal(command: str, argument: str, why: str) -> UserError:
    """Return the error that argparse gives for a value, for values that are parsed after it."""
    return UserError(f"argument {argument}: {why} (see kvq {command} --help)")


def positive(text: str) -> int:
    """Parse a count: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)


def token_count(text: str) -> int:
    """Parse a number of tokens such as 4096, 128K or 10M. K and M are powers of 1024."""
    digits, power = (
        (text[:-1], " KM".index(text[-1].upper())) if text[-1:].upper() in ("K", "M") else (text, 0)
    )
    if not digits.isdecimal() or not 0 < int(digits) * 1024**power < 1 << 31:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be an integer of at least 1 and below 2G, such as 4096, 128K or 10M"
        )
    return int(digits) * 1024**power


def count(text: str) -> int:
    """Parse a count that may be 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 0")
    return int(text)


def seed(text: str) -> int:
    """Parse --seed: a number that every random generator accepts and that JAX does not cut to 32
    bits."""
    if not text.isdecimal() or int(text) > MOST_SEED:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer from 0 to {MOST_SEED}")
    return int(text)


def byte_size(text: str) -> int:
    """Parse a size such as 24GiB, 500MB or 1000000. KB, MB, GB and TB are powers of 1000; KiB, MiB,
    GiB and TiB are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write 24GiB, 500MB or a number of bytes"
        )
    unit = (match[2] or "").lower()
    power = " kmgt".index(unit[0]) if unit else 0
    return int(float(match[1]) * (1024 if unit.endswith("i") else 1000) ** power)


def token_ids(text: str) -> list[int]:
    """Parse --prompt-ids, such as 1,2,3."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of token ids; write 1,2,3"
        ) from None
