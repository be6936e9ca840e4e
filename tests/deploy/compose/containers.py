"""The services of the compose file as processes of this machine: the same entry point, arguments and environment.

What a container would have is replaced by what this machine has, and nothing else: paths of mounts by directories,
names of services and their ports by loopback addresses.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.compose.stack import IMAGES, services
from tests.progress import calm_s

KEPT = ("PATH", "HOME", "LANG", "STREAMRL_CACHE")


@dataclass
class Containers:
    """``replaced``: what stands in the file, and what stands there here. Every container is one process."""

    variables: Mapping[str, str]
    replaced: Mapping[str, str]
    logs: Path
    bin: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, service: str, number: int = 1) -> None:
        """Start one container of a service."""
        described, name = services(self.variables)[service], f"{service}-{number}"
        environment = {key: os.environ[key] for key in KEPT if key in os.environ}
        environment |= {key: self._here(value) for key, value in described["environment"].items()}
        environment |= {"PATH": f"{self.bin}:{environment['PATH']}", "HOSTNAME": "127.0.0.1"}
        environment |= {"OMP_NUM_THREADS": "1"}
        with (self.logs / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                [IMAGES / "entrypoint.sh", *(self._here(word) for word in described["command"])],
                cwd=self._mounted(described, described["working_dir"]),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def healthy(self, service: str, deadline: float) -> None:
        """Wait until the service's own health check succeeds."""
        described = services(self.variables)[service]
        check = [self._here(word) for word in described["healthcheck"]["test"][1:]]
        while subprocess.run([self.bin / check[0], *check[1:]], capture_output=True, check=False).returncode:
            self._alive(deadline, f"{service} is not healthy")

    def ended(self, name: str, deadline: float) -> int:
        """Wait for a container's end; its exit code."""
        while self.running[name].poll() is None:
            self._alive(deadline, f"{name} goes on", but=name)
        return self.running[name].returncode

    def stop(self, name: str, deadline: float) -> int:
        """What `docker compose stop` does; the exit code."""
        self.running[name].send_signal(signal.SIGTERM)
        return self.ended(name, deadline)

    def remove(self) -> None:
        """End what still runs."""
        for process in self.running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def said(self, name: str) -> str:
        """The log of a container."""
        return (self.logs / f"{name}.log").read_text()

    def _alive(self, deadline: float, what: str, but: str = "") -> None:
        assert calm_s() < deadline, f"{what}\n{self._tails()}"
        failed = {name: process.returncode for name, process in self.running.items() if process.poll()}
        assert not failed, f"{failed}\n{self._tails()}"
        time.sleep(0.1)

    def _tails(self) -> str:
        return "\n".join(f"--- {name}\n{self.said(name)[-1500:]}" for name in self.running)

    def _here(self, text: str) -> str:
        """In one pass: a port must not be found again in an address that was put in, nor inside a longer number."""
        found = "|".join(rf"(?<!\d){re.escape(there)}(?!\d)" for there in self.replaced)
        return re.sub(found, lambda match: self.replaced[match[0]], text)

    def _mounted(self, service: dict[str, Any], path: str) -> Path:
        """The directory of this machine that is mounted at a container's path."""
        (source,) = [mount.split(":")[0] for mount in service["volumes"] if mount.split(":")[1] == path]
        return Path(self._here(source))
