"""Compiled programs are kept between runs: where, how long, and not if the user decides
otherwise."""

import pathlib
import pwd
import warnings
from collections import Counter
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from kvq_jax.files.user_cache import cache_folder
from kvq_tools.cli import compilation_cache
from kvq_tools.cli.main import main

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture
def no_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A process that keeps no programs yet. Returns the user's cache folder."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    jax_cache.reset_cache()
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "user"))
    yield tmp_path / "user"
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


def test_programs_are_kept_in_the_users_cache_folder_up_to_a_bound(
    no_cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    assert compilation_cache.described() == "none: every run compiles anew"
    monkeypatch.setattr(compilation_cache, "MIN_SECONDS", 0.0)
    compilation_cache.begin()
    assert compilation_cache.folder().is_relative_to(no_cache)
    assert compilation_cache.described().startswith("0 compiled programs"), (
        compilation_cache.described()
    )
    jax.jit(lambda x: jnp.sin(x) * 3.25)(jnp.ones(7)).block_until_ready()
    count, line = int(compilation_cache.described().split()[0]), compilation_cache.described()
    assert count >= 1, "the program was not kept"
    assert f"of at most 1024 MiB, in {compilation_cache.folder()}" in line, line


def test_a_damaged_program_is_replaced(
    no_cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(compilation_cache, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    compilation_cache.begin()
    warnings.simplefilter("always")

    def compiled() -> dict[str, bytes]:
        jax.clear_caches()
        jax.jit(lambda x: jnp.cos(x) * 4.5)(jnp.ones(7)).block_until_ready()
        files = compilation_cache.folder().glob("*-cache")
        return {file.name: file.read_bytes() for file in files}

    kept = compiled()
    assert kept
    for name in kept:
        (compilation_cache.folder() / name).write_bytes(b"damaged")
    again = compiled()
    assert set(again) == set(kept)
    assert b"damaged" not in again.values(), "a damaged program is found in every run"
    line = "kvq: warning: a compiled program that was kept is damaged, and is compiled anew\n"
    assert capsys.readouterr().err == line * len(kept)
    assert compiled() == again


def test_a_program_that_a_full_disk_cut_off_does_not_keep_others_out(
    no_cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compilation_cache, "MIN_SECONDS", 0.0)
    folder = compilation_cache.folder()
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    (folder / "jit_cut-0-cache").write_bytes(b"cut")  # and no jit_cut-0-atime
    compilation_cache.begin()
    jax.jit(lambda x: jnp.sin(x) * 5.25)(jnp.ones(7)).block_until_ready()
    assert list(folder.glob("*-cache"))
    assert not (folder / "jit_cut-0-cache").exists()


def test_a_cache_that_the_user_chose_stays(no_cache: pathlib.Path):
    jax.config.update("jax_compilation_cache_dir", str(no_cache / "own"))
    compilation_cache.begin()
    assert jax.config.jax_compilation_cache_dir == str(no_cache / "own")


def test_a_folder_that_cannot_be_made_is_no_error(no_cache: pathlib.Path):
    no_cache.write_text("a file")
    compilation_cache.begin()
    assert jax.config.jax_compilation_cache_dir is None


def test_a_user_without_a_home_has_a_cache_folder_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch,
):
    for name in ("HOME", "XDG_CACHE_HOME", "KVQ_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # KeyError for every user
    assert cache_folder() == pathlib.Path("/nonexistent/.cache/kvq")


@pytest.mark.parametrize(("words", "kept"), [([], True), (["--no-compilation-cache"], False)])
def test_the_command_keeps_programs_unless_told_otherwise(
    words: list[str], kept: bool, no_cache: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["doctor", "embedded", *words]) == 0
    assert (jax.config.jax_compilation_cache_dir is not None) == kept
    printed = capsys.readouterr().out
    assert ("compiled programs" in printed) == kept, printed
    assert ("every run compiles anew" in printed) != kept, printed


def test_the_second_generate_compiles_nothing(
    bare: pathlib.Path,
    no_cache: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Programs are kept however fast the machine compiles them, so that the counts are exact.

    What a process compiled is forgotten between the runs.
    """
    monkeypatch.setattr(compilation_cache, "MIN_SECONDS", 0.0)
    counts: Counter[str] = Counter()

    def count(event: str, amount: float = 1, **_: str):
        counts.update({event.rpartition("/")[2]: amount})

    ids = ",".join(map(str, range(10, 40)))
    cache = "kivi:bits=2,recent=8,block=8,group_size=8"
    request = ("generate", str(bare), "--prompt-ids", ids, "--cache", cache)

    def generate() -> tuple[str, Counter[str]]:
        jax.clear_caches()
        counts.clear()
        assert main([*request, "--max-new-tokens", "8"]) == 0
        return capsys.readouterr().out.splitlines()[0], counts.copy()

    jax.monitoring.register_event_listener(count)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        text, first = generate()
        kept = len(list(no_cache.rglob("*-cache")))
        again, second = generate()
    finally:
        jax.monitoring.unregister_event_listener(count)
        jax.monitoring.unregister_event_duration_listener(count)
    assert text == again
    assert kept >= 2, "neither the prompt's program nor that of the loop was kept"
    assert first["cache_misses"] == kept, f"{kept} programs are on disk: {first}"
    assert second["cache_hits"] == kept, f"{kept} programs are on disk: {second}"
    assert not second["cache_misses"], f"programs are compiled again: {second}"


def test_a_folder_that_others_can_write_is_not_used(
    no_cache: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    compilation_cache.begin()
    folder = compilation_cache.folder()
    assert folder.stat().st_mode & 0o077 == 0, "a new folder is the user's alone"
    assert jax.config.jax_compilation_cache_dir == str(folder)
    jax.config.update("jax_compilation_cache_dir", None)
    folder.chmod(0o777)
    compilation_cache.begin()
    assert jax.config.jax_compilation_cache_dir is None
    line = f"kvq: warning: compiled programs are not kept: others can write {folder}; chmod go-w"
    assert capsys.readouterr().err.startswith(line)
