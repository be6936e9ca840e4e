import pytest

from streamrl.inspection.dashboard.server import HEADERS, may_read, may_write
from streamrl.schemas.hosts import is_own_host

OURS = {"Host": "127.0.0.1:8470", "Origin": "http://127.0.0.1:8470", "Content-Type": "application/json"}


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8470", "localhost", "LOCALHOST:1", "[::1]:8470", "10.0.0.7:80", "box:8470"]
)
def test_our_own_names_are_served(host: str) -> None:
    assert is_own_host(host, "box")


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:8470", "localhost.evil.example", "127.0.0.1.evil.example"]
)
def test_a_foreign_page_cannot_read_or_write(host: str) -> None:
    assert not is_own_host(host, "127.0.0.1")
    assert not may_write({**OURS, "Origin": f"http://{host}"})


def test_a_write_needs_our_origin_and_a_body_no_form_can_send() -> None:
    assert may_write(OURS)
    assert may_write({**OURS, "Sec-Fetch-Site": "same-origin"})
    assert not may_write({**OURS, "Sec-Fetch-Site": "cross-site"})
    assert not may_write({**OURS, "Content-Type": "text/plain"})
    assert not may_write({name: value for name, value in OURS.items() if name != "Origin"})
    assert not may_write({**OURS, "Origin": "null"})


def test_the_page_loads_nothing_from_elsewhere() -> None:
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "http" not in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize("path", ["/api/trajectory", "/api/updates", "/page/main.js", "/"])
def test_a_foreign_page_starts_no_work(site: str, path: str) -> None:
    image = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    link = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    frame = {**link, "Sec-Fetch-Dest": "iframe"}
    assert not may_read(image, path)
    assert not may_read(frame, path)
    assert may_read(link, path) == (path == "/")


@pytest.mark.parametrize("headers", [{}, {"Sec-Fetch-Site": "none"}, {"Sec-Fetch-Site": "same-origin"}])
def test_our_own_page_and_a_person_may_ask(headers: dict[str, str]) -> None:
    assert may_read(headers, "/api/trajectory")
