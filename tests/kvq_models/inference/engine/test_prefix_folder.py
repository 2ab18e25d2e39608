"""Prefixes on disk: the next process reads them instead of the prompt, and nothing that does not
belong to it."""

import logging
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from safetensors import SafetensorError, safe_open

from kvq_jax.files.checksum import save_tensors
from kvq_jax.files.whole import UNFINISHED
from kvq_models import Llama
from kvq_models.inference.engine.pieces import RowPiece
from kvq_models.inference.engine.prefix_folder import SUFFIX, PrefixFolder
from kvq_models.inference.engine.prefixes import PrefixStore
from kvq_models.inference.engine.requests import Request
from tests.kvq_models.inference.engine.test_prefixes import CHUNK, answers, engine_of, tokens_of

PLENTY = 1 << 24
# their first chunk is the same
PROMPTS = [tokens_of(0, 2 * CHUNK + 9), tokens_of(0, CHUNK) + tokens_of(1, 20)]
REQUESTS = [Request(prompt, 6) for prompt in PROMPTS]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "prefixes"


def served(
    llama: Llama, folder: pathlib.Path, memory: int = PLENTY, limit: int = PLENTY
) -> tuple[list[list[tuple]], int]:
    """Return the answers of a new process, and the number of prompt tokens that it does not
    read."""
    disk = PrefixFolder(folder, limit)
    engine = engine_of(llama, PrefixStore(memory, disk))
    found = [answers(engine, [request])[0] for request in REQUESTS]
    disk.close()
    return found, engine.counts.prefix_tokens


@pytest.mark.parametrize("memory", [0, PLENTY])
def test_the_next_process_reads_files_and_gets_the_same_bits(
    llama: Llama, folder: pathlib.Path, memory: int
):
    expected = answers(engine_of(llama), REQUESTS)
    first, reused = served(llama, folder)
    assert (first, reused) == (expected, CHUNK)
    assert len(list(folder.iterdir())) == 4
    assert served(llama, folder, memory) == (expected, sum(map(len, PROMPTS)))


def test_another_model_finds_nothing(llama: Llama, folder: pathlib.Path):
    served(llama, folder)
    assert served(jax.tree.map(lambda leaf: leaf * 1.01, llama), folder)[1] == CHUNK, (
        "its own first prompt alone helps the second"
    )
    assert served(llama, folder)[1] == sum(map(len, PROMPTS))


def flip_a_bit(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def rewrite(path: pathlib.Path, tensors: dict[str, np.ndarray], **header: str) -> None:
    """Change a file's tensors and header, with a checksum that is right."""
    with safe_open(path, framework="numpy") as file:
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        before = file.metadata()
    kept = {name: tensor for name, tensor in (kept | tensors).items() if tensor.size}
    save_tensors(path, kept, before | header)


def fifo(path: pathlib.Path) -> None:
    path.unlink()
    os.mkfifo(path)  # reading it waits until somebody writes


def take_the_place_of_another(path: pathlib.Path) -> None:
    before = path.parent.with_name("before") / path.name
    path.write_bytes(next(others(before)).read_bytes())


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        fifo,
        lambda path: rewrite(path, {"logits": np.zeros(0)}),
        lambda path: rewrite(path, {"logits": np.zeros((1, 7), np.float32)}),
        lambda path: rewrite(path, {"0": np.zeros((3, 3), np.float32)}),
        lambda path: rewrite(path, {"0": np.zeros(0)}),
        lambda path: rewrite(path, {"x": np.zeros(1)}),
        lambda path: rewrite(path, {}, length="x"),
        lambda path: rewrite(path, {}, length="7"),
        lambda path: rewrite(path, {}, starts="7"),
        lambda path: rewrite(path, {}, starts="[1]"),
        lambda path: path.write_bytes(b""),
        take_the_place_of_another,
    ],
)
def test_a_damaged_file_is_not_used_but_deleted(
    llama: Llama, folder: pathlib.Path, caplog: pytest.LogCaptureFixture, damage
):
    expected, _ = served(llama, folder)
    disk = PrefixFolder(folder, PLENTY)
    engine = engine_of(llama, PrefixStore(0, disk))
    shutil.copytree(folder, folder.with_name("before"))
    for path in folder.iterdir():
        damage(path)
    with caplog.at_level(logging.WARNING, logger="kvq.prefixes"):
        assert answers(engine, REQUESTS[:1]) == expected[:1]
    disk.close()
    assert "; the file is deleted" in caplog.text
    assert engine.counts.prefix_tokens == 0


def test_a_warning_says_if_a_damaged_file_cannot_be_deleted(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture
):
    disk = PrefixFolder(folder, PLENTY)
    (folder / f"{b'a'.hex()}{SUFFIX}").mkdir()
    assert disk.get(b"a") is None
    (told,) = caplog.messages
    assert "is no regular file; it is not used and cannot be deleted (" in told
    assert "the file is deleted" not in told


