"""The jar cache against a real repository server on loopback."""

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from streamrl.bus.embedded.jars import Jar, class_path, download, locked_jars, missing_jars
from streamrl.bus.embedded.node import free_ports
from streamrl.bus.embedded.runtime import prepare
from streamrl.schemas.errors import BrokerError


class Repository(SimpleHTTPRequestHandler):
    """Serves ``directory``; the first answer for each path in ``cut`` breaks off."""

    cut: set[str] = set()

    def do_GET(self) -> None:
        if self.path in self.cut:
            self.cut.discard(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "3")
            self.end_headers()
            self.wfile.write(b"cut")
        else:
            super().do_GET()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def jars() -> tuple[Jar, ...]:
    return tuple(sorted(locked_jars(), key=lambda jar: jar.size)[:4])


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, jars: tuple[Jar, ...]) -> Iterator[str]:
    root = tmp_path_factory.mktemp("repository")
    cached = {path.name: path for path in prepare(lambda line: None).class_path}
    for jar in jars:
        group, artifact, version = jar.coordinate.split(":")
        place = root / group.replace(".", "/") / artifact / version / jar.file_name
        place.parent.mkdir(parents=True)
        place.write_bytes(cached[jar.file_name].read_bytes())
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Repository, directory=str(root))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def take_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def point_jgo_at(address: str) -> None:
        settings = tmp_path / "jgo.conf"
        settings.write_text(f"[repositories]\ncentral = {address}\n")
        monkeypatch.setenv("JGO_CONFIG_FILE", str(settings))

    return point_jgo_at


def test_the_lock_names_every_jar_once() -> None:
    names = [jar.file_name for jar in locked_jars()]
    assert len(names) == len(set(names)) == 46
    assert "kafka_2.13-4.3.1.jar" in names


def test_a_download_brings_whole_jars_and_leaves_nothing_else(
    jars: tuple[Jar, ...],
    repository: str,
    take_from: Callable[[str], None],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    take_from(repository)
    told: list[str] = []
    folder = tmp_path / "jars"
    download(jars, folder, told.append)
    assert sorted(path.name for path in folder.iterdir()) == sorted(jar.file_name for jar in jars)
    assert all(jar.is_whole(folder / jar.file_name) for jar in jars)
    assert "4/4 jars" in told[-1]
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("jgo").level == logging.NOTSET


def test_a_damaged_jar_is_missing_and_is_mended(
    jars: tuple[Jar, ...], repository: str, take_from: Callable[[str], None], tmp_path: Path
) -> None:
    take_from(repository)
    folder = tmp_path / "jars"
    download(jars, folder, lambda line: None)
    damaged = folder / jars[0].file_name
    damaged.write_bytes(bytes(jars[0].size))
    missing = missing_jars(folder)
    assert jars[0] in missing
    assert jars[1] not in missing
    download((jars[0],), folder, lambda line: None)
    assert jars[0] not in missing_jars(folder)


def test_a_download_that_breaks_off_is_tried_again(
    jars: tuple[Jar, ...], repository: str, take_from: Callable[[str], None], tmp_path: Path
) -> None:
    take_from(repository)
    group, artifact, version = jars[1].coordinate.split(":")
    path = f"/{group.replace('.', '/')}/{artifact}/{version}/{jars[1].file_name}"
    Repository.cut.add(path)
    download((jars[1],), tmp_path, lambda line: None)
    assert path not in Repository.cut
    assert jars[1].is_whole(tmp_path / jars[1].file_name)


def test_without_network_and_cache_one_line_says_what_to_do(take_from: Callable[[str], None], tmp_path: Path) -> None:
    (closed,) = free_ports(1)
    take_from(f"http://127.0.0.1:{closed}")
    with pytest.raises(BrokerError, match=r"copy that folder .* or set kafka\.bootstrap_servers") as caught:
        download(locked_jars()[:2], tmp_path / "jars", lambda line: None)
    assert "\n" not in str(caught.value)


def test_the_class_path_keeps_the_order_of_the_lock(tmp_path: Path) -> None:
    assert [path.name for path in class_path(tmp_path)] == [jar.file_name for jar in locked_jars()]
