"""A run as a user starts it: `streamrl run` as a process, its output, its children and what it leaves behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.deploy.local.supervisor import CRASHED_AT_STOP
from tests.progress import calm_s

CLI = [sys.executable, "-m", "streamrl"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
PATIENCE_S = 240.0
EMULATED: dict[str, dict[str, Any]] = {
    "loop": {"max_completion_length": 1000, "bucket_boundaries": [500]},
    "generation": {"engine": "emulated"},
    "training": {"backend": "emulated"},
    "emulation": {"time_scale": 10.0},
}
"""Where processes come and go, and not what they compute, is looked at: these start in a third of the time, and make
a few steps a second, since a run as fast as it can go takes a processor from all tests beside it."""


def write_config(directory: Path, model: Path, name: str, /, **sections: dict[str, Any]) -> Path:
    """A small run on a tiny model; ``sections`` override keys."""
    settings: dict[str, dict[str, Any]] = {
        "run": {"name": name, "directory": str(directory), "workers": 2},
        "model": {"path": str(model)},
        "data": {"path": str(directory / "prompts.jsonl")},
        "rewards": {"functions": ["tests.pipeline.letter_reward:share_of_a"]},
        "loop": {
            "groups_per_step": 4,
            "num_generations": 4,
            "max_staleness": 3,
            "max_completion_length": 12,
            "bucket_boundaries": [6],
            "heartbeat_timeout_s": 5.0,
        },
        "generation": {"max_num_seqs": 32},
        "training": {"max_steps": 12, "learning_rate": 1e-3, "checkpoint_every": 4, "threads": 1},
    }
    for section, keys in sections.items():
        settings.setdefault(section, {}).update(keys)
    if settings["loop"].get("mode", "trajectory_async") != "trajectory_async":
        del settings["loop"]["max_staleness"]
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(200)))
    lines = []
    for section, keys in settings.items():
        given = {key: value for key, value in keys.items() if value is not None}
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in given.items())]
    path = directory / f"{name}.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


@dataclass
class LocalRun:
    """A started run; its output goes to a file."""

    process: "subprocess.Popen[bytes]"
    output: Path
    directory: Path

    @classmethod
    def start(cls, config: Path, name: str, *arguments: str) -> "LocalRun":
        output = config.parent / f"{name}.out"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*CLI, "run", str(config), *arguments],
                stdout=file,
                stderr=file,
                env={**os.environ, **ENVIRONMENT},
            )
        return cls(process, output, config.parent / name)

    def text(self) -> str:
        return self.output.read_text()

    def pid_of(self, name: str) -> int:
        """Newest pid of a child."""
        return int(re.findall(rf"process={name} pid=(\d+)|pid=(\d+) process={name}\b", self.text())[-1][0])

    def kill_child(self, name: str) -> int:
        pid = self.pid_of(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def metrics(self) -> list[dict[str, Any]]:
        return metric_lines(self.directory / "metrics.jsonl")

    def steps(self) -> int:
        lines = metric_lines(self.directory / "metrics.jsonl", last=2)
        return int(lines[-1]["step"]) if lines else 0

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = calm_s() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.text()[-4000:]}"
            assert calm_s() < deadline, f"no {what} in {PATIENCE_S} s:\n{self.text()[-4000:]}"
            time.sleep(0.1)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return found

    def end(self) -> None:
        """Make sure that nothing is left running, whatever the test did."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.returncode != CRASHED_AT_STOP, self.text()[-4000:]


def metric_lines(path: Path, last: int | None = None) -> list[dict[str, Any]]:
    """Those lines of a run's metrics that are written to their end; ``last``: of so many at the end of the file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines[-(last or len(lines)) :] if line.endswith("}")]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
