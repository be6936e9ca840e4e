"""A run made up by a small simulation: what its topics would hold, in the order of time. Same seed, same run."""

import heapq
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from streamrl.schemas.control import WeightsReady, control_key
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import RecordRef, SkipReason
from streamrl.schemas.topics import CONTROL, HEARTBEATS, SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS, Topic
from streamrl.schemas.trajectories import (
    FinishReason,
    LengthEstimate,
    Prompt,
    SamplingParams,
    Trajectory,
    VersionSpan,
    WorkOrder,
)
from tests.fakes import messages

SHARDS, BUCKETS = 2, 4
PARTITIONS = SHARDS * BUCKETS
MAX_STEPS = 900.0
BOUNDS = (64, 160, 400)
SENTENCES = (
    "Let me work through this step by step. ",
    "First, 17 × 4 = 68, because 10 × 4 = 40 and 7 × 4 = 28. ",
    "Then 68 + 9 = 77. ",
    "Wait, let me check that again: 70 + 7 = 77, so it holds. ",
    "The remainder of 77 divided by 6 is 5. ",
    "So we carry the 5 into the next part. ",
)
VOCABULARY = re.findall(r"\s*\S+", " " + "".join(SENTENCES))


class Happening(NamedTuple):
    """A message that is written at a time."""

    at: float
    topic: Topic
    key: str
    partition: int
    message: Message


