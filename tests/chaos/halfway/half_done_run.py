"""A run whose processes nobody starts again, whose completions all have one length, and what is on record of them.

Each process is started as `streamrl run` starts it. The test kills and restarts them.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.bus.embedded.node import free_ports
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Subscription
from streamrl.deploy.local.supervisor import CLEAN, Child
from streamrl.schemas.topics import PARTIAL_TRAJECTORIES, TRAJECTORIES
from streamrl.schemas.trajectories import PartialTrajectory, Trajectory
from tests.chaos.halfway import tally
from tests.chaos.runs.inside import with_code
from tests.chaos.runs.setting import Setting, create_topics, make_setting
from tests.chaos.runs.waiting import TICK_S, expect_running, processes_with, until
from tests.pipeline.accounts import read_all
from tests.pipeline.local_run import is_alive

GROUPS_PER_STEP, SAMPLES = 4, 8
HELD = GROUPS_PER_STEP * SAMPLES
"""Completions that a worker runs at once: four groups of eight."""
MAX_STEPS = 6
LEFT_S = 20.0
START_S, END_S = 300.0, 420.0


def save_model(directory: Path, positions: int) -> Path:
    """Of the letters that prompts and rewards have, and without an end token."""
    from benchmarks.small_model import save
    from tests.producers.generation.engines.sharp_model import sharp_model

    return save(sharp_model(97, positions, None), directory, ends=())


def sections(engine: str, length: int) -> dict[str, dict[str, Any]]:
    """Weights are taken in mid-completion, and the cache computed anew: so each span is its version's alone."""
    return {
        "rewards": {"functions": ["tests.pipeline.letter_reward:share_of_a"]},
        "loop": {
            "groups_per_step": GROUPS_PER_STEP,
            "num_generations": SAMPLES,
            "max_staleness": 3,
            "max_completion_length": length,
            "bucket_boundaries": [length // 2],
        },
        "generation": {
            "engine": engine,
            "max_num_seqs": HELD,
            "dtype": "float32",
            "device": "cpu",
            "adopt": "recompute",
        },
        "training": {
            "max_steps": MAX_STEPS,
            "checkpoint_every": 1,
            "learning_rate": 1e-3,
            "threads": 1,
            # All of them, to compute with what each has sampled.
            "keep_weight_versions": 100,
        },
    }


@dataclass(frozen=True)
class Left:
    """Tokens and log-probabilities on record of a completion that its process did not finish."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class OnRecord:
    """The partial-trajectories topic as it grows: of each process, what it has unfinished there."""

    subscription: Subscription
    chunks: dict[tuple[str, str], list[PartialTrajectory]] = field(default_factory=dict)
    workers: dict[str, str] = field(default_factory=dict)

    async def read(self, timeout_s: float = TICK_S) -> None:
        """Take in what came since."""
        for record in await self.subscription.poll(timeout_s=timeout_s):
            name, _, rest = (record.key or "").rpartition("@")
            process = rest.partition("/")[0]
            if record.value is None:
                self.chunks.pop((process, name), None)
                continue
            chunk = record.message()
            assert isinstance(chunk, PartialTrajectory)
            self.chunks.setdefault((process, name), []).append(chunk)
            self.workers[process] = chunk.worker_id

    async def read_all(self) -> None:
        """Up to the end that the topic has now."""
        ends = await self.subscription.end_offsets()
        while any(at < ends[tp] for tp, at in (await self.subscription.positions()).items()):
            await self.read()

    def lengths(self, process: str) -> dict[str, int]:
        """Tokens on record of what a process has not delivered."""
        return {name: max(one.end for one in found) for (by, name), found in self.chunks.items() if by == process}

    def left(self, process: str) -> dict[str, Left]:
        """What there is of that, up to the first gap."""
        return {name: _joined(chunks) for (by, name), chunks in self.chunks.items() if by == process}

    def half_done(self, length: int) -> str | None:
        """A process that holds enough completions, all about at half length, and has sampled with other weights too."""
        for process in self.workers:
            held = sorted(self.lengths(process).values())
            is_half = len(held) == HELD and sum(held) >= HELD * length / 2
            if is_half and held[0] >= 0.4 * length and held[-1] <= 0.75 * length and self._has_trained(process):
                return process
        return None

    def _has_trained(self, process: str) -> bool:
        chunks = [chunk for (by, _), found in self.chunks.items() if by == process for chunk in found]
        return any(span.version.number for chunk in chunks for span in chunk.version_spans)


def _joined(chunks: Iterable[PartialTrajectory]) -> Left:
    left = Left()
    for chunk in sorted(chunks, key=lambda chunk: (chunk.start, chunk.end)):
        known = len(left.tokens) - chunk.start
        if known >= 0:  # a chunk that is written again may be longer than the first time
            left.tokens.extend(chunk.token_ids[known:].tolist())
            left.logprobs.extend(chunk.logprobs[known:].tolist())
    return left


@dataclass
class HalfDoneRun:
    """``folder``: of tallies. ``children``: those that run, by name; ``pids``: all that ever did."""

    setting: Setting
    address: str
    folder: Path
    length: int
    children: dict[str, Child] = field(default_factory=dict)
    pids: list[int] = field(default_factory=list)

    @property
    def bus(self) -> KafkaBus:
        return KafkaBus(KafkaSettings(bootstrap_servers=self.address))

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self.setting.specs]

    async def start(self, names: Iterable[str]) -> None:
        """Start processes; a worker's tally is its life's own."""
        for spec in (spec for spec in self.setting.specs if spec.name in set(names)):
            if spec.name.startswith("worker"):
                path = self.folder / f"{spec.name}-{len(self.pids)}"
                spec = with_code(spec, self.folder / "code", tally.__name__, **{tally.VARIABLE: str(path)})
            child = self.children[spec.name] = await Child.start(spec)
            self.pids.append(child.pid)

    def tally_of(self, name: str) -> dict[str, int]:
        """Tokens that the engine of a worker which runs, or was killed last, has handed over."""
        return tally.read(self.folder / f"{name}-{self.pids.index(self.children[name].pid)}")

    async def kill(self, names: Iterable[str]) -> None:
        """SIGKILL, all at once."""
        killed = [self.children[name] for name in names]
        for child in killed:
            os.kill(child.pid, signal.SIGKILL)
        for child in killed:
            assert await child.process.wait() == -signal.SIGKILL, child.last_line()

    async def until(self, condition: Callable[[], bool], what: str, record: OnRecord, timeout_s: float) -> None:
        """Read on, until something is so."""

        async def read_on() -> None:
            expect_running(*self.children.values())
            await record.read()

        await until(condition, what, timeout_s, read_on)

    async def finish(self) -> None:
        """Wait for the trainer's good end, and end the others as `streamrl run` does then."""
        assert await asyncio.wait_for(self.children["trainer"].process.wait(), END_S) == 0
        others = [child for name, child in self.children.items() if name != "trainer"]
        for child in others:
            child.terminate()
        codes = await asyncio.wait_for(asyncio.gather(*(child.process.wait() for child in others)), END_S)
        assert set(codes) <= CLEAN, {child.spec.name: child.last_line() for child in others}

    async def close(self) -> list[int]:
        """End everything; the pids that are still there afterwards, of engines' processes too (there must be none)."""
        for child in self.children.values():
            await child.wait_or_kill(0.0)
        deadline = time.monotonic() + LEFT_S
        while (left := self._left_behind()) and time.monotonic() < deadline:
            await asyncio.sleep(TICK_S)
        return left

    def _left_behind(self) -> list[int]:
        # A process that a worker starts has the worker's environment, and that names our folder.
        return [*filter(is_alive, self.pids), *processes_with(str(self.folder))]

    async def trajectories(self) -> list[Trajectory]:
        """All that were delivered."""
        records = await read_all(self.bus, self.setting.name, TRAJECTORIES)
        found = [record.message() for record in records]
        return [one for one in found if isinstance(one, Trajectory)]

    async def on_record(self) -> OnRecord:
        topic = PARTIAL_TRAJECTORIES.full_name(self.setting.name)
        return OnRecord(await self.bus.subscribe([topic], client_id="test", start="earliest"))


async def open_run(root: Path, name: str, address: str, engine: str, length: int) -> HalfDoneRun:
    """Topics, directory and model of a run; nothing is started yet."""
    root.mkdir(parents=True, exist_ok=True)
    model = save_model(root / "model", positions=length + 64)
    setting = make_setting(root, model, name, address, free_ports(1)[0], sections(engine, length))
    await create_topics(setting)
    return HalfDoneRun(setting, address, root / "tallies", length)
