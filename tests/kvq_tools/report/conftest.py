"""One small report for the tests of all files here. Its pictures are small, because drawing and
packing their pixels is most of a page's time."""

import contextlib
from collections.abc import Iterator

import pytest

from kvq_models import load_llama
from kvq_tools import tokenize
from kvq_tools.report import drawing, schema
from tests.kvq_tools.report.small_report import CACHES, CONTEXT, RUN, SAMPLE, STEPS, TEXT, call


@contextlib.contextmanager
def _small_pictures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "DPI", 40)
        yield


@pytest.fixture(scope="module", autouse=True)
def _small_pictures_everywhere() -> Iterator[None]:
    with _small_pictures():
        yield


@pytest.fixture(scope="session")
def made(shallow, tmp_path_factory):
    """Return a report of a small model, as the command writes it."""
    out = tmp_path_factory.mktemp("report")
    (out / "text.txt").write_text(TEXT)
    caches = [f"--cache={cache}" for cache in CACHES]
    sizes = ("--contexts", CONTEXT, "--steps", STEPS, "--sample", SAMPLE, "--out", out)
    with _small_pictures():
        assert call("report", shallow, "--text", out / "text.txt", *caches, *RUN, *sizes) == 0
    return out


@pytest.fixture(scope="session")
def report(made):
    return schema.read(made / "report.json")


@pytest.fixture(scope="session")
def model(shallow):
    llama, tokenizer = load_llama(shallow, dtype="float32")
    return llama, tokenize(tokenizer, TEXT).first(64)
