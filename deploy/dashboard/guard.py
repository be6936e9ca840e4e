"""Who may talk to the dashboard: pages of its own address only. Pure.

Invariants, each with a test of its name:
- a_foreign_page_cannot_read_or_write: a host name that is not ours is refused (DNS rebinding), and a write needs an
  origin that is our own and a body that a form cannot send;
- the_page_loads_nothing_from_elsewhere: its content security policy forbids it.
"""

from collections.abc import Mapping
from ipaddress import ip_address

JSON = "application/json"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def is_our_host(host: str, served: str) -> bool:
    """Whether a request's Host header names us: an address (no name can be rebound to it), localhost, or ``served``."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    name = name.strip("[]").lower()
    if name in ("localhost", served.lower()):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def may_write(headers: Mapping[str, str]) -> bool:
    """Whether a request comes from our own page: same origin, and JSON, which no form of another page can send."""
    origin, host = headers.get("Origin", ""), headers.get("Host", "")
    own = origin in (f"http://{host}", f"https://{host}")
    site = headers.get("Sec-Fetch-Site", "same-origin")
    return bool(host) and own and site == "same-origin" and headers.get("Content-Type", "").split(";")[0] == JSON
