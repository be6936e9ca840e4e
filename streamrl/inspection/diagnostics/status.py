"""`streamrl status`: shows the state of a run, from the last records of its topics. It is quick for any run.

``RunState`` decides what the records mean, as in the displays of a running run. This module only decides how much of
each topic is read, and how the state is printed.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvloop

from streamrl.bus.history import BusHistory, Extent
from streamrl.bus.kafka.cluster import offsets_since
from streamrl.bus.port import Record
from streamrl.inspection.diagnostics.connect import CLIENT_ID, RunConnection
from streamrl.inspection.diagnostics.lag import (
    GroupLag,
    consumer_lag_text,
    figure_text,
    lag_json,
    lag_line,
    measure_lags,
    shards_of,
)
from streamrl.inspection.diagnostics.tail import newest_records
from streamrl.observability.run_state.aggregates import NO_VERSION
from streamrl.observability.run_state.feed import ends_by_bucket
from streamrl.observability.run_state.figures import Value, live_figures
from streamrl.observability.run_state.snapshot import health
from streamrl.observability.run_state.state import RunState, is_alive
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.plain_text import plain_lines
from streamrl.schemas.reports import Heartbeat, WorkerState
from streamrl.schemas.topics import CONTROL, DEAD_LETTERS, EVALUATIONS, HEARTBEATS, SKIPS, STEPS, TRAJECTORIES, Topic
from streamrl.settings.features import awaited

STEPS_READ, SKIPS_READ = 20, 500
"""Newest records that are read: enough steps for the rate of the last ten, even if a resumed trainer has undone some,
and enough skip rows for those since the last step."""
HEARD_WITHIN_S = 60.0
NOT_READ = frozenset({"sampled_per_s", "weights_per_min"})
"""Figures that are left out: trajectories are not read, and the control topic holds only the last message of each
subject."""


def show_status(connection: RunConnection, *, as_json: bool) -> int:
    """Print the state of the run, and return the exit code.

    Raises:
        UserError: there is no such run, or no broker.
    """
    status = uvloop.run(_status(connection))
    print(json.dumps(status_json(status)) if as_json else plain_lines(status_lines(status)))
    return 0


async def _status(connection: RunConnection) -> "RunStatus":
    return await read_status(await connection.with_run())


@dataclass(frozen=True)
class RunStatus:
    """The state of a run. ``at``: the time of reading, in seconds since the epoch; ``state``: it has the workers with a
    heartbeat in the minute before.
    """

    address: str
    at: float
    state: RunState
    groups: tuple[GroupLag, ...] = ()

    @property
    def version(self) -> PolicyVersion:
        """The version of the newest step, or the announced one if the step's report is deleted."""
        # Versions sort by lineage first, so weights that a crash has orphaned do not win by their step number.
        return max(self.state.progress.version, self.state.progress.announced)

    @property
    def step(self) -> int:
        """The newest step."""
        return self.state.progress.step or self.version.number

    @property
    def figures(self) -> dict[str, Value]:
        """The figures of every display, except those that need records which this command does not read."""
        found = live_figures(self.state, self.at) | {"step": self.step}
        return {name: value for name, value in found.items() if name not in NOT_READ}

    @property
    def trained_groups(self) -> int | None:
        """Groups trained since the run's first start, over all restarts: each step takes equally many."""
        # Reports of the first steps may be deleted, but the version's number counts all steps.
        per_step = self.state.metrics.get("ledger/groups")
        return None if per_step is None else int(per_step) * self.version.number

    @property
    def activity(self) -> str:
        """The run's activity in a word or two."""
        found = health(self.state, self.at)
        return "no worker alive" if found == "running" and not self.state.living_workers(self.at) else found


async def read_status(connection: RunConnection) -> RunStatus:
    """The state of a run, from the newest records of its topics.

    Raises:
        BusUnavailable: no broker answers.
    """
    history, now = BusHistory(connection.bus, CLIENT_ID), time.time()
    # In parallel: each opens a connection of its own, and their times would add up.
    steps, skips, beats, control, dead_letters, trajectories = await asyncio.gather(
        _newest(history, connection, STEPS, STEPS_READ),
        _newest(history, connection, SKIPS, SKIPS_READ),
        _recent_heartbeats(history, connection, now),
        _all_control(history, connection),
        history.extents(connection.name_of(DEAD_LETTERS)),
        history.extents(connection.name_of(TRAJECTORIES)),
    )
    if connection.settings is not None and awaited(connection.settings) is not None:
        control += [record async for record in history.records(connection.name_of(EVALUATIONS))]
    # In the order of time, as a display that followed the run would have read them.
    state = connection.new_state()
    state.observe_records(sorted([*steps, *skips, *beats, *control], key=lambda record: record.timestamp))
    for topic in sorted(topic for part in state.parts for topic in part.warning_topics):
        state.observe_records(await newest_records(history, topic, await history.extents(topic), 1))
    shards = shards_of(connection, len(trajectories), state.metrics)
    state.refusals.dead_letters = sum(held.end - held.first for held in dead_letters.values())
    if shards is not None:
        state.note_ends(ends_by_bucket({tp: held.end for tp, held in trajectories.items()}, shards))
    return RunStatus(connection.address, now, state, tuple(await measure_lags(connection, shards)))


