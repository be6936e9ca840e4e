"""A Docker engine that answers, and the compose file on it: for tests of what only real containers show."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.compose.stack import FILE, ROOT

PORTS = ("KAFKA", "UI", "KAFKA_UI", "PROMETHEUS", "GRAFANA", "JAEGER", "GATEWAY")


def why_not() -> str:
    """Why there is no engine to test on; empty if there is one."""
    try:
        done = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            return f"no Docker engine answers: {done.stderr.strip().splitlines()[-1:]}"
        subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no Docker engine with Compose: {error}"
    return ""


def docker(*arguments: str) -> list[str]:
    """What a command of the engine printed, word by word."""
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout.split()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


@dataclass
class Compose:
    """The compose file under a project of its own, on ports that are free. ``variables``: what the shell would have."""

    project: str
    variables: dict[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=lambda: dict(zip(PORTS, _free_ports(len(PORTS)), strict=True)))

    def __call__(
        self, *arguments: str, timeout_s: float = 600, check: bool = True, profiles: Sequence[str] = ()
    ) -> str:
        """Run a command of Compose; what it printed."""
        named = [word for profile in profiles for word in ("--profile", profile)]
        command = ["docker", "compose", "--file", str(FILE), "--project-name", self.project, *named, *arguments]
        ports = {f"STREAMRL_{name}_PORT": str(port) for name, port in self.ports.items()}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("STREAMRL_")}
        done = subprocess.run(
            command, env=clean | ports | self.variables, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
        )
        said = done.stdout + done.stderr
        if check and done.returncode and arguments[0] == "up":
            said += self("logs", "--tail", "5", check=False)
        assert not check or done.returncode == 0, f"{' '.join(arguments)}: {done.returncode}\n{said[-4000:]}"
        return said

    def containers(self, service: str) -> list[dict[str, Any]]:
        """What the engine says of each container of a service."""
        names = self("ps", "--all", "--quiet", service).split()
        if not names:
            return []
        found = subprocess.run(["docker", "inspect", *names], capture_output=True, text=True, check=True).stdout
        inspected: list[dict[str, Any]] = json.loads(found)
        return inspected

    def codes(self, service: str) -> list[int | None]:
        """Exit codes of a service's containers; None: it runs."""
        states = [container["State"] for container in self.containers(service)]
        return [None if state["Running"] or state["Restarting"] else state["ExitCode"] for state in states]

    def ended(self, *services: str, within_s: float) -> dict[str, list[int | None]]:
        """Wait until all containers of these services have ended; their exit codes."""
        deadline = time.monotonic() + within_s
        while True:
            codes = {service: self.codes(service) for service in services}
            if all(code is not None for each in codes.values() for code in each):
                return codes
            assert time.monotonic() < deadline, f"{codes}\n{self('logs', '--tail', '8', check=False)[-6000:]}"
            time.sleep(2)

    def crash(self, service: str, number: int = 1) -> None:
        """End a container as the kernel does when memory runs out, so that the engine restarts it as the file says."""
        first = self.containers(service)[number - 1]["State"]["Pid"]
        try:
            os.kill(first, signal.SIGKILL)
        except (PermissionError, ProcessLookupError):
            # Not ours to kill, or of an engine elsewhere. What is killed by command stays down until it is started.
            self("kill", service)
            self("start", service)

    def until_step(self, step: int, within_s: float) -> int:
        """Wait until the run says that a step was taken; the step."""
        deadline = time.monotonic() + within_s
        while True:
            said = self("logs", "--no-log-prefix", "run", check=False)
            taken = max((int(number) for number in re.findall(r"step\s+(\d+)", said)), default=0)
            if taken >= step:
                return taken
            assert time.monotonic() < deadline, f"at step {taken}\n{self('logs', '--tail', '8', check=False)[-6000:]}"
            time.sleep(1)

    def processor_s(self, service: str) -> float:
        """Processor time that the one container of a service has taken so far, in seconds."""
        said = self("exec", "--no-TTY", service, "cat", "/sys/fs/cgroup/cpu.stat", check=False)
        if found := re.search(r"usage_usec (\d+)", said):
            return int(found[1]) / 1e6
        return int(self("exec", "--no-TTY", service, "cat", "/sys/fs/cgroup/cpuacct/cpuacct.usage").split()[-1]) / 1e9

    def fetch(self, into: Path) -> Path:
        """Copy the runs out of their volume, as the README says; where they are."""
        self("cp", "run:/runs", str(into))
        return into / "runs"
