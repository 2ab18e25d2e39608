"""What is fetched from the Hub for an id, by a Hub of local folders."""

import pathlib
import shutil
from collections.abc import Callable
from unittest import mock

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from kvq_models.llama.checkpoint import load_llama, open_checkpoint, read_config, save_llama
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.kvq_models.gguf_files import split_gguf, write_gguf
from tests.kvq_models.llama.saved_checkpoint import refusal

Files = Callable[[], list[str]]


@pytest.fixture
def hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    """Put a Hub in place whose revisions are the folders of tmp_path / "hub" / REPOSITORY, and
    return a function that lists the files that were fetched."""

    def download(
        repository: str,
        *,
        revision: str | None,
        allow_patterns: list[str],
        ignore_patterns: list[str],
    ) -> str:
        kept = tmp_path / "hub" / repository / (revision or "main")
        if not kept.is_dir():
            raise OSError("404 Client Error\nfor url")
        names = [str(file.relative_to(kept)) for file in kept.rglob("*") if file.is_file()]
        snapshot = tmp_path / "fetched" / repository / (revision or "main")
        snapshot.mkdir(parents=True, exist_ok=True)
        for name in filter_repo_objects(
            names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(kept / name, snapshot / name)
        return str(snapshot)

    def fetched() -> list[str]:
        root = tmp_path / "fetched"
        return sorted(str(f.relative_to(root)) for f in root.rglob("*") if f.is_file())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return fetched


def stored(tmp_path: pathlib.Path, revision: str = "main") -> pathlib.Path:
    folder = tmp_path / "hub" / "some" / "model" / revision
    folder.mkdir(parents=True)
    return folder


def test_a_config_is_read_without_weights_and_no_pickle_is_fetched(tmp_path, hub: Files):
    folder = stored(tmp_path)
    save_llama(random_llama(tiny_config()), folder)
    for name in ("pytorch_model.bin", "modeling_own.py", "consolidated.safetensors", "a.pkl"):
        (folder / name).write_bytes(b"no")
    assert read_config("some/model") == read_config(folder)
    assert hub() == ["some/model/main/config.json"]
    load_llama("some/model")
    assert hub() == ["some/model/main/config.json", "some/model/main/model.safetensors"]


def test_a_revision_names_its_own_files(tmp_path, hub: Files):
    for revision, kind in (("main", "llama"), ("v1.0", "qwen2")):
        save_llama(random_llama(tiny_config(kind)), stored(tmp_path, revision))
    assert read_config("some/model@v1.0").model_type == "qwen2"
    assert read_config("some/model").model_type == "llama"
    assert "'some/model@v2' does not exist here, and the Hub answered: 404" in refusal(
        "some/model@v2"
    )


def test_a_gguf_file_of_a_repository_is_fetched_alone(tmp_path, hub: Files):
    folder = stored(tmp_path, "v1.0") / "quantized"
    folder.mkdir()
    path = write_gguf(random_llama(tiny_config()), folder / "m[1].gguf")
    shutil.copy(path, folder / "m1.gguf")
    files = open_checkpoint("some/model/quantized/m[1].gguf@v1.0")
    assert files.tensors.keys() == open_checkpoint(path).tensors.keys()
    assert hub() == ["some/model/v1.0/quantized/m[1].gguf"]


def test_all_parts_of_a_split_gguf_file_are_fetched(tmp_path, hub: Files):
    path = write_gguf(random_llama(tiny_config()), stored(tmp_path) / "m.gguf")
    parts = split_gguf(path, 3)
    files = open_checkpoint(f"some/model/{parts[0].name}")
    assert files.tensors.keys() == open_checkpoint(path).tensors.keys()
    assert hub() == [f"some/model/main/{part.name}" for part in parts]


def test_a_repository_without_the_files_is_told_in_one_line(tmp_path, hub: Files):
    write_gguf(random_llama(tiny_config()), stored(tmp_path) / "m.gguf")
    assert refusal("some/model") == (
        "'some/model' has no config.json on the Hub; name a GGUF file in it as some/model/FILE.gguf"
    )
    assert refusal("some/model/n.gguf") == "'some/model' has no file 'n.gguf' on the Hub"


@pytest.mark.parametrize(
    "name", ["some/model/../m.gguf", "some/model/.m.gguf", "some/model/m.bin", "some/model@", "a@b"]
)
def test_other_paths_are_not_asked_for(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", mock.Mock(side_effect=AssertionError))
    assert "does not exist, and is not a Hub id" in refusal(name)


def test_an_unreachable_hub_is_one_line(monkeypatch):
    assert issubclass(HfHubHTTPError, OSError), "HTTP errors would pass uncaught"
    unreachable = mock.Mock(side_effect=LocalEntryNotFoundError("no\nnetwork"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    assert "the Hub could not be reached to look for it" in refusal("some/model")
