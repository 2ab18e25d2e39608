"""The schema of report.json: everything that a report shows, and nothing else.

The file is a JSON object with the fields of `CacheReport`. Nested objects are the dataclasses
below, and tuples are lists. Numbers that are not finite are null. Lists "by position" have one
entry for each of `positions`, lists "by layer" one for each layer of the model. Means are over
tokens. Times are milliseconds, sizes bytes. `read` refuses, in one line, a file with other fields,
types or lengths.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from kvq_jax.files.json_text import parse_json
from kvq_tools.evaluation.defaults import MODES

FORMAT = "kvq report 3"


@dataclasses.dataclass(frozen=True)
class TimingMachine:
    """The machine on which times were measured. load: the one-minute load average when timing began
    and ended."""

    device: str
    cores: int
    jax_version: str
    load: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """The model. dtype: of weights, activations and full-precision rows. positions: the length it
    was trained for. parameters: the number of its weights."""

    name: str
    family: str
    parameters: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    positions: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class TextFacts:
    """The text. tokens: number read. scored: number predicted. scored_bytes: UTF-8 bytes of the
    predicted tokens, null if the tokenizer gives no offsets."""

    name: str
    tokens: int
    scored: int
    scored_bytes: int | None


@dataclasses.dataclass(frozen=True)
class EvaluationRequest:
    """The settings of the evaluation (see `kvq eval --help`). capacity: tokens of the caches whose
    bytes are reported. bf16_bytes: of all K and V in bfloat16."""

    mode: str
    window: int
    stride: int
    prompt: int
    chunk: int | None
    step: int | None
    batch: int
    capacity: int
    bf16_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Positions:
    """Tokens that have first .. last tokens before them in their window."""

    first: int
    last: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Exact:
    """The model without a cache. nats: -log p, by position."""

    perplexity: float | None
    bits_per_byte: float | None
    nats: tuple[float | None, ...]


@dataclasses.dataclass(frozen=True)
class ArrayBytes:
    """The bytes of one array of one layer. side: k, v, or kv for both. name: words, scale, zero,
    rows (full precision), ring and sink (windows), ..."""

    side: str
    name: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class LayerErrors:
    """The errors of one layer if every token of the sample is quantized
    (`kvq_jax.cache.roundtrip_layer`).

        keys, values            mean |k^ - k| (after RoPE) and |v^ - v| of each channel, KV head by
                                KV head
        k_relative, v_relative  ||k^ - k|| / ||k|| of all rows together
    """

    k_relative: float | None
    v_relative: float | None
    keys: tuple[float | None, ...]
    values: tuple[float | None, ...]


@dataclasses.dataclass(frozen=True)
class CacheNumbers:
    """One cache. name: as the user wrote it. spec: its canonical form.

    perplexity .. agreement   of the text, as in `kvq eval`
    bytes .. bits_per_element
                              of a cache of `EvaluationRequest.capacity` tokens,
                              including windows, with full-precision rows in bfloat16
    body_bits_per_element     without windows
    parameter_bytes, working_bytes
                              besides the cache: made once for the model, and for a step
    quantized_tokens          number of quantized tokens when a window is read for the last time;
                              0: the cache was full precision in all but name
    window_kl                 means of the text's windows, the same for every cache; empty in
                              reports that were made before they were kept
    nats, kl_by_position, flips_by_position
                              by position
    flips                     places in the text at which the likeliest token is not the
                              full-precision model's
    sizes                     by layer; they add up to `bytes` minus the cache's lengths (4 bytes)
    errors                    by layer
    """

    name: str
    spec: str
    perplexity: float | None
    bits_per_byte: float | None
    kl: float | None
    agreement: float
    bytes: int
    ratio: float
    bits_per_element: float
    body_bits_per_element: float
    parameter_bytes: int
    working_bytes: int
    sink: int
    recent: int
    block: int
    quantized_tokens: int
    window_kl: tuple[float | None, ...]
    nats: tuple[float | None, ...]
    kl_by_position: tuple[float | None, ...]
    flips_by_position: tuple[int, ...]
    flips: tuple[int, ...]
    sizes: tuple[tuple[ArrayBytes, ...], ...]
    errors: tuple[LayerErrors, ...]

    def resident_bytes(self, batch: int) -> int:
        """Return the bytes that `batch` sequences add to those of the model."""
        return batch * (self.bytes + self.working_bytes) + self.parameter_bytes


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Decode steps of one token through one cache. reads: the implementations of its layers (xla,
    native, pallas), joined by "/". samples_ms: all samples, by context."""

    name: str
    spec: str
    reads: str
    samples_ms: tuple[tuple[float, ...], ...]

    @property
    def medians_ms(self) -> tuple[float, ...]:
        return tuple(float(np.median(samples)) for samples in self.samples_ms)

    @property
    def fastest_ms(self) -> tuple[float, ...]:
        return tuple(min(samples) for samples in self.samples_ms)


@dataclasses.dataclass(frozen=True)
class Speed:
    """contexts: tokens of one sequence in the cache. The caches take turns, step by step. `dense`
    is always among them."""

    contexts: tuple[int, ...]
    machine: TimingMachine
    caches: tuple[StepTimes, ...]


