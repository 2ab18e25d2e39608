"""Which sources count, and which compiler is taken."""

import pathlib
import runpy
import sys
from typing import Any

import pytest
import setuptools

from cpu_kernels import sources

ROOT = pathlib.Path(__file__).parents[2]


def test_files_that_editors_leave_change_no_digest(tmp_path: pathlib.Path):
    (tmp_path / "one.cc").write_text("int one;")
    (tmp_path / "two.h").write_text("int two;")
    before = sources.digest(tmp_path)
    (tmp_path / ".#one.cc").symlink_to("nobody@nowhere.1")  # Emacs, while a file is changed
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / "three.cc").mkdir()
    for name in (".one.cc.swp", "._one.cc", "one.cc~", "one.cc.orig"):
        (tmp_path / name).write_text("more")
    assert [file.name for file in sources.sources(tmp_path)] == ["one.cc", "two.h"]
    assert sources.digest(tmp_path) == before
    (tmp_path / "two.h").write_text("int three;")
    assert sources.digest(tmp_path) != before
    assert not sources.sources(tmp_path / "missing")


@pytest.fixture
def building(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what setup.py defines."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.chdir(ROOT)
    return runpy.run_path("setup.py")


def test_a_compiler_may_have_arguments_and_one_that_is_missing_is_named(
    building: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'two words'")
    assert building["compiler"]() == [sys.executable, "-c", "two words"]
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(FileNotFoundError, match=r"no-such-compiler, which \$CXX names"):
        building["compiler"]()
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="no C\\+\\+ compiler"):
        building["compiler"]()
