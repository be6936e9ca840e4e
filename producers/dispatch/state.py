"""Everything the dispatcher knows of the run, as one object that messages are applied to. Pure: no topics, no clock."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Literal

from producers.dispatch.admission import AdmissionLedger
from producers.dispatch.fleet import Candidate, Expected, Fleet, Flight, FlightTable, Progress, least_loaded
from producers.dispatch.settings import DispatchSettings
from producers.dispatch.uncertainty import spread_of
from producers.dispatch.window import Outcomes, Positions
from producers.lengths.calibration import Calibration
from producers.lengths.estimators import Completion
from producers.lengths.predictor import LengthPredictor
from schemas.control import FlowControl, RunFinished
from schemas.identifiers import PolicyVersion
from schemas.messages import Message
from schemas.profiles import TYPICAL_CURVE, DecodeCurve
from schemas.reports import Heartbeat, SkipReason, SkipRecord, StepReport
from schemas.settings import LoopSettings
from schemas.trajectories import FinishReason, Trajectory, WorkOrder

LONGEST_PATIENCE = 8
"""Times ``order_timeout_s``, at most, that an order may take."""


class DispatchState:
    """Ledger, flights, fleet, progress, predictor and positions, kept in agreement."""

    def __init__(
        self,
        loop: LoopSettings,
        settings: DispatchSettings,
        predictor: LengthPredictor,
        curve: DecodeCurve = TYPICAL_CURVE,
    ) -> None:
        self._settings = settings
        self.curve = curve
        self.loop = loop
        self.ledger = AdmissionLedger(
            loop.groups_per_step, loop.staleness_bound, has_fixed_batches=loop.has_fixed_batches
        )
        self.flights = FlightTable()
        self.fleet = Fleet(settings.lease_s)
        self.progress = Progress(curve, loop.max_completion_length)
        self.positions = Positions(loop.groups_per_step)
        self.outcomes = Outcomes()
        self.predictor = predictor
        self.calibration = Calibration(loop, buckets=predictor.buckets)
        self.mode: Literal["run", "pause", "drain"] = "run"
        self._early: list[SkipRecord] = []
        self.finished = False
        self.has_lost_samples = False
        self._newest = 0.0
        self.admitted = self.reordered = self.given_up = 0

    @property
    def cursor(self) -> int:
        """Prompts below this position were drawn."""
        return self.positions.cursor

    def observe(self, message: Message, at: float) -> None:
        """Apply one message of any of the topics, read at this time."""
        match message:
            case Heartbeat():
                self.fleet.observe(message, at)
            case Trajectory():
                self._produced(message, at)
            case StepReport():
                self._stepped(message, at)
            case SkipRecord():
                self._skipped(message, at)
            case FlowControl():
                self.mode = message.mode
            case RunFinished() if self.ledger.current is None or message.step >= self.ledger.current.number:
                self.finished = True

    def _produced(self, trajectory: Trajectory, at: float) -> None:
        self.positions.see(trajectory.position)
        flight = self.flights.produced(trajectory.group_id, trajectory.sample_index, at)
        if flight is None:
            return
        length, sample = len(trajectory.token_ids), (trajectory.group_id, trajectory.sample_index)
        if flight.worker_id == trajectory.worker_id:
            self.progress.finished(flight.worker_id, sample, length, at)
        elif flight.worker_id is not None:
            self.progress.drop(flight.worker_id, [sample], at)
        if not flight.missing:
            self.ledger.produced(trajectory.group_id)
            self.outcomes.over(trajectory.group_id, at)
        if trajectory.finish_reason is FinishReason.ABORT:
            return
        self.predictor.observe(Completion.of(trajectory, flight.order.prompt))
        self.calibration.add(flight.order.estimate, length, trajectory.dataset)

    def _stepped(self, report: StepReport, at: float) -> None:
        self.positions.pass_to(report.prompt_cursor)
        before = self.ledger.current
        if not self.ledger.advance(report.version, report.group_ids):
            return
        if before is not None and report.version.lineage > before.lineage:
            self.flights.forget_skips_after(report.version.number)
        self._end(report.group_ids, at)
        early, self._early = self._early, []
        for skip in early:
            self._skipped(skip, at)

    def _end(self, group_ids: Iterable[str], at: float) -> None:
        for group_id in group_ids:
            if (flight := self.flights.get(group_id)) is not None and flight.missing:
                self._leave(flight, at)
            self.flights.end(group_id)
            self.outcomes.over(group_id, at)

    def _leave(self, flight: Flight, at: float) -> None:
        """Its worker does not work on it any more."""
        if flight.worker_id is not None:
            self.progress.drop(flight.worker_id, flight.samples, at)
            self.flights.release(flight)

    def _skipped(self, skip: SkipRecord, at: float) -> None:
        """Rows of a lineage count once its first report is known: that one says what older lineages had undone."""
        if skip.lineage > self.ledger.lineage:
            self._early.append(skip)
            return
        if skip.reason is SkipReason.RETENTION_EXPIRED:
            self.has_lost_samples = True
        group_id = skip.group_id
        if group_id is None or skip.reason is SkipReason.DUPLICATE or not self.ledger.is_in_flight(group_id):
            return
        if not self.ledger.is_undone(skip.step, skip.lineage) and self._is_skipped_whole(group_id, skip):
            self.ledger.end(group_id, skip.step)
            self._end([group_id], at)

    def _is_skipped_whole(self, group_id: str, skip: SkipRecord) -> bool:
        """A group that a resumed trainer reads again is not known in detail: its first skip counts for all of it.

        ``group_incomplete`` is also said of a late sample of a group that will still be trained.
        """
        if skip.reason is SkipReason.ZERO_ADVANTAGE or self.flights.get(group_id) is None:
            return True
        sample = skip.trajectory_id or f"{skip.partition}@{skip.offset}"
        return self.flights.skip(group_id, sample, skip.step, closed=skip.reason is SkipReason.GROUP_INCOMPLETE)

    def restore(self, order: WorkOrder, sent_at: float) -> None:
        """Apply an order of an earlier life of the dispatcher. Heartbeats must have been applied before."""
        self.positions.see(order.position)
        self._newest = max(self._newest, order.created_at)
        self.ledger.restore(order.group_id, order.admitted_version, order.due_step)
        self.flights.send(order, self.fleet.incarnation_at(order.worker_id, sent_at), sent_at)

    def resume(self, now: float) -> None:
        """Everything was restored; how far the workers have got is reckoned from now on."""
        for flight in self.flights.unfinished():
            if flight.worker_id is not None and (heartbeat := self.fleet.get(flight.worker_id)) is not None:
                self._work_on(flight.order, heartbeat.capacity, now)

    def created_at(self, now: float) -> float:
        """The next group's time stamp: later than all before, even if the clock went back; the bound rests on that."""
        return max(now, math.nextafter(self._newest, math.inf))

    def admit(self, order: WorkOrder, worker: Candidate, now: float) -> None:
        """A new group is about to be sent to a worker.

        Raises:
            LifecycleError: admission does not allow it.
        """
        self.ledger.admit(order.group_id, worker.version)
        self._send(order, worker, now)
        self._newest = order.created_at
        self.positions.pass_to(order.position + 1)
        self.admitted += 1

    def reassign(self, order: WorkOrder, worker: Candidate, now: float) -> None:
        """What is missing of a group is about to be sent to another worker.

        Raises:
            LifecycleError: the worker's weights are too old for the group.
        """
        self.ledger.move(order.group_id, worker.version)
        if (flight := self.flights.get(order.group_id)) is not None:
            self._leave(flight, now)
        self._send(order, worker, now)
        self.reordered += 1

    def _send(self, order: WorkOrder, worker: Candidate, now: float) -> None:
        self.flights.send(order, worker.incarnation, now)
        self._work_on(order, worker.capacity, now)

    def _work_on(self, order: WorkOrder, slots: int, now: float) -> None:
        flight = self.flights.get(order.group_id)
        assert flight is not None, "it was sent"
        median, upper = order.estimate.median, order.estimate.upper
        expected = Expected(median, spread_of(median, upper) if self.loop.num_generations == 1 else 0.0)
        self.progress.send(order.worker_id, slots, flight.samples, expected, now)

    def give_up(self, flight: Flight, now: float) -> None:
        """A group was ordered too often. If samples of it exist, the trainer ends it; otherwise it ends here."""
        self.given_up += 1
        self._leave(flight, now)
        self.outcomes.over(flight.order.group_id, now)
        if self.flights.give_up(flight):
            self.ledger.forget(flight.order.group_id)
            self.flights.end(flight.order.group_id)

    def lost(self, now: float) -> list[Flight]:
        """Flights with samples missing that nobody works on any more, as far as we can tell.

        Their worker is gone, restarted, or idle without having produced them; or nothing came for too long, although
        it seems well: then the order was lost, or the worker has it and is stuck.
        """
        gone = [flight for flight in self.flights.unfinished() if not self._is_worked_on(flight, now)]
        for flight in gone:
            self._leave(flight, now)
        return gone

    def _is_worked_on(self, flight: Flight, now: float) -> bool:
        if flight.worker_id is None:
            return False
        if not self.fleet.has(flight.worker_id, flight.incarnation, flight.sent_at, now):
            return False
        patience = self._settings.order_timeout_s * min(1 << flight.order.attempt, LONGEST_PATIENCE)
        return now - flight.progress_at <= patience

    def forgive(self, seconds: float) -> None:
        """For so long nothing could be heard of anyone: no worker is to blame."""
        self.fleet.extend_leases(seconds)
        self.flights.extend(seconds)

    def choose(
        self, samples: int, may_take: Callable[[PolicyVersion], bool], now: float, other_than: str = ""
    ) -> Candidate | None:
        """A worker with room for so many samples whose weights will do; none if there is none now.

        ``other_than``: a worker to take only if there is no other.
        """
        fits = functools.cache(may_take)
        candidates = [
            candidate
            for candidate in self.candidates(now)
            if candidate.has_room(samples, self._settings.overcommit) and fits(candidate.version)
        ]
        candidates = [candidate for candidate in candidates if candidate.worker_id != other_than] or candidates
        return least_loaded(candidates) if candidates else None

    def candidates(self, now: float) -> list[Candidate]:
        """The workers that take new orders, in the order of their names."""
        ready = sorted(self.fleet.ready(now), key=lambda heartbeat: heartbeat.worker_id)
        return [self.candidate(heartbeat) for heartbeat in ready]

    def candidate(self, heartbeat: Heartbeat) -> Candidate:
        """The worker of this heartbeat, with what it owes now."""
        sequences, tokens = self.flights.load(heartbeat.worker_id)
        return Candidate(
            worker_id=heartbeat.worker_id,
            incarnation=heartbeat.incarnation,
            version=heartbeat.version,
            capacity=heartbeat.capacity,
            sequences=sequences,
            predicted_tokens=tokens,
        )

    def is_over(self, now: float) -> bool:
        """The run finished, or it drains and no living worker still owes a sample."""
        return self.finished or (self.mode == "drain" and len(self.lost(now)) == len(list(self.flights.unfinished())))
