"""The host names that this project's HTTP servers answer to: a defence against DNS rebinding, shared by all servers."""

from ipaddress import ip_address


def is_own_host(host: str, served: str) -> bool:
    """Whether a request's Host header names this server: an IP address, localhost or ``served``.

    DNS rebinding needs a name, so an address is safe.
    """
    # Remove the port. An IPv6 address without a port ends with a bracket and has colons itself.
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    name = name.strip("[]").lower()
    if name in ("localhost", served.lower()):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
