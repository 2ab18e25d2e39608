"""Damage to stored files of every kind, and reads that return less than was asked for.

A damaged file is read, which must fail in one line or give what was written. Then the whole file is
read in the same process, which must give what was written.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import jax
import numpy as np

import kvq_jax as kvq
from benchmarks.faults.outcome import REFUSALS, Inject, Kind, Outcome, damaged, edited, unchecked
from kvq_jax.cache.serialization import fingerprint
from kvq_models import EMBEDDED, Llama, load_llama, save_calibration, save_llama
from kvq_models.calibration.file import Calibration, Origin, read_calibration
from kvq_models.calibration.needs import needs
from kvq_models.llama.checkpoint import open_checkpoint, read_config
from kvq_tools.cli import planned
from kvq_tools.cli.batch import read_items
from kvq_tools.cli.console import UserError
from kvq_tools.cli.main import build_parser
from kvq_tools.planning.kept import StoredPlan, read_plan, write_plan

SPEC, CALIBRATED = "kivi:bits=2,recent=16,block=32", "kvquant:bits=3,recent=16,block=32"
DIMS = kvq.CacheDims(2, 4, 2, 32, 128)
TEXT = "It is a truth universally acknowledged, that 12 tokens are few. <|endoftext|> é\n"


class Stored(NamedTuple):
    """Functions that write files and read them. files: those that are damaged. checksum: True if
    they have one."""

    write: Callable[[Path], object]
    read: Callable[[Path], object]
    files: tuple[str, ...]
    checksum: bool


def write_cache(folder: Path) -> None:
    """Write a cache with a prompt beside it, as `kvq prefill` does."""
    cache, rng = kvq.init_cache(SPEC, DIMS, 2, 96, "float32"), np.random.default_rng(0)
    kvq.files.save(
        jax.tree.map(lambda leaf: _random(rng, np.asarray(leaf)), cache),
        folder / "cache",
        beside={"text": np.frombuffer(TEXT.encode(), np.uint8), "chat": np.ones(1, np.uint8)},
    )


def _random(rng: np.random.Generator, leaf: np.ndarray) -> jax.Array:
    if leaf.dtype.kind != "f":
        return jax.device_put(rng.integers(0, 60, leaf.shape).astype(leaf.dtype))
    return jax.device_put(rng.normal(size=leaf.shape).astype(leaf.dtype))


def read_cache(folder: Path) -> object:
    return fingerprint(kvq.files.load(folder / "cache", spec=SPEC)), {
        name: array.tobytes() for name, array in kvq.files.load_beside(folder / "cache").items()
    }


def write_calibration(folder: Path) -> None:
    rng, needed = np.random.default_rng(0), needs(kvq.parse(CALIBRATED), DIMS)
    tensors = {
        f"{where}.{name}": np.sort(rng.uniform(0.1, 1, spec.shape)).astype(spec.dtype)
        for where, need in needed.items()
        for name, spec in need.parameters.items()
    }
    keys = {where: need.options for where, need in needed.items()}
    origin = Origin("text", "0", 2, 3, 0, "float32", 1.0)
    save_calibration(
        Calibration(CALIBRATED, DIMS, "fingerprint", keys, origin, tensors), folder / "file"
    )


def read_fitted(folder: Path) -> object:
    calibration = read_calibration(folder / "file", kvq.parse(CALIBRATED), DIMS, "fingerprint")
    return {name: array.tobytes() for name, array in calibration.tensors.items()}


@functools.cache
def _llama() -> tuple[Llama, Any]:
    return load_llama(EMBEDDED, dtype="bfloat16")


def read_weights(folder: Path) -> object:
    return fingerprint(load_llama(folder / "model", dtype="bfloat16")[0])


def read_words(folder: Path) -> object:
    tokenizer = open_checkpoint(folder / "model", "tokenizer").tokenizer()
    return tokenizer(TEXT).input_ids, tokenizer.decode(list(range(3, 90))), tokenizer.get_vocab()


def write_gguf(folder: Path) -> None:
    """Write one random layer, with float32 matrices, and no tokenizer."""
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(folder / "file.gguf", "llama")
    for name, size in (
        ("block_count", 1),
        ("context_length", 64),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("vocab_size", 96),
    ):
        writer.add_uint32(f"llama.{name}", size)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    shapes = {
        "token_embd": (96, 64),
        "output_norm": (64,),
        "blk.0.attn_norm": (64,),
        "blk.0.ffn_norm": (64,),
        "blk.0.attn_q": (64, 64),
        "blk.0.attn_k": (32, 64),
        "blk.0.attn_v": (32, 64),
        "blk.0.attn_output": (64, 64),
        "blk.0.ffn_gate": (96, 64),
        "blk.0.ffn_up": (96, 64),
        "blk.0.ffn_down": (64, 96),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(folder: Path) -> object:
    llama, _ = load_llama(folder / "file.gguf", dtype="float32")
    return llama.config, fingerprint(llama)


def write_prompts(folder: Path) -> None:
    lines = (json.dumps({"id": i, "prompt": f"{TEXT} {i}", "seed": i}) for i in range(20))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_prompts(folder: Path) -> object:
    """Read prompts as `kvq generate --prompts` does."""
    file = str(folder / "prompts.jsonl")
    words = ["generate", "embedded", "--prompts", file, "--out", f"{file}.out"]
    options = build_parser("generate").parse_args([*words, "--cache", "kivi:bits=2"])
    planned.resolve(options)
    return [item.request for item in read_items(options, _llama()[0].config, _llama()[1])]


def _save_model(folder: Path) -> None:
    save_llama(_llama()[0], folder / "model", _llama()[1])


STORED = {
    "caches and prefilled prompts": Stored(write_cache, read_cache, ("cache",), True),
    "calibrations": Stored(write_calibration, read_fitted, ("file",), True),
    "weights that kvq saved": Stored(_save_model, read_weights, ("model/model.safetensors",), True),
    "configurations": Stored(
        _save_model, lambda folder: read_config(folder / "model"), ("model/config.json",), False
    ),
    "tokenizers": Stored(
        _save_model, read_words, ("model/tokenizer.json", "model/tokenizer_config.json"), False
    ),
    "GGUF files": Stored(write_gguf, read_gguf, ("file.gguf",), False),
    "prompts": Stored(write_prompts, read_prompts, ("prompts.jsonl",), False),
    "plans": Stored(
        lambda folder: write_plan(folder / "plan", StoredPlan(kvq.parse(SPEC), None)),
        lambda folder: read_plan(folder / "plan"),
        ("plan",),
        False,
    ),
}


def damage_of(name: str) -> Kind:
    """Return the kind of fault that damages these files."""
    stored = STORED[name]

    @contextlib.contextmanager
    def kind(folder: Path) -> Iterator[Inject]:
        stored.write(folder)
        expected = stored.read(folder)
        whole = {file: (folder / file).read_bytes() for file in stored.files}

        def inject(number: int, checked: bool) -> Outcome:
            rng = np.random.default_rng(number)
            file = str(rng.choice(stored.files))
            change = damaged if checked or stored.checksum else edited
            (folder / file).write_bytes(change(whole[file], rng))
            try:
                with contextlib.nullcontext() if checked else unchecked():
                    outcome = _compared(stored, folder, expected, checked)
            finally:
                (folder / file).write_bytes(whole[file])
            if outcome.bad or outcome.result == "other" or stored.read(folder) == expected:
                return outcome._replace(
                    result="right" if outcome.result == "refused" else outcome.result
                )
            return Outcome(outcome.detected, "wrong", "the whole file, after a damaged one")

        yield inject

    return kind


def _compared(stored: Stored, folder: Path, expected: object, checked: bool) -> Outcome:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same = stored.read(folder) == expected
    except (*REFUSALS, UserError) as error:
        one_line = "\n" not in str(error)
        return Outcome(True, "refused" if one_line else "crash", str(error))
    except Exception as error:  # a traceback
        return Outcome(False, "crash", f"{type(error).__name__}: {error}")
    if same:
        return Outcome(False, "right")
    return Outcome(False, "wrong" if stored.checksum or not checked else "other")


SHORT_READS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
static unsigned state = 0;
void short_reads(unsigned seed) { state = seed; }
ssize_t read(int file, void *to, size_t count) {
    static ssize_t (*original)(int, void *, size_t) = 0;
    if (!original) original = (ssize_t (*)(int, void *, size_t))dlsym(RTLD_NEXT, "read");
    if (state && count > 1) {
        state = state * 1664525u + 1013904223u;
        size_t most = 1 + (state >> 8) % 5000;
        if (count > most) count = most;
    }
    return original(file, to, count);
}
"""


def compiled_short_reads(folder: Path) -> Path:
    """Compile the library for LD_PRELOAD that makes read() return less than it was asked for."""
    source, library = folder / "short.c", folder / "short.so"
    source.write_text(SHORT_READS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


@contextlib.contextmanager
def short_reads(folder: Path) -> Iterator[Inject]:
    """Read files of every kind in a process whose reads are short."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    expected = {}
    for name, stored in STORED.items():
        (folder / name).mkdir()
        stored.write(folder / name)
        expected[name] = stored.read(folder / name)
    names = list(STORED)

    def inject(number: int, checked: bool) -> Outcome:
        name = names[number % len(names)]
        library.short_reads(number + 1)
        try:
            if checked:
                return _compared(STORED[name], folder / name, expected[name], False)
            file = folder / name / STORED[name].files[0]
            handle = os.open(file, os.O_RDONLY)
            content = os.read(handle, file.stat().st_size)  # as if reads were never short
            os.close(handle)
        finally:
            library.short_reads(0)
        return Outcome(False, "right" if content == file.read_bytes() else "wrong")

    yield inject