@dataclass
class MadeUpRun:
    """``speed`` divides the times that completions take; ``per_step`` trajectories are in a step."""

    begin: float
    seed: int = 7
    workers: int = 6
    slots: int = 12
    per_step: int = 64
    speed: float = 1.0
    train_s: float = 1.05
    dice: random.Random = field(init=False)
    version: int = 0
    held: dict[str, int] = field(default_factory=dict)
    offsets: list[int] = field(default_factory=lambda: [0] * PARTITIONS)
    pending: list[tuple[Trajectory, int, int]] = field(default_factory=list)
    finished: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    skipped: Counter[str] = field(default_factory=Counter)
    delivered: Counter[str] = field(default_factory=Counter)
    sequence: Iterator[int] = field(default_factory=itertools.count)
    free_at: float = 0.0
    last_at: float = 0.0

    def __post_init__(self) -> None:
        """Nobody holds weights yet."""
        self.dice = random.Random(self.seed)

    def happenings(self) -> Iterator[Happening]:
        """Without end, by time."""
        queue: list[tuple[float, int, str, str]] = []
        number = itertools.count()
        self.free_at = self.last_at = self.begin
        yield self._announce(self.begin)
        for index in range(self.workers):
            worker = f"worker-{index}"
            self.held[worker] = 0
            heapq.heappush(queue, (self.begin + 0.1 * index, next(number), "beat", worker))
            for slot in range(self.slots):
                heapq.heappush(queue, (self.begin + 0.3 + slot / 20, next(number), "start", worker))
        running: dict[int, Trajectory] = {}
        while True:
            at, _, kind, what = heapq.heappop(queue)
            if kind == "beat":
                yield self._beat(at, what)
                heapq.heappush(queue, (at + 1.0, next(number), "beat", what))
            elif kind == "start":
                trajectory = self._completion(at, what)
                key = next(number)
                running[key] = trajectory
                if trajectory.sample_index == 0:
                    yield Happening(at, WORK_ORDERS, trajectory.group_id, 0, _order(trajectory))
                heapq.heappush(queue, (trajectory.finished_at, key, "finish", what))
            elif kind == "finish":
                yield from self._finish(at, running.pop(_))
                heapq.heappush(queue, (at + self.dice.uniform(0.01, 0.4) / self.speed, next(number), "start", what))
                if len(self.pending) >= self.per_step and at >= self.free_at:
                    heapq.heappush(queue, (at + self.train_s, next(number), "step", str(at)))
                    self.free_at = at + self.train_s + 0.2
            elif kind == "step":
                yield from self._step(at, float(what))
                heapq.heappush(queue, (at + 0.15, next(number), "announce", ""))
            elif kind == "announce":
                yield self._announce(at)
                for worker in self.held:
                    heapq.heappush(queue, (at + self.dice.uniform(0.2, 1.2), next(number), "adopt", worker))
            else:
                self.held[what] = self.version
                yield self._beat(at, what)

    def _completion(self, at: float, worker: str) -> Trajectory:
        number = next(self.sequence)
        hard = self.dice.random()
        actual = max(6, int(self.dice.lognormvariate(3.6 + 2.4 * hard, 0.4) * (1 + self.version / 250)))
        predicted = max(4, int(actual * self.dice.lognormvariate(0, 0.3)))
        actual, bucket = min(actual, 900), sum(predicted > bound for bound in BOUNDS)
        seconds = (0.3 + actual / 75) / self.speed
        held = self.held[worker]
        swap = int(actual * self.dice.uniform(0.3, 0.9)) if self.dice.random() < 0.5 and actual > 40 else actual
        spans = [(held, 0, swap), (held + 1, swap, actual)]
        skill = 0.15 + 0.8 * (1 - 2.7 ** (-self.version / 45))
        right = float(self.dice.random() < skill)
        ids = np.arange(actual, dtype=np.int32) % len(VOCABULARY)
        group = f"arithmetic/{number // 8}/0"
        generator = np.random.default_rng(number)
        return messages.trajectory(
            group,
            number % 8,
            actual,
            num_generations=8,
            prompt_token_ids=np.arange(12, dtype=np.int32),
            token_ids=ids,
            logprobs=(-generator.exponential(0.5, actual)).astype(np.float32),
            version_spans=tuple(
                VersionSpan(version=PolicyVersion(1, version), start=start, end=end)
                for version, start, end in spans
                if end > start
            ),
            finish_reason=FinishReason.LENGTH if actual == 900 else FinishReason.STOP,
            prompt_text="What is the remainder when 17 × 4 + 9 is divided by 6?\nThink step by step.",
            completion_text="".join(VOCABULARY[token] for token in ids),
            rewards={"correct": right, "format": round(min(1.0, 0.4 + skill * self.dice.random()), 2)},
            bucket=bucket,
            predicted_length=predicted,
            worker_id=worker,
            admitted_version=PolicyVersion(1, held),
            created_at=at - self.dice.uniform(0.01, 0.3),
            started_at=at,
            finished_at=at + seconds,
        )

    def _finish(self, at: float, trajectory: Trajectory) -> Iterator[Happening]:
        partition = trajectory.bucket * SHARDS + self.dice.randrange(SHARDS)
        offset = self.offsets[partition]
        self.offsets[partition] += 1
        self.delivered[trajectory.worker_id] += 1
        yield Happening(at, TRAJECTORIES, trajectory.group_id, partition, trajectory)
        if self.dice.random() < 0.004:
            row = messages.skip_record(
                offset,
                reason=self.dice.choice([SkipReason.STALE, SkipReason.ZERO_ADVANTAGE]),
                trajectory_id=trajectory.trajectory_id,
                group_id=trajectory.group_id,
                partition=partition,
                step=self.version,
                lineage=1,
                sequence=1 + self.skipped.total(),
                sent_at=at + 0.01,
            )
            self.skipped[row.reason.value] += 1
            self.finished[trajectory.bucket] += 1
            yield Happening(at + 0.01, SKIPS, trajectory.trajectory_id, 0, row)
        else:
            self.pending.append((trajectory, partition, offset))

    def _step(self, at: float, began: float) -> Iterator[Happening]:
        batch, self.pending = self.pending[: self.per_step], self.pending[self.per_step :]
        self.version += 1
        for trajectory, *_ in batch:
            self.finished[trajectory.bucket] += 1
        refs = tuple(RecordRef(trajectory.trajectory_id, *place) for trajectory, *place in batch)
        report = messages.step_report(
            1,
            self.version,
            manifest_sha256="0" * 64,
            group_ids=tuple({trajectory.group_id for trajectory, *_ in batch}),
            micro_batches=tuple(refs[first : first + 16] for first in range(0, len(refs), 16)),
            metrics=self._metrics([trajectory for trajectory, *_ in batch], at - began, at - self.last_at),
            sent_at=at,
        )
        self.last_at = at
        yield Happening(at, STEPS, "grpo", 0, report)

    def _metrics(self, batch: list[Trajectory], took: float, whole: float) -> dict[str, float]:
        lengths = [len(trajectory.token_ids) for trajectory in batch]
        ages = [self.version - 1 - trajectory.oldest_version.number for trajectory in batch]
        unread = [0.0] * BUCKETS
        for trajectory, *_ in self.pending:
            unread[trajectory.bucket] += 1
        parts = {name: [each.rewards[name] or 0.0 for each in batch] for name in batch[0].rewards}
        return {
            "loss": 0.3 - self.version / 1000,
            "grad_norm": 0.5 + 1 / self.version,
            "entropy": 1 / (1 + self.version / 50),
            "mismatch_kl/all/mean": 0.002 * self.version**0.5,
            "clip_ratio/region_mean": 0.01,
            **{f"rewards/{name}/mean": float(np.mean(values)) for name, values in parts.items()},
            "completions/num_tokens": float(sum(lengths)),
            "ledger/trained": float(len(batch)),
            "ledger/groups": float(len(batch)) / 8,
            **{f"ledger/skipped/{reason}": float(count) for reason, count in self.skipped.items()},
            **{f"kafka/finished/bucket_{bucket}": float(count) for bucket, count in enumerate(self.finished)},
            "progress/max_steps": MAX_STEPS,
            "reward": float(np.mean([sum(value or 0.0 for value in each.rewards.values()) for each in batch])),
            "completions/mean_length": float(np.mean(lengths)),
            "completions/max_length": float(max(lengths)),
            "off_policy/mean": float(np.mean(ages)),
            "off_policy/max": float(max(ages)),
            "time/wait_for_batch": max(0.0, whole - took),
            "time/forward_backward": took * 0.72,
            "time/optimizer": took * 0.1,
            "time/broadcast_weights": took * 0.18,
            "time/step": whole,
            "time/train_share": min(1.0, took / whole),
            **{f"kafka/lag/bucket_{bucket}": count for bucket, count in enumerate(unread)},
        }

    def _announce(self, at: float) -> Happening:
        message = WeightsReady(
            sequence=self.version,
            sent_at=at,
            version=PolicyVersion(1, self.version),
            step=self.version,
            manifest_sha256="0" * 64,
            relays=("http://relay:1",),
        )
        return Happening(at, CONTROL, control_key(message), 0, message)

    def _beat(self, at: float, worker: str) -> Happening:
        busy = self.dice.randint(self.slots * 2 // 3, self.slots)
        beat = messages.heartbeat(
            worker,
            incarnation="a1",
            engine="vllm",
            version=PolicyVersion(1, self.held[worker]),
            capacity=self.slots,
            running=busy,
            waiting=self.dice.choice([0, 0, 0, 1, 3]),
            finished_trajectories=self.delivered[worker],
            tokens_per_s=busy * 70 * self.dice.uniform(0.9, 1.1),
            sent_at=at,
        )
        return Happening(at, HEARTBEATS, worker, 0, beat)


def _order(trajectory: Trajectory) -> WorkOrder:
    """That the whole group came of."""
    length = trajectory.predicted_length
    return messages.work_order(
        trajectory.group_id,
        8,
        worker_id=trajectory.worker_id,
        position=0,
        prompt=Prompt(prompt_id=trajectory.prompt_id, dataset=trajectory.dataset, content=trajectory.prompt_text),
        estimate=LengthEstimate(median=length, upper=2 * length, bucket=trajectory.bucket, predictor="learned"),
        sampling=SamplingParams(max_completion_length=900),
        partition=trajectory.bucket * SHARDS,
        admitted_version=trajectory.admitted_version,
        created_at=trajectory.created_at,
    )
