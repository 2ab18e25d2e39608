"""Damaged files at the command: one line, no traceback, no hang, and nothing is accepted if
there is a checksum.

Each mutation is drawn from its number alone. KVQ_MUTATIONS=500 runs that many; a small sample runs
by default.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import kvq_jax as kvq
from kvq_jax.files.checksum import SHA256
from kvq_models import save_calibration
from kvq_models.calibration.file import Calibration, Origin
from kvq_models.calibration.needs import needs, partial_fingerprint
from kvq_models.llama.checkpoint import load_llama
from tests.kvq_jax.cache_runs import DIMS

COUNT = int(os.environ.get("KVQ_MUTATIONS", "60"))
# the longest that a command may take over a damaged file; beside busy processes, of its own CPU
# time
SECONDS = 10
SPEC = "k=kvquant:bits=2,outliers=0.1+v=kivi:bits=2+cache:sink=1,recent=0,block=32"
CACHE = "kivi:sink=2,recent=12,block=16"
VALUES = (
    None,
    -1,
    0,
    1,
    2**31,
    10**12,
    1.5,
    "x",
    "",
    [],
    {},
    [1, 2],
    True,
    "\x1b[31m",
    "$\\frac{$",
    "é" * 50,
)


class Hung(BaseException):
    """The time is over."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise Hung after SECONDS of CPU time, wherever Python is then."""

    def stop(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# --- what happens to a file


def flipped(content: bytes, draw: random.Random) -> bytes:
    """Flip one to three bits."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 3))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def flipped_in_header(content: bytes, draw: random.Random) -> bytes:
    """Flip a bit of the first bytes, where the header of a tensor file stands."""
    end = min(
        len(content),
        8 + int.from_bytes(content[:8], "little") if content[7:8] == b"\0" else len(content),
    )
    place = draw.randrange(end)
    return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]


def truncated(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def doubled(content: bytes, draw: random.Random) -> bytes:
    """Repeat a piece."""
    start, end = sorted(draw.randrange(len(content)) for _ in range(2))
    return content[:end] + content[start:]


def zeroed(content: bytes, draw: random.Random) -> bytes:
    """Put zeros in the place of a piece, as a disk does that lost a block."""
    start = draw.randrange(len(content))
    size = min(draw.choice((1, 8, 512)), len(content) - start)
    return content[:start] + bytes(size) + content[start + size :]


def digits_changed(content: bytes, draw: random.Random) -> bytes:
    """Change a digit of the text or header, which mostly leaves it readable."""
    end = len(content) if content[:1] == b"{" else 8 + int.from_bytes(content[:8], "little")
    places = [place for place in range(end) if content[place : place + 1].isdigit() and place >= 8]
    place = draw.choice(places)
    return content[:place] + str(draw.randrange(10)).encode() + content[place + 1 :]


BYTES = (flipped, flipped_in_header, truncated, doubled, zeroed, digits_changed)


def field_changed(content: bytes, draw: random.Random) -> bytes:
    """Give a field of a JSON object another value, of whatever type, or remove it."""
    fields = json.loads(content)
    holder: Any = fields
    name = draw.choice(sorted(holder))
    while isinstance(holder[name], dict) and holder[name] and draw.random() < 0.8:
        holder = holder[name]
        name = draw.choice(sorted(holder))
    if draw.random() < 0.2:
        del holder[name]
    else:
        holder[name] = draw.choice(VALUES)
    return json.dumps(fields).encode()


# --- what reads it


@pytest.fixture(scope="module")
def sound(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a folder with a model, a calibration and a cache that are sound. No model runs: their
    numbers are drawn."""
    folder, numbers = tmp_path_factory.mktemp("sound"), np.random.default_rng(0)
    shutil.copytree(model, folder / "model")
    llama, _ = load_llama(model, dtype="float32")
    needed, tensors = needs(kvq.parse(SPEC), llama.config), {}
    for name, need in needed.items():
        for own, spec in need.parameters.items():
            tensors[f"{name}.{own}"] = np.sort(numbers.random(spec.shape)).astype(spec.struct.dtype)
    origin = Origin("text", "0", 2, 3, 0, "float32", 1.0)
    keys = {name: need.options for name, need in needed.items()}
    dims = kvq.init_cache(SPEC, llama.config, 1, 40, "float32").dims
    save_calibration(
        Calibration(SPEC, dims, partial_fingerprint(llama), keys, origin, tensors),
        folder / "calibration.safetensors",
    )
    cache = kvq.init_cache(CACHE, DIMS, 1, 40, "float32")
    filled = jax.tree.map(
        lambda leaf: jnp.asarray(numbers.integers(0, 40, leaf.shape).astype(leaf.dtype)), cache
    )
    kvq.files.save(
        dataclasses.replace(filled, lengths=jnp.array([30], jnp.int32)),
        folder / "cache.safetensors",
    )
    return folder


def one_line(err: str, arguments: tuple[Any, ...]) -> None:
    lines = [
        line
        for line in err.splitlines()
        if not line.startswith(("kvq: warning:", "kvq: loading", "kvq: reading"))
    ]
    assert len(lines) == 1, f"{arguments}: {err}"
    assert lines[0].startswith("kvq: error: "), f"{arguments}: {err}"


# name: the file, the kinds of mutation, what reads it as (folder) -> arguments of kvq, whether the
# file has a checksum
CASES: dict[
    str, tuple[str, tuple[Callable[[bytes, random.Random], bytes], ...], tuple[str, ...], bool]
] = {
    "calibration": (
        "calibration.safetensors",
        BYTES,
        ("doctor", "{model}", "--cache", SPEC, "--calibration", "{file}"),
        True,
    ),
    "weights": (
        "model/model.safetensors",
        BYTES,
        ("generate", "{model}", "--prompt", "It was", "--cache", "dense", "--max-new-tokens", "1"),
        True,
    ),
    "config": (
        "model/config.json",
        (*BYTES, *[field_changed] * 6),
        ("memory", "{model}", "--cache", CACHE, "--context", "64"),
        False,
    ),
    "tokenizer": (
        "model/tokenizer.json",
        (*BYTES, *[field_changed] * 3),
        ("generate", "{model}", "--prompt", "It was", "--capacity", "1", "--cache", "dense"),
        False,
    ),
    "tokenizer's settings": (
        "model/tokenizer_config.json",
        (flipped, truncated, *[field_changed] * 3),
        ("generate", "{model}", "--prompt", "It was", "--capacity", "1", "--cache", "dense"),
        False,
    ),
    "cache": ("cache.safetensors", BYTES, (), True),
}


@pytest.fixture
def mutated(sound: pathlib.Path, tmp_path: pathlib.Path) -> Callable[[str, int], pathlib.Path]:
    """Return a function that makes a folder with one mutation: the number-th of a case."""

    def make(name: str, number: int) -> pathlib.Path:
        file, kinds, _, _ = CASES[name]
        draw, content = random.Random(f"{name} {number}"), (sound / file).read_bytes()
        kind = kinds[number % len(kinds)]
        new = content
        while new == content:
            new = kind(content, draw)
        folder = tmp_path / f"{number}"
        shutil.copytree(sound, folder)
        (folder / file).write_bytes(new)
        return folder

    return make


def filled(arguments: tuple[str, ...], folder: pathlib.Path) -> tuple[str, ...]:
    names = {"{model}": str(folder / "model"), "{file}": str(folder / "calibration.safetensors")}
    return tuple(names.get(argument, argument) for argument in arguments)


@pytest.mark.parametrize("name", [name for name in CASES if name != "cache"])
@pytest.mark.filterwarnings("default")
def test_a_command_refuses_a_damaged_file_in_one_line(
    name: str, sound, mutated, run, types_unchecked
):
    file, _, arguments, checked = CASES[name]
    if name in ("calibration", "config"):
        code, _, err = run(*filled(arguments, sound))
        assert code == 0, f"the sound file is refused: {err}"
    for number in range(COUNT // len(CASES)):
        folder = mutated(name, number)
        with limited():
            code, out, err = run(*filled(arguments, folder))
        place = f"mutation {number} of {file}"
        assert code in ((2,) if checked else (0, 2)), f"{place} is accepted: {out[:200]}"
        if code:
            one_line(err, (place,))
        shutil.rmtree(folder)


def test_a_damaged_cache_is_refused_in_one_line(sound, mutated, types_unchecked):
    kvq.files.load(sound / "cache.safetensors")
    for number in range(COUNT // len(CASES)):
        folder = mutated("cache", number)
        accepted, message = True, ""
        with limited():
            try:
                kvq.files.load(folder / "cache.safetensors")
            except ValueError as error:
                accepted, message = False, str(error)
        assert not accepted, f"mutation {number} of cache.safetensors is accepted"
        assert "\n" not in message, f"mutation {number}: {message}"
        shutil.rmtree(folder)


SWAPS = {  # the file that takes the place of another, and what reads it then
    "a cache for a calibration": ("cache.safetensors", "calibration.safetensors", "calibration"),
    "a cache for weights": ("cache.safetensors", "model/model.safetensors", "weights"),
    "a tokenizer for a config": ("model/tokenizer.json", "model/config.json", "config"),
    "a config for a tokenizer": ("model/config.json", "model/tokenizer.json", "tokenizer"),
}


@pytest.mark.parametrize("name", SWAPS)
@pytest.mark.filterwarnings("default")
def test_a_file_in_the_place_of_another_is_refused_in_one_line(
    name: str, sound, tmp_path, run, types_unchecked
):
    source, target, case = SWAPS[name]
    shutil.copytree(sound, tmp_path / "swapped")
    shutil.copy(sound / source, tmp_path / "swapped" / target)
    with limited():
        code, _, err = run(*filled(CASES[case][2], tmp_path / "swapped"))
    assert code == 2, name
    one_line(err, (name,))


def test_tensors_that_change_places_in_a_cache_are_found(sound, tmp_path):
    """The file keeps its names, shapes and sizes, and every byte of it somewhere."""
    with safe_open(sound / "cache.safetensors", framework="numpy") as file:
        names = file.keys()
        shapes = {
            name: (tuple(file.get_slice(name).get_shape()), file.get_slice(name).get_dtype())
            for name in names
        }
    one = next(name for name in shapes if name.startswith("layers.0."))
    other = one.replace("layers.0.", "layers.1.")
    content = (sound / "cache.safetensors").read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    first, second = (f'"{name}"'.encode() for name in (one, other))
    header = content[8:size].replace(first, b"?").replace(second, first).replace(b"?", second)
    assert header != content[8:size]
    assert shapes[one] == shapes[other]
    (tmp_path / "cache.safetensors").write_bytes(content[:8] + header + content[size:])
    with pytest.raises(ValueError, match="is damaged: its content does not have the checksum"):
        kvq.files.load(tmp_path / "cache.safetensors")


@pytest.mark.filterwarnings("default")
def test_a_command_says_in_one_line_that_an_older_calibration_has_no_checksum(sound, tmp_path, run):
    shutil.copytree(sound, tmp_path / "old")
    file = tmp_path / "old" / "calibration.safetensors"
    with safe_open(file, framework="numpy") as opened:
        header = {field: value for field, value in opened.metadata().items() if field != SHA256}
    save_file(load_file(file), file, metadata=header | {"format_version": "1"})
    code, _, err = run(*filled(CASES["calibration"][2], tmp_path / "old"))
    assert code == 0, err
    notes = [line for line in err.splitlines() if "checksums" in line]
    assert notes == [
        f"kvq: warning: '{file}' was written before files had checksums: damage would not be seen"
    ]