@dataclasses.dataclass(frozen=True)
class PackedMatrix:
    """A matrix: float16, little-endian, row after row, in base64."""

    rows: int
    columns: int
    float16: str

    @classmethod
    def of(cls, matrix: Float[np.ndarray, "rows columns"]) -> PackedMatrix:
        """Pack a matrix. Entries beyond float16's range become its largest value."""
        largest = float(np.finfo(np.float16).max)
        stored = np.nan_to_num(np.clip(matrix, -largest, largest)).astype("<f2")
        rows, columns = stored.shape
        return cls(rows, columns, base64.b64encode(stored.tobytes()).decode("ascii"))

    def matrix(self) -> Float[np.ndarray, "rows columns"]:
        """Return the matrix in fp32. Raise ValueError if the bytes do not fit the shape."""
        stored = np.frombuffer(base64.b64decode(self.float16, validate=True), "<f2")
        return stored.reshape(self.rows, self.columns).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class LayerMagnitudes:
    """|k| after RoPE and |v|: a row for each token of the sample, a column for each channel, KV
    head by KV head."""

    layer: int
    keys: PackedMatrix
    values: PackedMatrix


@dataclasses.dataclass(frozen=True)
class CacheReport:
    """Everything in report.json. tokens_of_sample: number of the text's first tokens that
    magnitudes and errors are from. command: the command line that made the report."""

    format: str
    command: str
    date: str
    model: ModelFacts
    text: TextFacts
    request: EvaluationRequest
    positions: tuple[Positions, ...]
    exact: Exact
    caches: tuple[CacheNumbers, ...]
    speed: Speed | None
    tokens_of_sample: int
    magnitudes: tuple[LayerMagnitudes, ...]


def dump(report: CacheReport) -> str:
    """Return the text of report.json: a line for each field, and one for each cache."""

    def text(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    def lines(value: Any) -> str:
        many = isinstance(value, list | tuple) and value and isinstance(value[0], dict)
        return "[\n  " + ",\n  ".join(map(text, value)) + "\n ]" if many else text(value)

    return (
        "{\n"
        + ",\n".join(
            f" {text(name)}: {lines(value)}" for name, value in dataclasses.asdict(report).items()
        )
        + "\n}\n"
    )


def read(path: str | os.PathLike[str]) -> CacheReport:
    """Read the report in a file. Raise ValueError, in one line, if it is not a report, and OSError
    if there is no such file."""
    try:
        stored = parse_json(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)!r} is not JSON: {error}") from error
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        written = stored.get("format") if isinstance(stored, dict) else None
        raise ValueError(f"{os.fspath(path)!r} is not a {FORMAT!r}: its format is {written!r}")
    try:
        report = _typed(CacheReport, stored, "report")
        _check_lengths(report)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)!r}: {error}") from error
    return report


def _typed(kind: Any, value: Any, at: str) -> Any:
    """Return the value as a dataclass, tuple, or plain value of that type. Raise ValueError, naming
    the place, if it does not fit."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _typed(arguments[0], value, at)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{at} must be a list")
        return tuple(_typed(arguments[0], entry, f"{at}[{i}]") for i, entry in enumerate(value))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            raise ValueError(f"{at} must be an object with {', '.join(hints)}")
        return kind(
            **{name: _typed(hint, value[name], f"{at}.{name}") for name, hint in hints.items()}
        )
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{at} must be {kind.__name__}, not {type(value).__name__}")
    if kind is int and not 0 <= value < 1 << 63:
        raise ValueError(f"{at} must be a count, not {value}")
    return value


def _check_lengths(report: CacheReport) -> None:
    """Raise ValueError if lists that belong together have different lengths, or what everything is
    counted by is 0."""
    positions = len(report.positions)
    layers = report.model.layers
    channels = report.model.kv_heads * report.model.head_dim

    def equal(name: str, entries: int, wanted: int) -> None:
        if entries != wanted:
            raise ValueError(f"{name} has {entries} entries, not {wanted}")

    if report.request.mode not in MODES:
        raise ValueError(f"request.mode must be one of {', '.join(MODES)}")
    filled: dict[str, Sequence[Any]] = {"caches": report.caches}
    if report.speed is not None:
        filled |= {"speed.caches": report.speed.caches, "speed.contexts": report.speed.contexts}
    for name, entries in filled.items():
        if not entries:
            raise ValueError(f"{name} is empty")
    for name, count in (
        ("text.tokens", report.text.tokens),
        ("capacity", report.request.capacity),
        ("tokens_of_sample", report.tokens_of_sample),
    ):
        if not count:
            raise ValueError(f"{name} must be at least 1")
    equal("exact.nats", len(report.exact.nats), positions)
    for i, cache in enumerate(report.caches):
        for name in ("nats", "kl_by_position", "flips_by_position"):
            equal(f"caches[{i}].{name}", len(getattr(cache, name)), positions)
        equal(f"caches[{i}].window_kl", len(cache.window_kl), len(report.caches[0].window_kl))
        equal(f"caches[{i}].sizes", len(cache.sizes), layers)
        equal(f"caches[{i}].errors", len(cache.errors), layers)
        for layer, errors in enumerate(cache.errors):
            equal(f"caches[{i}].errors[{layer}].keys", len(errors.keys), channels)
            equal(f"caches[{i}].errors[{layer}].values", len(errors.values), channels)
    if report.speed is not None:
        contexts = len(report.speed.contexts)
        for times in report.speed.caches:
            equal(f"speed: samples of {times.name}", len(times.samples_ms), contexts)
            if not all(times.samples_ms):
                raise ValueError(f"speed: {times.name} has a context without samples")
    for maps in report.magnitudes:
        for name in ("keys", "values"):
            shape = getattr(maps, name).matrix().shape
            if shape != (report.tokens_of_sample, channels):
                raise ValueError(
                    f"magnitudes of layer {maps.layer}: {name} are {shape}, not"
                    f" {(report.tokens_of_sample, channels)}"
                )
