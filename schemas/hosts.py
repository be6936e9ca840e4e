"""Which names a server of ours answers to: the defence against DNS rebinding, the same for every door."""

from ipaddress import ip_address


def is_our_host(host: str, served: str) -> bool:
    """Whether a request's Host header names us: an address (no name can be rebound to it), localhost, or ``served``."""
    # Without the port; an IPv6 address ends with a bracket and has colons of its own.
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
    """Whether only this machine reaches what listens there."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
