"""Kafka's jars: a locked list, a verified copy in the cache, and jgo to download missing jars.

Invariant: every file on the class path has the SHA-256 in the lock.

When Kafka's version changes, ``python -m bus.embedded.jars > new.lock`` resolves and prints a new lock: coordinate,
SHA-256 and size in bytes, one jar per line. Move it to ``kafka.lock`` here.
"""

import hashlib
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streamrl.schemas.errors import BrokerError
from streamrl.schemas.extras import require_extra
from streamrl.schemas.files import sha256_of

KAFKA_VERSION = "4.3.1"
LOCK_FILE = Path(__file__).with_name("kafka.lock")
ATTEMPTS = 3
PARALLEL_DOWNLOADS = 8
TIMEOUT_S = 30
MEGABYTE = 1_000_000
REPORT_EVERY = 5 * MEGABYTE

# The lock is resolved from these. kafka-clients is listed because jgo would otherwise choose an older version, with
# which the broker does not start.
ROOTS = (
    f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}",
    f"org.apache.kafka:kafka-clients:{KAFKA_VERSION}",
    "org.apache.logging.log4j:log4j-slf4j2-impl:2.25.1",
)

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Jar:
    """One line of the lock. ``coordinate`` is group:artifact:version, ``size`` is in bytes."""

    coordinate: str
    sha256: str
    size: int

    @property
    def file_name(self) -> str:
        """The jar's name in a Maven repository: artifact-version.jar."""
        _, artifact, version = self.coordinate.split(":")
        return f"{artifact}-{version}.jar"

    def is_whole(self, path: Path) -> bool:
        """Whether the file at ``path`` is this jar, byte for byte."""
        try:
            # The size first: an incomplete download is found without hashing.
            return path.stat().st_size == self.size and sha256_of(path) == self.sha256
        except OSError:
            return False


def locked_jars() -> tuple[Jar, ...]:
    """The jars of the lock, in class-path order."""
    rows = (line.split() for line in LOCK_FILE.read_text().splitlines())
    return tuple(Jar(coordinate, sha256, int(size)) for coordinate, sha256, size in rows)


def missing_jars(folder: Path) -> tuple[Jar, ...]:
    """The locked jars that are missing or damaged in ``folder``; takes about 0.05 s for all jars."""
    return tuple(jar for jar in locked_jars() if not jar.is_whole(folder / jar.file_name))


def class_path(folder: Path) -> tuple[Path, ...]:
    """Paths of the locked jars in a complete ``folder``."""
    return tuple(folder / jar.file_name for jar in locked_jars())


def download(jars: tuple[Jar, ...], folder: Path, progress: Progress) -> None:
    """Downloads ``jars`` into ``folder``; each appears there only when complete. The caller holds the cache's lock.

    Raises BrokerError, with one line that says what to do, if a jar cannot be downloaded, and SettingsError if
    the package that downloads is not installed.
    """
    require_extra("local", f"the download of Kafka {KAFKA_VERSION}", "jgo")
    # Inside the folder, so that moving a complete jar is one rename on one file system.
    incoming = folder / "incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(parents=True)
    meter = _Meter(len(jars), sum(jar.size for jar in jars), progress)
    try:
        with _quiet("jgo"), _quiet("urllib3"), ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool:
            pending = [pool.submit(_download_one, jar, folder, incoming, meter) for jar in jars]
            try:
                for done in as_completed(pending):
                    done.result()
            except BaseException:
                # One failed jar is enough: downloads that have not started would only delay the message.
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    except (OSError, RuntimeError, AssertionError) as error:  # requests' errors are OSErrors
        reason = str(error)[:160] if isinstance(error, RuntimeError) else type(error).__name__
        raise BrokerError(
            f"Kafka {KAFKA_VERSION} is incomplete in the cache {folder} and could not be downloaded ({reason}): "
            "connect to a network, copy that folder from a machine that has it, "
            "or set kafka.bootstrap_servers to a running broker"
        ) from error
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def _download_one(jar: Jar, folder: Path, incoming: Path, meter: "_Meter") -> None:
    from jgo.config import GlobalSettings  # imported late: a warm start needs no jgo
    from jgo.constants import MAVEN_CENTRAL_URL
    from jgo.maven import MavenContext, PythonResolver

    remotes = {"central": MAVEN_CENTRAL_URL, **GlobalSettings.load().repositories}
    for attempt in range(ATTEMPTS):
        context = MavenContext(
            resolver=PythonResolver(progress_callback=meter.watch),
            # A folder for each attempt: jgo would reuse the damaged file of the last attempt.
            repo_cache=incoming / f"{attempt}",
            remote_repos=remotes,
            timeout=TIMEOUT_S,
        )
        try:
            fetched = context.create_dependency(jar.coordinate).artifact.resolve()
        except (OSError, RuntimeError):
            if attempt + 1 == ATTEMPTS:
                raise
            continue
        if jar.is_whole(fetched):
            os.replace(fetched, folder / jar.file_name)
            meter.finish()
            return
    raise RuntimeError(f"{jar.file_name} arrived {ATTEMPTS} times with a SHA-256 other than the lock's")


class _Meter:
    """Counts jars and bytes of all download threads, and reports every ``REPORT_EVERY`` bytes."""

    def __init__(self, jars: int, size: int, progress: Progress) -> None:
        self._jars, self._size, self._progress = jars, size, progress
        self._done = self._bytes = self._shown = 0
        self._guard = threading.Lock()

    @contextmanager
    def watch(self, file_name: str, size: int) -> Iterator[Callable[[int], None]]:
        yield self._add

    def _add(self, count: int) -> None:
        # jgo calls this from every download thread.
        with self._guard:
            self._bytes += count
            if self._bytes - self._shown >= REPORT_EVERY:
                self._report()

    def finish(self) -> None:
        with self._guard:
            self._done += 1
            if self._done == self._jars:
                self._report()

    def _report(self) -> None:
        self._shown = self._bytes
        self._progress(
            f"downloading Kafka {KAFKA_VERSION}: {self._done}/{self._jars} jars, "
            f"{self._bytes / MEGABYTE:.0f}/{self._size / MEGABYTE:.0f} MB"
        )


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    # Above all levels: after the last attempt, this module reports a failure in one line.
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def locked_lines(repository: Path) -> list[str]:
    """The lock's lines, sorted; jars and poms are downloaded into ``repository``."""
    from jgo.maven import MavenContext

    context = MavenContext(repo_cache=repository)
    inputs, transitive = context.resolver.resolve([context.create_dependency(root) for root in ROOTS])
    needed = [*inputs, *(each for each in transitive if each.scope in ("compile", "runtime"))]
    lines = []
    for artifact in (each.artifact for each in needed):
        content = artifact.resolve().read_bytes()
        coordinate = f"{artifact.groupId}:{artifact.artifactId}:{artifact.version}"
        lines.append(f"{coordinate} {hashlib.sha256(content).hexdigest()} {len(content)}")
    return sorted(lines)  # sorted, so that a new lock differs from the old one only where jars do


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sys.stdout.write("\n".join(locked_lines(Path(scratch))) + "\n")
