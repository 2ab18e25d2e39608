"""Read the fields of a config.json. Every error names the field."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

LIMIT = 2.0**128  # float32 ends below it
# Fields about quantization: MLX calls it by another name.
QUANTIZATION = ("quantization_config", "compression_config", "quantization")


def check_positive(name: str, value: float) -> None:
    if not 0 < value < LIMIT:
        raise ValueError(f"config field {name}={value} must be above 0 and finite in float32")


@contextlib.contextmanager
def fields_named(names: Mapping[str, str], kind: str = "config") -> Iterator[None]:
    """Make an error about a field of a configuration name it as the file does.

    names: the file's names by the configuration's. kind: of the file's fields.
    """
    try:
        yield
    except ValueError as error:
        stated = "|".join(map(re.escape, names))
        told = re.sub(
            rf"(config field )?\b({stated})(?==)",
            lambda match: f"{kind} field " * bool(match[1]) + names[match[2]],
            str(error),
        )
        if told == str(error):
            raise
        raise ValueError(told) from error


def typed(name: str, value: Any, kind: type) -> Any:
    """Return the value as `kind`. JSON writes whole floats as integers, so integers widen to float.
    Nothing else converts."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(
                f"config field {name} is an integer of {value.bit_length()} bits, which no float"
                " holds"
            ) from None
    if kind is int and isinstance(value, int) and value.bit_length() > 63:
        raise ValueError(f"config field {name} is an integer of {value.bit_length()} bits")
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ValueError(f"config field {name}={value!r} must be of type {kind.__name__}")
    return value


def required(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    if fields.get(name) is None:
        raise ValueError(f"config field {name} is missing")
    return typed(name, fields[name], kind)


def optional(fields: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return a field's value, or the default if it is absent or null, as in transformers."""
    value = fields.get(name)
    return default if value is None else typed(name, value, kind)


def token_ids(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the ids of a token id field, which may hold null, one id or a list of ids."""
    value = fields.get(name)
    values = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(typed(name, one, int) for one in values)


def quantization_fields(hf: Mapping[str, Any]) -> Any:
    """Return what config.json says about quantization, or None. ModelOpt nests it."""
    fields = next((hf[name] for name in QUANTIZATION if hf.get(name)), None)
    if not isinstance(fields, Mapping):
        return fields
    nested = fields.get("quantization")
    return {**fields, **nested} if isinstance(nested, Mapping) else fields
