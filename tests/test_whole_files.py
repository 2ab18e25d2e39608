"""Nothing of ours writes a file in place: after a kill, what stood there stands there still."""

import ast
import os
import pathlib
import re
import stat

import pytest

from kvq_jax.files import whole

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = (
    *("cpu_kernels", "pallas_kernels", "kvq_jax", "models/kvq_models", "kvq_tools"),
    *("benchmarks", "kvq_hosts", "laboratory", "tools"),
)
WRITERS = {
    *("write_text", "write_bytes", "save_file", "savefig"),
    *("copyfile", "savez", "tofile"),
}
WRITING = re.compile(r"[wx]b?\+?|[ra]b?\+")  # what `open` is told; journals append
LEFT_OUT = (
    "benchmarks/faults/",  # writes files as a fault leaves them
    "laboratory/tests/",
)
MANAGERS = {"replacing", "replacing_directory", "TemporaryDirectory"}
ELSEWHERE = {  # what calls them wrote elsewhere first
    ("kvq_tools/report/drawing.py", "savefig"),  # to memory
    ("kvq_jax/files/checksum.py", "save_file"),  # to an unfinished file that its caller moves
    # to a build folder that is made anew each time, in an environment without kvq
    ("tools/documentation.py", "write_text"),
    ("tools/documentation.py", "copyfile"),
}


def called(node: ast.AST) -> str:
    """Return the last name of what is called; "" for no call."""
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", ""))


def in_place(tree: ast.Module) -> list[tuple[int, str]]:
    """Return (line, name) of each call of a writer outside a `with` that writes elsewhere first."""
    whole = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        and any(called(item.context_expr) in MANAGERS for item in node.items)
        for inner in ast.walk(node)
    }
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and writes(node))
    return [(node.lineno, called(node)) for node in calls if node not in whole]


def writes(call: ast.Call) -> bool:
    """Return whether what is called writes a file."""
    values = (*call.args, *(keyword.value for keyword in call.keywords))
    texts = [v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
    opens = called(call) == "open" and any(map(WRITING.fullmatch, texts))
    return opens or called(call) in WRITERS


def test_every_file_is_written_whole_or_not_at_all():
    found, files = [], 0
    for file in (file for folder in SOURCES for file in sorted((ROOT / folder).rglob("*.py"))):
        name = file.relative_to(ROOT).as_posix()
        if name.startswith(LEFT_OUT):
            continue
        files += 1
        calls = in_place(ast.parse(file.read_text(encoding="utf-8")))
        found += [f"{name}:{line}: {call}" for line, call in calls if (name, call) not in ELSEWHERE]
    assert files > 150, "the sources were not there"
    assert not found, f"kvq_jax/files/whole.py has what writes these whole: {found}"


def test_a_pipe_stays_a_pipe(tmp_path: pathlib.Path):
    """As a device does: a rename would put a file in the place of /dev/null, for all processes."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match=r"Is a device or a pipe, not a file: .*pipe"):
        whole.write(pipe, "content")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


def test_an_empty_name_and_the_current_folder_are_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """A process whose current folder is replaced stays in the old one, which nobody can reach."""
    (here := tmp_path / "here").mkdir()
    (here / "notes").write_text("mine")
    monkeypatch.chdir(here)
    for name in ("", ".", str(here)):
        with (
            pytest.raises(OSError, match=r"The name is empty|current folder, which cannot"),
            whole.replacing_directory(name),
        ):
            pass
        with pytest.raises(OSError, match=r"The name is empty|Is a directory, not a file"):
            whole.write(name, "content")
    assert os.listdir() == ["notes"]
    assert list(tmp_path.iterdir()) == [here]


def test_a_link_to_a_file_stays_a_link(tmp_path: pathlib.Path):
    (tmp_path / "disk").mkdir()
    link, file = tmp_path / "newest", tmp_path / "disk" / "file"
    file.write_text("old")
    link.symlink_to(file)
    whole.write(link, "new")
    assert link.is_symlink()
    assert file.read_text() == "new"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_a_file_that_is_replaced_keeps_its_mode(mode: int, tmp_path: pathlib.Path):
    file = tmp_path / "conversation"
    file.write_text("old")
    file.chmod(mode)
    with whole.replacing(file) as unfinished:
        unfinished.write_text("new")
        readable = unfinished.parent.stat().st_mode & stat.S_IROTH
        assert bool(readable) == (mode == 0o755), "others could read the new content"
    assert file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == mode


def test_a_directory_that_is_replaced_and_its_files_keep_their_modes(tmp_path: pathlib.Path):
    (tmp_path / "model" / "logs").mkdir(parents=True)
    modes = {"model": 0o700, "model/logs": 0o750, "model/weights": 0o600, "model/logs/first": 0o640}
    (tmp_path / "model" / "weights").touch()
    (tmp_path / "model" / "logs" / "first").touch()
    for name, mode in modes.items():
        (tmp_path / name).chmod(mode)
    with whole.replacing_directory(tmp_path / "model") as unfinished:
        (unfinished / "logs").mkdir()
        for name in ("weights", "added", "logs/first"):
            (unfinished / name).write_text("new")
    (tmp_path / "plain").touch()
    plain = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    kept = {
        path.relative_to(tmp_path).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in tmp_path.rglob("*")
    }
    assert kept == modes | {"model/added": plain, "plain": plain}
    assert (tmp_path / "model" / "weights").read_text() == "new"
