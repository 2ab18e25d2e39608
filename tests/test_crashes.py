"""Writers that are killed at every step: what was there stays whole, nothing else is left, and the
same command works again."""

import gc
import itertools
import os
import pathlib
from collections.abc import Iterator

import pytest

from kvq_jax.files import whole
from kvq_jax.files.whole import UNFINISHED, replacing
from kvq_models import save_llama
from tests.crashes import killed_at, listing, steps_of
from tests.exhaustive import some
from tests.writers import WRITERS, directory, llama, write_llama, write_tree

EVERY_STEP = "KVQ_EVERY_STEP" in os.environ  # of long writers too; otherwise every third of theirs
LONG = 40  # steps of a writer


@pytest.fixture(autouse=True)
def _little_garbage() -> Iterator[None]:
    """Keep what exists out of the collections after each kill: they would go through all that was
    traced before, a second each."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the disk: what is not synced is lost by the harness."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.parametrize(
    ("name", "begin"),
    some(
        itertools.product(WRITERS, ("new", "replacing")),
        [*((name, "replacing") for name in WRITERS), ("calibrate", "new"), ("tree", "new")],
    ),
)
def test_a_writer_that_is_killed_at_any_step_leaves_old_or_new_and_works_again(
    name: str, begin: str, tmp_path: pathlib.Path
):
    writer = WRITERS[name]

    def prepared(folder: pathlib.Path) -> pathlib.Path:
        folder.mkdir()
        if begin == "replacing":
            writer.write(folder, 0)
        return folder

    (tmp_path / "compiled").mkdir()
    # programs that are compiled and kept on disk are not steps of the writer
    writer.write(tmp_path / "compiled", 1)
    folder = prepared(tmp_path / "undisturbed")
    old = writer.read(folder)
    steps = steps_of(lambda: writer.write(folder, 1))
    new, whole_listing = writer.read(folder), listing(folder)
    assert old != new, "the writer writes nothing"
    assert not [path for path in whole_listing if UNFINISHED in path]
    assert len(steps) > 5, f"the harness sees only {steps}"
    for step in range(1, len(steps) + 1, 1 if EVERY_STEP or len(steps) < LONG else 3):
        folder = prepared(tmp_path / f"{step}")
        place = (
            f"killed at step {step} of {len(steps)},"
            f" {killed_at(step, lambda folder=folder: writer.write(folder, 1))}"
        )
        for file, content in writer.read(folder).items():
            whole_content = content in (old[file], new[file]) or (writer.absent and content is None)
            assert whole_content, f"{place}: {file} is neither old nor new"
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


def test_where_directories_cannot_be_swapped_a_killed_writer_loses_none_of_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """There is one moment without the directory. The next writer in the same folder, of whatever,
    puts the old one back."""
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
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"slow": "slow", "quick": "quick"}


def test_saving_over_a_directory_keeps_its_other_files_and_folders(tmp_path: pathlib.Path):
    write_llama(tmp_path, 0)
    (tmp_path / "model" / "notes.txt").write_text("mine")
    (tmp_path / "model" / "logs").mkdir()
    (tmp_path / "model" / "logs" / "one").write_text("log")
    save_llama(llama(1), tmp_path / "model")
    saved = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert listing(tmp_path / "model") == saved | {"notes.txt", "logs", "logs/one"}
    assert (tmp_path / "model" / "logs" / "one").read_text() == "log"