def test_a_file_that_safetensors_cannot_write_is_told_and_the_next_one_is_written(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*args: object, **options: object) -> None:
        raise SafetensorError("no such dtype")

    disk = PrefixFolder(folder, PLENTY)
    with monkeypatch.context() as patched:
        patched.setattr("kvq_jax.files.checksum.save_file", refuse)
        disk.put([b"a"], piece(0))
        disk.close()
    assert caplog.messages == ["a prefix could not be written: no such dtype"]
    assert written(folder, PLENTY, [b"b"]) == {b"b"}


def others(path: pathlib.Path) -> Iterator[pathlib.Path]:
    return (other for other in sorted(path.parent.iterdir()) if other != path)


def piece(seed: int) -> RowPiece:
    return RowPiece(
        1,
        (0,),
        (np.random.default_rng(seed).integers(0, 256, 10_000, np.uint8),),
        np.zeros((1, 1), np.float32),
    )


def written(folder: pathlib.Path, limit: int, *chains: list[bytes]) -> set[bytes]:
    """Return the keys with a piece in the folder after the last pieces of these chains were
    written."""
    disk = PrefixFolder(folder, limit)
    for seed, chain in enumerate(chains):
        disk.put(chain, piece(seed))
    disk.close()
    assert disk.nbytes == sum(file.stat().st_size for file in folder.iterdir()) <= limit
    return {bytes.fromhex(file.name.removesuffix(SUFFIX)) for file in folder.iterdir()}


def test_the_least_recently_used_goes_first_and_the_end_of_a_chain_before_its_beginning(
    folder: pathlib.Path,
):
    a, b, c, d, e = b"a", b"b", b"c", b"d", b"e"
    assert written(folder, 33_000, [a], [a, b], [c]) == {a, b, c}
    PrefixFolder(folder, 33_000).use([a, b])
    assert written(folder, 33_000, [d]) == {a, b, d}
    assert written(folder, 33_000, [e]) == {a, e, d}, "b, which continues a, goes before it"
    assert written(folder, 33_000, [b"gone", c]) == {a, e, d}, (
        "a piece without what comes before it serves nobody"
    )
    assert written(folder, 12_000) == {e}, "a smaller budget"
    assert written(folder, 9_000, [a]) == set(), "what is larger than the folder is not written"


def test_what_killed_writers_and_lost_beginnings_leave_is_deleted(folder: pathlib.Path):
    assert written(folder, PLENTY, [b"a"], [b"a", b"b"], [b"a", b"b", b"c"], [b"d"]) == {
        b"a",
        b"b",
        b"c",
        b"d",
    }
    (folder / f"{b'a'.hex()}{SUFFIX}").unlink()
    (folder / f"{UNFINISHED}x").mkdir()
    (folder / f"zz{SUFFIX}").write_text("no tensors")
    assert written(folder, PLENTY) == {b"d"}


def test_a_writer_that_is_killed_once_its_file_is_there_leaves_no_beginning_older_than_its_end(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    a, b, c, d = b"a", b"b", b"c", b"d"
    assert written(folder, 33_000, [a], [c], [d]) == {a, c, d}

    def killed(*paths: pathlib.Path, replace=os.replace) -> None:
        replace(*paths)
        raise RuntimeError("killed")

    disk = PrefixFolder(folder, 33_000)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        disk.put([a, b], piece(3))
        disk.close()
    assert len(list(folder.iterdir())) == 4, "nothing was deleted yet"
    assert written(folder, 33_000) == {a, b, d}, "c is the oldest: a was used for b"


def test_other_files_of_the_folder_are_left_alone(folder: pathlib.Path):
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(50_000))
    disk = PrefixFolder(folder, 12_000)
    disk.put([b"a"], piece(0))
    disk.close()
    assert {file.name for file in folder.iterdir()} == {
        "model.safetensors",
        f"{b'a'.hex()}{SUFFIX}",
    }
    assert (folder / "model.safetensors").stat().st_size == 50_000
    assert disk.nbytes < 12_000


def test_only_the_owner_can_read_what_clients_sent(llama: Llama, folder: pathlib.Path):
    served(llama, folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_folder_that_was_deleted_holds_nothing_and_is_made_again(folder: pathlib.Path):
    disk = PrefixFolder(folder, PLENTY)
    shutil.rmtree(folder)
    assert disk.nbytes == 0
    assert disk.get(b"a") is None
    disk.use([b"a"])
    disk.put([b"a"], piece(0))
    disk.close()
    assert disk.nbytes > 10_000
    assert disk.get(b"a") is not None
