"""Refuse requests that a page of another web site makes a browser send. Browsers reach servers that
listen on their own machine only, and a name may be made to point there (DNS rebinding)."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from kvq_tools.serving import errors
from kvq_tools.serving.errors import ApiError, ErrorResponse

ANY = "*"


def known_hosts(host: str, allowed: Collection[str] = ()) -> frozenset[str]:
    """Return the names of a server that listens on `host`: those that are `allowed`, this machine's
    if others can reach it, and localhost."""
    names = {"localhost", host, *allowed}
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return frozenset(name.lower() for name in (names if local else {*names, socket.gethostname()}))


def web_origin(origin: str) -> str:
    """Return an origin as browsers send it: in small letters, and without its scheme's port."""
    origin = origin.lower()
    return origin.removesuffix(":80" if origin.startswith("http:") else ":443")


class Guard:
    """Let through requests whose Host is an address or one of `hosts`, whose Origin is this server
    or one of `origins`, and whose body is plain JSON. "*" allows any."""

    def __init__(self, app: Any, hosts: Collection[str], origins: Collection[str] = ()):
        self._app, self._hosts, self._origins = app, hosts, origins

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refusal = None
        if scope["type"] == "http":
            refusal = self._refusal(scope["method"], Headers(scope=scope))
        await (ErrorResponse(refusal) if refusal else self._app)(scope, receive, send)

    def _refusal(self, method: str, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host"), headers.get("origin")
        # only programs leave out Host, in HTTP/1.0
        if host is not None and ANY not in self._hosts and not self._knows(host):
            return errors.foreign_host(host)
        allowed = origin is None or ANY in self._origins or origin in self._origins
        if origin is not None and not allowed and _authority(origin) != (host or "").lower():
            return errors.foreign_origin(origin)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            return errors.not_json(kind)
        coding = headers.get("content-encoding", "identity").strip().lower()
        if method == "POST" and coding != "identity":
            return errors.encoded(coding)
        return None

    def _knows(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._hosts
        return True  # no name, so nobody else can make it point here


def _authority(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None
