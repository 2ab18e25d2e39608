"""The socket of a server, which is bound before a model is loaded."""

from __future__ import annotations

import socket


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet. Port 0 picks a free port. Raises OSError if
    the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
