"""``python -m tests.chaos.upgrade --from COMMIT``: replace a run's processes by another version's, and back.

All begin as COMMIT has them, in a worktree of its own; then each role in turn becomes this tree's, in the order that
`docs/operations.md` names, and back in reverse. Between two replacements the run has to take steps. At the end the
books are checked by our checker and by the audit. Exit code 1 when something was lost, trained twice or stood still.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.embedded.node import free_ports
from streamrl.consumers.training.checkpoints.savepoints import Savepoints, pin
from streamrl.consumers.training.checkpoints.storage import open_storage
from streamrl.deploy.local.supervisor import CLEAN
from streamrl.settings.loading import load_settings
from streamrl.settings.placement import ProcessPlace
from streamrl.settings.run_directory import RunDirectory
from tests.chaos.campaign.quiet import quiet_logs
from tests.chaos.checking.verdict import judge
from tests.chaos.runs.setting import SECTIONS, Setting
from tests.chaos.runs.waiting import FleetFailed, tick, until
from tests.pipeline.local_run import write_config
from tests.pipeline.tiny_model import save_tiny_model

HERE = Path(__file__).parents[2]
RUN = "upgrade"
WORKERS = ("worker-0", "worker-1")
ORDER = ("coordinator", "relay", "dispatcher", "trainer", *WORKERS)
"""In which roles are replaced: readers of new words before those who write them."""
STEPS_BETWEEN = 3
PATIENCE_S, STOP_S = 300.0, 60.0
LAST_STEP = 100_000
"""Never reached: the run ends when all have been replaced."""


@dataclass
class Mixed:
    """The run's processes, each of one of two trees."""

    config: Path
    directory: RunDirectory
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    trees: dict[str, Path] = field(default_factory=dict)
    pauses: dict[str, float] = field(default_factory=dict)

    async def start(self, name: str, tree: Path) -> None:
        """Start a role as this tree has it."""
        role, *arguments = ["worker", "--id", name] if name in WORKERS else [name]
        command = [sys.executable, "-m", "streamrl.cli.app", role, str(self.config), *arguments]
        environment = {**os.environ, **ProcessPlace().environment, "PYTHONPATH": str(tree)}
        self.directory.logs.mkdir(parents=True, exist_ok=True)
        # In the tree, so that ``-m`` finds its packages first, whatever is installed.
        with self.log_of(name).open("ab") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                *command, cwd=tree, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.trees[name] = tree

    async def replace(self, name: str, tree: Path) -> None:
        """End a role cleanly and start it as this tree has it."""
        began = time.monotonic()
        await self.stop(name)
        if (name, tree) == ("trainer", HERE):
            self.pin_newest()
        said = self.log_of(name).stat().st_size
        await self.start(name, tree)
        # Of two workers the other goes on meanwhile: the new one has to be there for the steps to count.
        await self.until(lambda: self.log_of(name).stat().st_size > said, f"word of {name}")
        await self.take_steps(STEPS_BETWEEN)
        self.pauses[f"{name} {'forth' if tree == HERE else 'back'}"] = round(time.monotonic() - began, 1)

    def pin_newest(self) -> None:
        """For the way back: the older trainer may not read what the newer one saves."""
        found = Savepoints.read(open_storage(self.directory.checkpoints, self.directory.path / "cache"))
        assert found.next_start is not None, "a trainer that is stopped leaves a checkpoint"
        pin(found, found.next_start, "before-upgrade", time.time())

    async def stop(self, name: str) -> None:
        """SIGTERM; who does not end in time is a failure."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        try:
            code = await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError as error:
            self._kill(process)
            raise FleetFailed(f"{name} did not end in {STOP_S} s: {self.last_line(name)}") from error
        if code not in CLEAN:
            raise FleetFailed(f"{name} ended with {code}: {self.last_line(name)}")

    async def take_steps(self, count: int) -> None:
        """Wait until the trainer has taken so many more, by its lines of metrics; whatever their numbers are."""
        wanted = self.lines() + count
        await self.until(lambda: self.lines() >= wanted, f"{count} steps")

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait; no process may end meanwhile."""

        async def look() -> None:
            for name, process in self.processes.items():
                if process.returncode is not None:
                    raise FleetFailed(f"{name} ended with {process.returncode}: {self.last_line(name)}")
            await tick()

        await until(condition, f"{what} with {self.described()}", PATIENCE_S, look)

    def lines(self) -> int:
        """Steps taken so far, those that were undone counted."""
        path = self.directory.metrics
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def described(self) -> str:
        """Who is of which tree."""
        return ", ".join(f"{name} {'new' if tree == HERE else 'old'}" for name, tree in self.trees.items())

    def log_of(self, name: str) -> Path:
        """Of all its lives."""
        return self.directory.logs / f"{name}.log"

    def last_line(self, name: str) -> str:
        """What it said last."""
        lines = self.log_of(name).read_text(errors="replace").splitlines()
        return lines[-1] if lines else "(nothing)"

    def close(self) -> None:
        """End what is left."""
        for process in self.processes.values():
            self._kill(process)

    @staticmethod
    def _kill(process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """A checkout of a commit, for as long as it is needed."""
    git = ["git", "-C", str(HERE), "worktree"]
    subprocess.run([*git, "add", "--detach", str(folder), commit], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True, capture_output=True)


@asynccontextmanager
async def mixed_run(root: Path, address: str) -> AsyncIterator[tuple[Mixed, Setting]]:
    """A run whose file both versions read: only what differs from the defaults stands in it."""
    model = save_tiny_model(root / "model")
    sections = {name: dict(keys) for name, keys in SECTIONS.items()}
    sections["training"]["max_steps"] = LAST_STEP
    sections["kafka"]["bootstrap_servers"] = address
    sections["relay"] = {"port": free_ports(1)[0]}
    config = write_config(root, model, RUN, **sections)
    settings = load_settings(config, [])
    mixed = Mixed(config, RunDirectory(settings.run.path))
    try:
        yield mixed, Setting(settings, mixed.directory, ())
    finally:
        mixed.close()


async def upgrade(before: Path, root: Path, address: str) -> dict[str, object]:
    """Forth and back; what was found."""
    async with mixed_run(root, address) as (mixed, setting):
        await apply_topics_as(before, mixed.config, address)
        for name in ORDER:
            await mixed.start(name, before)
        await mixed.take_steps(STEPS_BETWEEN)
        for name, tree in [*((name, HERE) for name in ORDER), *((name, before) for name in reversed(ORDER))]:
            await mixed.replace(name, tree)
            print(f"{mixed.described()}: {mixed.lines()} steps", flush=True)
        for name in ("dispatcher", *WORKERS, "trainer", "coordinator", "relay"):
            await mixed.stop(name)
        verdict = await judge(setting, address)
        books, findings = verdict.books, verdict.findings
        return {
            "steps": mixed.lines(),
            "lineages": len({entry.report.version.lineage for entry in books.reports}),
            **findings.counts(),
            "lost": findings.lost,
            "trained_twice": findings.trained_twice,
            "dead_letters": len(books.dead_letters),
            "seconds_to_steps_again": mixed.pauses,
            "problems": verdict.problems,
        }


async def apply_topics_as(tree: Path, config: Path, address: str) -> None:
    """The run's topics, as that version's `streamrl topics apply` makes them."""
    partitions = load_settings(config, []).loop.trajectory_partitions
    arguments = ["--run", RUN, "--bootstrap-servers", address, "--partitions", str(partitions)]
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "streamrl.cli.app", "topics", "apply", *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=asyncio.subprocess.DEVNULL,
    )
    if code := await process.wait():
        raise FleetFailed(f"topics apply ended with {code}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Replace, check, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.upgrade", description=__doc__)
    parser.add_argument("--from", dest="commit", required=True, help="the version to upgrade from")
    options = parser.parse_args(arguments)
    with quiet_logs(), tempfile.TemporaryDirectory(prefix="streamrl-upgrade-") as scratch:
        root = Path(scratch)
        with worktree(options.commit, root / "before") as before, start_cluster(root / "kafka", heap_mb=256) as cluster:
            found = asyncio.run(upgrade(before, root, cluster.bootstrap_servers))
    print(json.dumps(found, indent=2))
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
