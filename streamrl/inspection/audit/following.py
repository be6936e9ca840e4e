"""`streamrl audit --follow`: audits a run at intervals, prints each report, and serves its figures to Prometheus."""

import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import uvloop

from streamrl.bus.history import History
from streamrl.bus.waiting import end_tasks, wait_for_event
from streamrl.consumers.training.checkpoints.catalogue import read_manifests
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.inspection.audit.follower import AuditFollower, TopicsRecreated
from streamrl.inspection.audit.report import AuditReport
from streamrl.inspection.audit.state import AuditStateFile, FollowedRun, open_state
from streamrl.inspection.process import tune_garbage_collector
from streamrl.inspection.source import PastRun, history_of, nodes_of, open_run, own_broker
from streamrl.observability.metrics.endpoint import endpoint, first_port
from streamrl.observability.metrics.families import Meters
from streamrl.schemas import stopping
from streamrl.schemas.errors import BusError, DataError, DataLossRefused
from streamrl.schemas.identifiers import INSTANCES
from streamrl.settings.run_directory import RunDirectory, instance_location

NOT_BALANCED = 4
"""Exit code of an audit that found violations."""
PROCESS = "audit"
SAVE_EVERY_S = 60.0
"""Seconds between two saves. After a kill, records read since the last save are read again, so it must be far below any
retention time."""

Print = Callable[[str], None]


@dataclass(frozen=True)
class FollowOptions:
    """``metrics_port``: where to serve figures; None: as the run's ``metrics.port`` says, which may be nowhere."""

    interval_s: float = 10.0
    as_json: bool = False
    fail_fast: bool = False
    metrics_port: int | None = None


def follow_run(run: Path, options: FollowOptions) -> int:
    """Follow a run until it is finished or a signal arrives. The exit code is 0 if it balances then, 4 if not.

    If the run balances and the signal is not Ctrl-C, the exit code is the signal's.

    Raises:
        UserError: there is no such run, or its topics are found nowhere.
    """
    past = open_run(run)
    tune_garbage_collector()
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-audit-") as scratch,
        history_of(past, None, Path(scratch), lambda line: print(line, flush=True)) as history,
        _served(past, options) as meter,
    ):
        # Without a running broker, the topics are read from a copy of the run's data, which does not change any more.
        named = past.settings.kafka.bootstrap_servers
        is_copy = named is None and bool(nodes_of(past.directory)) and own_broker(past.directory) is None
        return uvloop.run(_follow(past, history, options, meter, once=is_copy))


async def _follow(
    past: PastRun, history: History, options: FollowOptions, meter: "AuditMeter | None", *, once: bool
) -> int:
    stop = asyncio.Event()
    following = Following(past, history, options, meter, once=once)
    try:
        with stopping.stop_requests_handled_by(lambda _: stop.set()):
            code = await following.run(stop)
    finally:
        following.close()
    if code or not stop.is_set():
        return code
    # A user who presses Ctrl-C while the run balances has the answer, so this is a success.
    return stopping.exit_code(after_ctrl_c=0)


async def closing_report(past: PastRun, history: History) -> AuditReport:
    """The audit of a run whose processes have ended. It starts from the state that a follower saved during the run.

    Raises:
        DataError: see ``AuditFollower.advance``.
        BusError: see ``AuditFollower.advance``.
    """
    following = Following(past, history, FollowOptions(), None, once=True, say=lambda line: None)
    try:
        return await following.round()
    finally:
        following.close()


def checkpoints_of(run: PastRun) -> list[CheckpointManifest]:
    """The manifests of the checkpoints of a run and of its instances. No tensor is read.

    Raises:
        CheckpointError: a directory of checkpoints cannot be read.
    """
    location = run.settings.training.checkpoint_location
    places = [run.checkpoints]
    for instance in sorted((run.directory.path / INSTANCES).glob("*/")):
        places.append(instance_location(location, instance.name) if location else RunDirectory(instance).checkpoints)
    return [manifest for place in places for manifest in read_manifests(place)]


