"""Find a file on the user's Python package index: the one that pip is configured with, possibly a
mirror.

The index only says where a file is. It need not be trusted: the download is compared with a pinned
checksum.
"""

from __future__ import annotations

import ast
import base64
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from html.parser import HTMLParser
from http.client import HTTPException, HTTPResponse

from kvq_jax.files.json_text import parse_json

DEFAULT_INDEX = "https://pypi.org/simple"
TIMEOUT = 30.0  # seconds without a byte
MAX_PAGE_BYTES = 64 * 2**20  # bytes of a project's page; large projects' pages have a few million
PIP_TIMEOUT = 20.0  # seconds that pip may take to print its configuration
_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPTED = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"  # PEP 691


class FetchError(OSError):
    """A file could not be downloaded. The message is one line."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        """Take the message, and the HTTP status if a server answered."""
        super().__init__(" ".join(message.split()))
        self.status = status


class PackageIndex:
    """The indexes in the order in which they are asked, and how to reach them."""

    def __init__(self, index_url: str | None = None) -> None:
        """Use the index at `index_url`. The default is pip's: from its environment variables, else
        its configuration, else PyPI."""
        settings = {} if index_url is not None else _pip_settings()
        first = index_url or settings.get("index-url") or DEFAULT_INDEX
        self.urls = [
            first,
            *(url for url in settings.get("extra-index-url", "").split() if url.startswith("http")),
        ]
        context = ssl.create_default_context()
        if certificates := settings.get("cert"):
            context.load_verify_locations(certificates)
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))

    def find(self, project: str, file: str) -> str:
        """Return the address of a project's file. Raise FetchError if no index has it or can be
        reached."""
        errors = []
        for url in self.urls:
            page = f"{url.rstrip('/')}/{project}/"
            try:
                with self.open(page, {"Accept": _ACCEPTED}) as response:
                    address = _address(response, file)
            except FetchError as error:
                errors.append(str(error))
                continue
            if address is not None:
                return _with_credentials(address, page)
            errors.append(f"{host(page)} has no {file}")
        raise FetchError("; ".join(errors))

    def open(self, url: str, headers: dict[str, str]) -> HTTPResponse:
        """Request an address. The name and password in it, if any, go only to its host. Raise
        FetchError if the request fails."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise FetchError(f"{host(url)} is not an address of the web (http, https)")
        request = urllib.request.Request(_without_credentials(url), headers=headers)
        if parts.username is not None:
            request.add_unredirected_header(
                "Authorization", _basic(parts.username, parts.password or "")
            )
        try:
            return self._opener.open(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            error.close()
            raise FetchError(
                f"{host(url)} answers {error.code} ({error.reason})", status=error.code
            ) from error
        # ValueError: http.client refuses the address
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise FetchError(f"{host(url)} cannot be reached: {reason}") from error


def host(url: str) -> str:
    """Return the host of an address without name and password, for messages."""
    return urllib.parse.urlsplit(url).hostname or repr(url)


class _Links(HTMLParser):
    """The addresses of all links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.addresses += [value for name, value in attrs if name == "href" and value]


def _address(response: HTTPResponse, file: str) -> str | None:
    """Return the address of a file on a project's page, JSON (PEP 691) or HTML (PEP 503), or
    None."""
    try:
        page = response.read(MAX_PAGE_BYTES)
        if response.headers.get_content_type() == _JSON:
            links = {entry["filename"]: entry["url"] for entry in parse_json(page)["files"]}
        else:
            parser = _Links()
            parser.feed(page.decode("utf-8", "replace"))
            links = {
                urllib.parse.unquote(urllib.parse.urlsplit(link).path).rpartition("/")[2]: link
                for link in parser.addresses
            }
        return urllib.parse.urljoin(response.geturl(), links[file]) if file in links else None
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        raise FetchError(
            f"{host(response.geturl())} answers what is not a page of a package index"
        ) from error


def _pip_settings() -> dict[str, str]:
    """Return pip's settings by name (`index-url`): from its environment variables, else from its
    files, if pip is installed."""
    names = ("index-url", "extra-index-url", "cert")
    listed = _pip_configuration()

    def setting(name: str) -> str:
        environment = os.environ.get(f"PIP_{name.upper().replace('-', '_')}")
        return environment or listed.get(f"install.{name}") or listed.get(f"global.{name}") or ""

    return {name: setting(name) for name in names}


def _pip_configuration() -> dict[str, str]:
    """Return the output of `pip config list`: pip knows where each platform keeps its files."""
    command = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "config", "list"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PIP_TIMEOUT,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return {}  # no pip in this environment, as with uv
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    return {name: str(ast.literal_eval(value)) for name, _, value in pairs if value[:1] in "'\""}


def _basic(username: str, password: str) -> str:
    decoded = f"{urllib.parse.unquote(username)}:{urllib.parse.unquote(password)}"
    return f"Basic {base64.b64encode(decoded.encode()).decode()}"


def _without_credentials(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _with_credentials(url: str, page: str) -> str:
    """Return an address with the name and password of the page that links to it, if both are on the
    same host."""
    parts, page_parts = urllib.parse.urlsplit(url), urllib.parse.urlsplit(page)
    same = (parts.scheme, parts.netloc) == (page_parts.scheme, page_parts.netloc.rpartition("@")[2])
    return parts._replace(netloc=page_parts.netloc).geturl() if same else url
