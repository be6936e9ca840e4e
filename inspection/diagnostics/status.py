"""`streamrl status`: where a run stands, from the last records of its topics. Read once, quickly, however long it is.

What the records mean is decided by ``RunState``, which the displays of a running run are made of too; here is only
how much of each topic is read, and how it is told.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvloop

from bus.history import BusHistory, Extent
from bus.kafka.cluster import offsets_since
from bus.port import Record
from inspection.diagnostics.connect import CLIENT_ID, RunConnection
from inspection.diagnostics.lag import (
    GroupLag,
    bucket_name,
    figure_text,
    lag_json,
    measure_lags,
    seconds_text,
    shards_of,
)
from inspection.diagnostics.tail import newest_records
from observability.run_state.aggregates import NO_VERSION
from observability.run_state.state import RunState, is_alive
from schemas.identifiers import PolicyVersion
from schemas.reports import Heartbeat, WorkerState
from schemas.topics import CONTROL, DEAD_LETTERS, HEARTBEATS, STEPS, TRAJECTORIES

STEPS_READ = 20
"""Enough for the rate of the last ten, and for those that a resumed trainer has undone."""
HEARD_WITHIN_S = 60.0


def show_status(connection: RunConnection, *, as_json: bool) -> int:
    """Print where the run stands; the exit code.

    Raises:
        UserError: no such run, or no broker.
    """
    status = uvloop.run(_status(connection))
    print(json.dumps(status_json(status)) if as_json else "\n".join(status_lines(status)))
    return 0


async def _status(connection: RunConnection) -> "RunStatus":
    return await read_status(await connection.with_run())


@dataclass(frozen=True)
class RunStatus:
    """``at``: when it was read, in epoch seconds. ``state`` knows the workers heard of in the minute before."""

    address: str
    at: float
    state: RunState
    lags: tuple[GroupLag, ...]
    dead_letters: int

    @property
    def version(self) -> PolicyVersion:
        """Of the newest step, or as announced when its report is no longer kept."""
        # Versions sort by lineage first, so that weights which a crash has orphaned do not win by their step.
        return max(self.state.version, self.state.announced)

    @property
    def step(self) -> int:
        """The newest step."""
        return self.state.step or self.version.number

    @property
    def step_age_s(self) -> float | None:
        """Since its report; None: it is no longer kept."""
        return None if self.state.step_at is None else max(0.0, self.at - self.state.step_at)

    @property
    def generating(self) -> int:
        """Completions that living workers hold."""
        return sum(beat.running + beat.waiting for beat in self.state.living_workers(self.at))

    @property
    def lag(self) -> int:
        """Trajectories not finished by the consumer that is furthest behind."""
        # Several algorithms may train from one run, each with a group of its own.
        return max((lag.lag for lag in self.lags), default=0)

    @property
    def trained_groups(self) -> int | None:
        """Groups trained since the run began, however often the trainer was restarted: each step takes equally many."""
        # Reports of the first steps may be deleted by now; the version counts all of them.
        per_step = self.state.metrics.get("ledger/groups")
        return None if per_step is None else int(per_step) * self.version.number

    @property
    def activity(self) -> str:
        """What the run is doing, in a word or two."""
        if self.state.finished:
            return "finished"
        if self.state.mode != "run":
            return {"pause": "paused", "drain": "draining"}.get(self.state.mode, self.state.mode)
        return "running" if self.state.living_workers(self.at) else "no worker alive"


async def read_status(connection: RunConnection) -> RunStatus:
    """Read the ends of the topics.

    Raises:
        BusUnavailable: no broker answers.
    """
    history, now = BusHistory(connection.bus, CLIENT_ID), time.time()
    # All at once: each opens a connection of its own, and one after the other their times would add up.
    steps, beats, control, dead_letters, trajectories = await asyncio.gather(
        _newest_steps(history, connection),
        _recent_heartbeats(history, connection, now),
        _all_control(history, connection),
        history.extents(connection.name_of(DEAD_LETTERS)),
        history.extents(connection.name_of(TRAJECTORIES)),
    )
    # In the order of time, as whoever followed the run would have read them.
    state = RunState(connection.run)
    state.observe_records(sorted([*steps, *beats, *control], key=lambda record: record.timestamp))
    shards = shards_of(connection, len(trajectories), state.metrics)
    # The trainer counts since the run began, the topic keeps the newest: the higher one is nearer to the truth.
    kept = sum(held.end - held.first for held in dead_letters.values())
    return RunStatus(
        address=connection.address,
        at=now,
        state=state,
        lags=tuple(await measure_lags(connection, shards)),
        dead_letters=max(int(state.metrics.get("kafka/dead_letters", 0)), kept),
    )


async def _newest_steps(history: BusHistory, connection: RunConnection) -> list[Record]:
    topic = connection.name_of(STEPS)
    return await newest_records(history, topic, await history.extents(topic), STEPS_READ)


async def _recent_heartbeats(history: BusHistory, connection: RunConnection, now: float) -> list[Record]:
    topic = connection.name_of(HEARTBEATS)
    extents = await history.extents(topic)
    # A long run has millions of heartbeats; the broker finds the minute by its time index.
    first = await offsets_since(connection.kafka, extents, now - HEARD_WITHIN_S)
    ranges = {tp.partition: Extent(first[tp], held.end) for tp, held in extents.items()}
    return [record async for record in history.records(topic, ranges)]


async def _all_control(history: BusHistory, connection: RunConnection) -> list[Record]:
    """The topic is compacted: whatever its age, the last word on every subject is there."""
    return [record async for record in history.records(connection.name_of(CONTROL))]


def status_lines(status: RunStatus) -> Iterator[str]:
    """The run in a dozen lines."""
    state, metrics = status.state, status.state.metrics
    yield f"run       {state.run} at {status.address}: {status.activity}"
    yield f"version   {status.version}, announced {_announced(state) or 'none yet'}"
    # Clocks of two machines may differ: an age is never below zero.
    since = "" if status.step_age_s is None else f", {status.step_age_s:.0f} s ago"
    rate = f"{state.steps.trajectories_per_s():.1f} trajectories/s"
    yield f"step      {status.step}{since}, reward {figure_text(metrics.get('reward'))}, {rate}"
    mean, most = metrics.get("off_policy/mean"), metrics.get("off_policy/max")
    yield f"staleness {figure_text(mean)} mean, {figure_text(most)} max (optimizer steps)"
    groups, tokens = status.trained_groups, int(metrics.get("num_tokens", 0))
    yield f"trained   {'-' if groups is None else f'{groups:,}'} groups, {tokens:,} tokens of prompts and completions"
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in state.skipped.items())
    yield f"skipped   {skipped or 'none'}; {status.dead_letters:,} dead letters"
    waiting = f"{status.lag:,} trajectories not finished by trainers"
    yield f"in flight {status.generating:,} completions at workers, {waiting}"
    for lag in status.lags:
        buckets = "  ".join(f"{bucket_name(bucket)} {count:,}" for bucket, count in lag.by_bucket().items())
        late = f"{seconds_text(lag.behind_s)} behind  ({buckets})"
        yield f"lag       {lag.group or 'no consumer group yet'}: {lag.lag:,}, {late}"
    yield f"workers   {len(state.workers)} heard of in the last minute"
    for _, beat in sorted(state.workers.items()):
        yield f"  {_worker(beat, status.at)}"


def _announced(state: RunState) -> PolicyVersion | None:
    return None if state.announced == NO_VERSION else state.announced


def _worker(beat: Heartbeat, now: float) -> str:
    state = beat.state.value
    # Who has said that it stops is expected to be silent.
    if beat.state is not WorkerState.STOPPED and not is_alive(beat, now):
        state = f"silent for {max(0.0, now - beat.sent_at):.0f} s"
    return (
        f"{beat.worker_id:<16} {state:<10} v{beat.version!s:<8} {beat.running:>4} running {beat.waiting:>4} waiting "
        f"of {beat.capacity:<4} {beat.tokens_per_s:>8.0f} tokens/s  {beat.engine}"
    )


def status_json(status: RunStatus) -> dict[str, Any]:
    """The same, and all metrics of the newest step."""
    state, announced = status.state, _announced(status.state)
    return {
        "run": state.run,
        "bootstrap_servers": status.address,
        "activity": status.activity,
        "version": str(status.version),
        "announced": None if announced is None else str(announced),
        "mode": state.mode,
        "finished": state.finished,
        "step": status.step,
        "step_age_s": status.step_age_s,
        "trajectories_per_s": state.steps.trajectories_per_s(),
        "trained_groups": status.trained_groups,
        "skipped": state.skipped,
        "dead_letters": status.dead_letters,
        "in_flight": {"generating": status.generating, "lag": status.lag},
        "lag": [lag_json(lag) for lag in status.lags],
        "workers": [
            {**beat.model_dump(mode="json"), "version": str(beat.version), "alive": is_alive(beat, status.at)}
            for _, beat in sorted(state.workers.items())
        ],
        "metrics": dict(state.metrics),
    }