@dataclass
class Following:
    """Runs a follower, keeps its state in a file, and prints its reports. ``once``: stop after the first round."""

    past: PastRun
    history: History
    options: FollowOptions
    meter: "AuditMeter | None"
    once: bool = False
    say: Print = lambda line: print(line, flush=True)
    _file: AuditStateFile | None = field(default=None, init=False)
    _follower: AuditFollower = field(init=False)
    _saved_at: float = field(default_factory=time.monotonic, init=False)
    _printed_kinds: frozenset[tuple[str, str]] = field(default=frozenset(), init=False)

    def __post_init__(self) -> None:
        self._file, known, notice = open_state(self.past.directory.audit, self.past.name)
        if notice:
            self._note(notice)
        self._follower = self._follower_of(known)

    async def run(self, stop: asyncio.Event) -> int:
        """Audit at every interval, and return the exit code.

        Consumes: steps, skips, trajectories, work-orders, dead-letters, checkpoints. Produces: lines, gauges, its file.
        Waits for: the interval, the broker.
        On failure: after a first report, it tries an unreachable broker again. Any other error ends it.
        On stop: the running round is cancelled; the records that it has read are kept.
        """
        report: AuditReport | None = None
        while not stop.is_set():
            began = time.monotonic()
            try:
                newer = await self._round_until(stop)
            except (BusError, DataLossRefused) as error:
                if report is None and not isinstance(error, DataLossRefused):
                    raise
                self._note(f"could not read the topics, trying again: {error}")
                newer = None
            if newer is not None:
                report = newer
                self._print(report)
                if not report.is_balanced and (self.options.fail_fast or self.once):
                    return NOT_BALANCED
                if self.once or (report.is_finished and not self.new_records):
                    self._note(f"the run is {'finished' if report.is_finished else 'not running'}")
                    return 0 if report.is_balanced else NOT_BALANCED
            if await wait_for_event(stop, max(0.0, self.options.interval_s - (time.monotonic() - began))):
                break
        return 0 if report is None or report.is_balanced else NOT_BALANCED

    async def round(self) -> AuditReport:
        """Audit once, and save the state if it is due.

        Raises:
            DataError: see ``AuditFollower.advance``.
            BusError: see ``AuditFollower.advance``.
        """
        try:
            report = await self._follower.advance()
        except TopicsRecreated as error:
            self._note(f"{error}; starting again from their first records")
            if self._file is not None:
                self._file.clear()
            self._follower = self._follower_of(FollowedRun(self.past.name))
            report = await self._follower.advance()
        if self._follower.packed or time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self._save()
        if self.meter is not None:
            self.meter.set_report(report)
        return report

    @property
    def new_records(self) -> int:
        """Records that the last round read."""
        return self._follower.new_records

    def close(self) -> None:
        """Save the state, and release the file."""
        self._save()
        if self._file is not None:
            self._file.close()

    async def _round_until(self, stop: asyncio.Event) -> AuditReport | None:
        """The report of a round; None if ``stop`` was set before its end."""
        working, stopping = asyncio.create_task(self.round()), asyncio.create_task(stop.wait())
        try:
            while not working.done() and not stop.is_set():
                await asyncio.wait({working, stopping}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                if self.meter is not None:
                    self.meter.set_lag(self._follower.lag)
        finally:
            await end_tasks([working, stopping])
        return None if working.cancelled() else working.result()

    def _follower_of(self, known: FollowedRun) -> AuditFollower:
        return AuditFollower(self.history, lambda: checkpoints_of(self.past), known)

    def _save(self) -> None:
        if self._file is None:
            return
        try:
            self._file.save(self._follower.known)
        # A full disk is no reason to stop: records whose state could not be saved are read again after a restart.
        except DataError as error:
            self._note(str(error))
        self._saved_at = time.monotonic()

    def _print(self, report: AuditReport) -> None:
        kinds = frozenset((each.algorithm, each.kind.value) for each in report.violations)
        if self.options.as_json:
            head: dict[str, Any] = {"at": round(time.time(), 3), "new_records": self.new_records}
            self.say(json.dumps({**head, **report.to_json(), "since": self._follower.known.since}))
        else:
            self.say(f"{_clock()} {interval_line(report, self.new_records)}")
            # All violations are printed when their kinds change. Otherwise the line above says how many there are.
            for violation in report.violations if kinds != self._printed_kinds else ():
                self.say(f"{_clock()}   {violation}")
        self._printed_kinds = kinds

    def _note(self, text: str) -> None:
        if self.options.as_json:
            self.say(json.dumps({"at": round(time.time(), 3), "note": text}))
        else:
            self.say(f"{_clock()} {text}")


def _clock() -> str:
    return time.strftime("%H:%M:%S")


def interval_line(report: AuditReport, new_records: int) -> str:
    """The verdict and the totals in one line."""
    verdict = "balanced" if report.is_balanced else f"NOT BALANCED, {len(report.violations)} problems"
    waiting = sum((Counter(own.waiting) for own in report.algorithms), Counter[str]())
    why = ", ".join(f"{name} {count:,}" for name, count in waiting.items())
    total = report.to_json()["total"]
    parts = f"{total['trained']:,} trained + {total['skipped']:,} skipped + {total['pending']:,} pending"
    forgotten = sum(own.expired_fates for own in report.algorithms)
    more = f" + {forgotten:,} with an expired fate" if forgotten else ""
    carried = sum(own.carried_over for own in report.algorithms)
    more += f" + {carried:,} finished on another cluster" if carried else ""
    return f"{verdict}: {total['produced']:,} = {parts}{f' ({why})' if why else ''}{more}; {new_records:,} new"


@dataclass
class AuditMeter:
    """Prometheus metrics of the audit. Violations are counted when they appear."""

    meters: Meters
    _seen: Counter[tuple[str, str]] = field(default_factory=Counter)

    def set_report(self, report: AuditReport) -> None:
        """Set the metrics from the report of a round."""
        for own in report.algorithms:
            name = own.algorithm
            self.meters.set(float(own.is_balanced), "audit_balanced", name)
            self.meters.set(own.pending, "audit_pending_trajectories", name)
            self.meters.set(own.trained, "audit_trained_trajectories", name)
            self.meters.set(own.skipped_in_all, "audit_skipped_trajectories", name)
        found = Counter[tuple[str, str]]()
        for violation in report.violations:
            found[violation.algorithm, violation.kind.value] += violation.count
        for (algorithm, kind), count in (found - self._seen).items():
            self.meters.count("audit_problems", algorithm, kind, by=count)
        self._seen = found
        self.meters.set(report.seconds, "audit_duration_seconds")
        self.meters.set(time.time(), "last_audit_timestamp_seconds")
        self.set_lag(0)

    def set_lag(self, records: int) -> None:
        """Set the number of records that are still to be read."""
        self.meters.set(records, "audit_lag_records")


@contextmanager
def _served(past: PastRun, options: FollowOptions) -> "Iterator[AuditMeter | None]":
    """Serves figures while the block runs, if an option or a setting names a port."""
    metrics = past.settings.metrics
    # The endpoint adds this process's number to a base port, but the option names the port itself.
    base = metrics.port if options.metrics_port is None else options.metrics_port - first_port(0, PROCESS)
    if options.metrics_port is None and not metrics.port:
        yield None
        return
    meters = Meters(past.name)
    meters.set(1, "build_info", metadata.version("streamrl"), PROCESS, PROCESS)
    from streamrl.observability.metrics.exporting import TARGETS  # only here: it imports a Kafka client

    target = past.directory.path.parent / TARGETS / f"{past.name}-{PROCESS}.json"
    with endpoint(meters.registry, metrics.host, base, PROCESS, target):
        yield AuditMeter(meters)
