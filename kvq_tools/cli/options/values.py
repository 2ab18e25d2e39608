"""Parse the values of options. Their errors say what is allowed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from kvq_tools.cli.console import UserError

MAX_SEED = 2**32 - 1
MAX_TOKENS = 2**31 - 1  # positions are int32
MAX_DIGITS = 30  # Python refuses to read 4301 of them
MAX_BYTES = 2**60  # so that a count of the tokens in them is an index

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)


class NotASizeError(argparse.ArgumentTypeError):
    """A text that cannot be read as a size."""


def refusal(command: str, argument: str, why: str) -> UserError:
    """Return the error that argparse gives for a value, for values that are parsed after it."""
    return UserError(f"argument {argument}: {why} (see kvq {command} --help)")


def integer(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Return the parser of an integer from `minimum` to `maximum`."""
    allowed = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def parse(text: str) -> int:
        number = _number(text)
        if number is None or number < minimum or (maximum is not None and number > maximum):
            digits = f" with at most {MAX_DIGITS} digits" if len(text) > MAX_DIGITS else ""
            raise argparse.ArgumentTypeError(f"{text!r} must be an integer {allowed}{digits}")
        return number

    return parse


def _number(text: str) -> int | None:
    """Return the number that at most MAX_DIGITS ASCII digits write, else None."""
    decimal = text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
    return int(text) if decimal else None


count = integer(0)
positive = integer(1)
seed = integer(0, MAX_SEED)  # what every random generator accepts, and JAX does not cut


def file_name(text: str) -> str:
    """Refuse an empty name, which Path takes for the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; name a file")
    return text


def directory_name(text: str) -> str:
    """Refuse an empty name, which Path takes for the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; name a directory")
    return text


def token_count(text: str) -> int:
    """Parse a number of tokens such as 4096, 128K or 10M. K and M are powers of 1024."""
    digits, power = (
        (text[:-1], " KM".index(text[-1].upper())) if text[-1:].upper() in ("K", "M") else (text, 0)
    )
    number = _number(digits)
    if number is None or not 0 < number * 1024**power <= MAX_TOKENS:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be an integer of at least 1 and below 2G, such as 4096, 128K or 10M"
        )
    return number * 1024**power


class ByteSize(int):
    """A number of bytes that knows the text that gave it."""

    text: str

    def __new__(cls, size: int, text: str) -> ByteSize:
        made = super().__new__(cls, size)
        made.text = text
        return made


def byte_size(text: str) -> ByteSize:
    """Parse a size such as 24GiB, 500MB or 1000000. KB, MB, GB and TB are powers of 1000; KiB, MiB,
    GiB and TiB are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if not match or not (match[2] or match[1].isdigit()):  # 2.5 of what?
        raise NotASizeError(f"{text!r} is not a size; write 24GiB, 500MB or a number of bytes")
    unit = (match[2] or "").lower()
    power = " kmgt".index(unit[0]) if unit else 0
    size = float(match[1]) * (1024 if unit.endswith("i") else 1000) ** power
    if size > MAX_BYTES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is more than the largest size, {MAX_BYTES >> 40}TiB"
        )
    return ByteSize(int(size), text.strip())


def token_ids(text: str) -> list[int]:
    """Parse --prompt-ids, such as 1,2,3."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of token ids; write 1,2,3"
        ) from None
