"""Shows a running run: a live table on a terminal, one plain line per interval elsewhere."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bus.port import Bus
from schemas.errors import WireError
from schemas.identifiers import PolicyVersion
from schemas.messages import Message
from schemas.reports import Heartbeat, SkipRecord, StepReport, WorkerState
from schemas.topics import HEARTBEATS, SKIPS, STEPS

# The state of a run as seen from outside, folded from its topics. Pure; time is passed in.

SILENT_AFTER_S = 10.0
NO_VERSION = PolicyVersion(0, 0)


@dataclass(frozen=True)
class StepPoint:
    """One optimizer step: when its report was sent (epoch seconds) and its metrics."""

    step: int
    version: PolicyVersion
    sent_at: float
    trajectories: int
    metrics: dict[str, float]


@dataclass
class RunState:
    """Steps in order, the last heartbeat of every worker, and skips by reason."""

    steps: list[StepPoint] = field(default_factory=list)
    workers: dict[str, Heartbeat] = field(default_factory=dict)
    skips: Counter[str] = field(default_factory=Counter)
    version: PolicyVersion = NO_VERSION
    finished: bool = False

    def observe(self, message: Message) -> None:
        """Take one message into account; steps that a resumed trainer took again replace the lost ones."""
        match message:
            case StepReport():
                self._observe_step(message)
            case Heartbeat():
                self.workers[message.worker_id] = message
            case SkipRecord():
                self.skips[message.reason.value] += 1

    def _observe_step(self, report: StepReport) -> None:
        if report.version < self.version:
            return
        self.version = report.version
        self.finished = self.finished or report.finished
        taken = bool(report.micro_batches)
        while self.steps and self.steps[-1].step >= report.step + (not taken):
            self.steps.pop()
        if taken:
            trained = sum(len(batch) for batch in report.micro_batches)
            self.steps.append(StepPoint(report.step, report.version, report.sent_at, trained, report.metrics))

    def living_workers(self, now: float) -> list[Heartbeat]:
        """Workers heard of within ten seconds, by id."""
        return [
            beat
            for _, beat in sorted(self.workers.items())
            if beat.state is not WorkerState.STOPPED and now - beat.sent_at <= SILENT_AFTER_S
        ]

    def trajectories_per_s(self, window: int = 10) -> float:
        """Trained trajectories a second over the last steps."""
        points = self.steps[-window - 1 :]
        if len(points) < 2:
            return 0.0
        elapsed = points[-1].sent_at - points[0].sent_at
        return sum(point.trajectories for point in points[1:]) / elapsed if elapsed > 0 else 0.0

    def latest(self, key: str, default: float = 0.0) -> float:
        """A metric of the newest step."""
        return self.steps[-1].metrics.get(key, default) if self.steps else default


# Follows a run's topics and folds them into its state; reads only, and may be attached and detached at will.

POLL_S = 0.5


@dataclass
class Observer:
    """``state`` is complete up to the last poll."""

    bus: Bus
    run_name: str
    state: RunState = field(default_factory=RunState)

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the state up to date.

        Consumes: steps, heartbeats and skips, from the beginning. Produces: nothing.
        Waits for: new records.
        On failure: raises; the run itself is not touched.
        On stop: returns within one poll, having read what was there.
        """
        topics = [topic.full_name(self.run_name) for topic in (STEPS, HEARTBEATS, SKIPS)]
        subscription = await self.bus.subscribe(topics, client_id="observer", start="earliest")
        try:
            while True:
                ending = stop.is_set()
                records = await subscription.poll(timeout_s=POLL_S)
                for record in records:
                    try:
                        self.state.observe(record.message())
                    except WireError:
                        continue
                if ending and not records:
                    return
        finally:
            await subscription.close()


LINE_EVERY_S = 3.0
REFRESH_S = 0.5
LAG_PREFIX = "kafka/lag/bucket_"


class HasRestarts(Protocol):
    """Where restarts of processes are counted."""

    restarts: dict[str, int]


def lag_by_bucket(metrics: Mapping[str, float]) -> dict[int, int]:
    """Unread trajectories per length bucket."""
    found = {int(key.removeprefix(LAG_PREFIX)): int(v) for key, v in metrics.items() if key.startswith(LAG_PREFIX)}
    return dict(sorted(found.items()))


def _reward(metrics: Mapping[str, float]) -> str:
    return f"{metrics['reward']:.3f}" if "reward" in metrics else "-"


def plain_line(state: RunState, max_steps: int, now: float) -> str:
    """One line: step, reward, throughput, staleness, lag per bucket, version per worker."""
    metrics = state.steps[-1].metrics if state.steps else {}
    step = state.steps[-1].step if state.steps else 0
    workers = state.living_workers(now)
    lag = " ".join(f"b{bucket}:{count}" for bucket, count in lag_by_bucket(metrics).items()) or "-"
    held = " ".join(f"{beat.worker_id}@{beat.version}" for beat in workers) or ("gone" if state.steps else "none yet")
    return (
        f"step {step}/{max_steps}  reward {_reward(metrics)}  "
        f"{state.trajectories_per_s():.0f} traj/s  {sum(beat.tokens_per_s for beat in workers):.0f} tok/s  "
        f"staleness {metrics.get('off_policy/mean', 0.0):.1f} (max {metrics.get('off_policy/max', 0.0):.0f})  "
        f"lag {lag}  workers {held}"
    )


def live_view(state: RunState, max_steps: int, restarts: Mapping[str, int], now: float) -> RenderableType:
    """The table for a terminal."""
    metrics = state.steps[-1].metrics if state.steps else {}
    head = Text.assemble(
        (f"step {state.steps[-1].step if state.steps else 0}/{max_steps}  ", "bold"),
        (f"reward {_reward(metrics)}  ", "bold green"),
        f"{state.trajectories_per_s():.0f} trajectories/s  ",
        f"staleness {metrics.get('off_policy/mean', 0.0):.1f} mean, {metrics.get('off_policy/max', 0.0):.0f} max  ",
        "  ".join(f"{name} restarted ×{count}" for name, count in restarts.items()),
    )
    table = Table(expand=False)
    for column in ("worker", "state", "weights", "running", "waiting", "tokens/s"):
        table.add_column(column, justify="left" if column in ("worker", "state", "weights") else "right")
    for beat in state.living_workers(now):
        cells = (str(beat.version), str(beat.running), str(beat.waiting), f"{beat.tokens_per_s:.0f}")
        table.add_row(beat.worker_id, beat.state.value, *cells)
    lag = "  ".join(f"bucket {bucket}: {count}" for bucket, count in lag_by_bucket(metrics).items())
    return Group(head, table, Text(f"consumer lag  {lag or '-'}", style="dim"))


async def show_progress(state: RunState, max_steps: int, supervisor: HasRestarts, stop: asyncio.Event) -> None:
    """Show the state until stopped.

    Consumes: the state, which others update. Produces: text on standard output.
    Waits for: the next refresh. On failure: raises. On stop: shows the last state once more and returns.
    """
    if sys.stdout.isatty():
        with Live(auto_refresh=False) as live:
            while not await _stopped_within(stop, REFRESH_S):
                live.update(live_view(state, max_steps, supervisor.restarts, time.time()), refresh=True)
            live.update(live_view(state, max_steps, supervisor.restarts, time.time()), refresh=True)
        return
    while not await _stopped_within(stop, LINE_EVERY_S):
        print(plain_line(state, max_steps, time.time()), flush=True)
    print(plain_line(state, max_steps, time.time()), flush=True)


async def _stopped_within(stop: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return False
    return True
