"""The gateway's socket, in a module of its own: a run checks that its port is free without loading a web server."""

import socket

from streamrl.schemas.errors import UserError

BACKLOG = 2048
"""Connections that may wait to be accepted: a thousand requesters may come at once."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an address; port 0 takes a free port.

    Raises:
        UserError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UserError(
            f"expected a free port for the gateway, cannot listen on {host}:{port} ({error.strerror}); choose another "
            "port with --gateway.port, or an address of this machine with --gateway.host"
        ) from error
