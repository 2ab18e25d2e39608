"""The socket of a server, which is bound before a model is loaded."""

from __future__ import annotations

import socket


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet, and keeps other servers from the port. Port 0
    picks a free one. Raises OSError, in one line, if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections may still be closing
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(
            f"cannot listen on port {port} of {host}: {error.strerror}; choose another --port or"
            " --host"
        ) from error
    # Linux lets several sockets with this option have a port until one of them listens.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return bound


def let_restart(bound: socket.socket) -> None:
    """Let a later server have the port while connections of this one are still closing."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