async def _newest(history: BusHistory, connection: RunConnection, topic: Topic, most: int) -> list[Record]:
    name = connection.name_of(topic)
    return await newest_records(history, name, await history.extents(name), most)


async def _recent_heartbeats(history: BusHistory, connection: RunConnection, now: float) -> list[Record]:
    topic = connection.name_of(HEARTBEATS)
    extents = await history.extents(topic)
    # A long run has millions of heartbeats; the broker finds the minute by its time index.
    first = await offsets_since(connection.kafka, extents, now - HEARD_WITHIN_S)
    ranges = {tp.partition: Extent(first[tp], held.end) for tp, held in extents.items()}
    return [record async for record in history.records(topic, ranges)]


async def _all_control(history: BusHistory, connection: RunConnection) -> list[Record]:
    """All control records. The topic is compacted, so it has the last message on every subject, however old."""
    return [record async for record in history.records(connection.name_of(CONTROL))]


def status_lines(status: RunStatus) -> Iterator[str]:
    """The state of the run in about a dozen lines."""
    state, figures = status.state, status.figures
    yield f"run       {state.run} at {status.address}: {status.activity}"
    yield f"version   {status.version}, announced {_announced(state) or 'none yet'}"
    of = "" if figures["max_steps"] is None else f" of {figures['max_steps']}"
    since = "" if figures["step_age_s"] is None else f", {figures['step_age_s']:.0f} s ago"
    rate = f"{figure_text(figures['trajectories_per_s'])} trajectories/s"
    yield f"step      {status.step}{of}{since}, reward {figure_text(figures['reward'])}, {rate}"
    if (passed := figures["pass_at_1"]) is not None:
        yield f"evaluated {state.learning.evaluations.rows[-1][0]}, pass@1 {figure_text(passed)}"
    mean, most = figures["staleness_mean"], figures["staleness_max"]
    yield f"staleness {figure_text(mean)} mean, {figure_text(most)} max (optimizer steps)"
    groups, tokens = status.trained_groups, int(state.metrics.get("num_tokens", 0))
    yield f"trained   {'-' if groups is None else f'{groups:,}'} groups, {tokens:,} tokens of prompts and completions"
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in state.skipped.items())
    yield f"skipped   {skipped or 'none'}; {figures['dead_letters']:,} dead letters"
    speed = f"{figures['sampled_tokens_per_s']:,} tokens/s"
    yield f"sampling  {figures['running']:,} completions at workers, {figures['waiting']:,} waiting, {speed}"
    yield lag_line(state.lag).replace("lag ", "lag       ", 1)
    for group in status.groups:
        yield f"group     {consumer_lag_text(group)}"
    for part in state.parts:
        yield from part.status_lines()
    if (warning := state.warning(status.at)) is not None:
        yield f"waiting   {warning}"
    yield f"workers   {len(state.processes.workers)} with a heartbeat in the last minute"
    for _, beat in sorted(state.processes.workers.items()):
        yield f"  {_worker(beat, status.at)}"


def _announced(state: RunState) -> PolicyVersion | None:
    return None if state.progress.announced == NO_VERSION else state.progress.announced


def _worker(beat: Heartbeat, now: float) -> str:
    state = beat.state.value
    # A worker that has reported its end is expected to be silent.
    if beat.state is not WorkerState.STOPPED and not is_alive(beat, now):
        state = f"silent for {max(0.0, now - beat.sent_at):.0f} s"
    return (
        f"{beat.worker_id:<16} {state:<10} v{beat.weights:<8} {beat.running:>4} running {beat.waiting:>4} waiting "
        f"of {beat.capacity:<4} {beat.tokens_per_s:>8.0f} tokens/s  {beat.engine}"
    )


def status_json(status: RunStatus) -> dict[str, Any]:
    """The state as JSON-safe data, with all metrics of the newest step."""
    state, announced = status.state, _announced(status.state)
    return {
        "run": state.run,
        "bootstrap_servers": status.address,
        "activity": status.activity,
        "version": str(status.version),
        "announced": None if announced is None else str(announced),
        "mode": state.progress.mode,
        "finished": state.progress.finished,
        **status.figures,
        "trained_groups": status.trained_groups,
        "skipped_by_reason": state.skipped,
        "lag_by_bucket": state.lag,
        "groups": [lag_json(group) for group in status.groups],
        "fleet": [
            {**beat.model_dump(mode="json"), "version": str(beat.version), "alive": is_alive(beat, status.at)}
            for _, beat in sorted(state.processes.workers.items())
        ],
        "metrics": dict(state.metrics),
    }
