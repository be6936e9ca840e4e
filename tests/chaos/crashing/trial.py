"""One trial: the static topic under a new name, a trainer killed at a point, one that finishes, and the comparison."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics, delete_topics
from streamrl.bus.port import Outgoing
from streamrl.schemas.errors import RankLost
from tests.chaos.checking.verdict import judge
from tests.chaos.crashing.commit import BEFORE_RESUMING
from tests.chaos.crashing.points import CrashPoint
from tests.chaos.crashing.workload import GENERATIONS, PARTITIONS, make_records, publish
from tests.chaos.runs.setting import Setting, make_setting
from tests.pipeline.local_run import ENVIRONMENT

STEPS = 7
GROUPS_PER_STEP = 2
GROUPS = STEPS * GROUPS_PER_STEP + 4
KILLED = -9
STUCK = 124


def codes_of(point: CrashPoint) -> tuple[int, ...]:
    """How the trainers of ``Trials.kill_at`` have to end."""
    if point.rank:
        return RankLost.exit_code, 0
    return (KILLED, KILLED, 0) if point.resumed else (KILLED, 0)


TRAINING_S = 90.0
SECTIONS: dict[str, dict[str, Any]] = {
    "rewards": {"functions": ["tests.pipeline.letter_reward:share_of_a"]},
    "loop": {"groups_per_step": GROUPS_PER_STEP, "num_generations": GENERATIONS, "max_staleness": 50},
    "training": {
        "max_steps": STEPS,
        "checkpoint_every": 2,
        "learning_rate": 1e-3,
        "threads": 1,
        "weight_transfer": "delta",
    },
    "algorithm": {"dynamic_sampling": True},
}


def start_server() -> "subprocess.Popen[str]":
    """In a group of its own, with the trainers that it forks."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.crashing.crashing_trainer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT, "MKL_NUM_THREADS": "1"},
        start_new_session=True,
    )


@dataclass
class TrainerServer:
    """Runs trainers one after the other; see ``crashing_trainer``."""

    process: "subprocess.Popen[str]" = field(default_factory=start_server)

    async def train(self, setting: Setting, point: CrashPoint | None) -> int:
        """The exit code of a trainer; ``STUCK`` if it does not end in time."""
        job = {
            "config": str(setting.directory.config),
            "log": str(setting.directory.logs / "trainer.log"),
            "point": asdict(point) if point else None,
        }
        exchange = asyncio.get_running_loop().run_in_executor(None, self._exchange, job)
        done, _ = await asyncio.wait([exchange], timeout=TRAINING_S)
        if done:
            return exchange.result()
        self._kill()
        await asyncio.wait([exchange])
        self.close()
        self.process = start_server()
        return STUCK

    def _exchange(self, job: dict[str, Any]) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        return int(json.loads(answer)["code"]) if answer else STUCK

    def close(self) -> None:
        self._kill()
        self.process.communicate()

    def _kill(self) -> None:
        """With the trainer that it may be running."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@dataclass(frozen=True)
class Trained:
    """What a whole trial left: digests of every tensor, the books' problems, and how the processes ended."""

    codes: tuple[int, ...]
    tensors: dict[str, str]
    trained: tuple[str, ...]
    problems: tuple[str, ...] = field(default=())


@dataclass
class Trials:
    """All trials share a broker, a model, the records and the server."""

    root: Path
    model: Path
    address: str
    server: TrainerServer
    records: Sequence[Outgoing]
    ranks: int = 1
    count: int = 0

    @classmethod
    def prepare(cls, root: Path, model: Path, address: str, ranks: int = 1) -> Self:
        return cls(root, model, address, TrainerServer(), make_records(model, GROUPS), ranks)

    def of_ranks(self, ranks: int) -> "Trials":
        """The same with trainers of so many ranks."""
        return replace(self, root=self.root / f"ranks-{ranks}", ranks=ranks, count=100 * ranks)

    async def kill_at(self, point: CrashPoint) -> Trained:
        """A trainer killed at the point, and one that finishes; ``codes_of`` says how they must end."""
        before = (BEFORE_RESUMING,) if point.resumed else ()
        return await self.run(*before, point, None)

    async def run(self, *points: CrashPoint | None) -> Trained:
        """Trainers one after the other on one run, each killed at its point; none lets one go to the end."""
        self.count += 1
        name = f"trial-{self.count}"
        sections = {**SECTIONS, "training": {**SECTIONS["training"], "ranks": self.ranks}}
        setting = make_setting(self.root / name, self.model, name, self.address, 0, sections)
        await apply_topics(self.address, name, PARTITIONS)
        await publish(self.address, name, self.records)
        codes = tuple([await self.server.train(setting, point) for point in points])
        verdict = await judge(setting, self.address, STEPS)
        steps, problems = verdict.findings.steps, verdict.problems
        order = tuple(ref.trajectory_id for step in steps for batch in step.micro_batches for ref in batch)
        if not problems:
            # A hundred partitions each: of some ninety trials, a broker with a small heap answers nobody any more.
            await delete_topics(KafkaSettings(bootstrap_servers=self.address), name)
        return Trained(codes, tensor_digests(newest_directory(setting)), order, tuple(problems))


def newest_directory(setting: Setting) -> Path | None:
    """The directory of the last step's checkpoint."""
    found = setting.directory.checkpoints / f"step_{STEPS}"
    return found if found.exists() else None


def tensor_digests(checkpoint: Path | None) -> dict[str, str]:
    """sha256 of the bytes of every tensor of the model and the optimizer; empty without a checkpoint."""
    from safetensors import safe_open

    digests: dict[str, str] = {}
    for path in sorted(checkpoint.rglob("*.safetensors")) if checkpoint else ():
        with safe_open(path, framework="numpy") as file:
            for name in sorted(file.keys()):
                digests[f"{path.name}:{name}"] = hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest()
    return digests
