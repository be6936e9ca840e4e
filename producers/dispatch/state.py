"""The dispatcher's knowledge of the run, as one object that messages are applied to. Pure: no topics, no clock."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from streamrl.producers.dispatch.admission import HISTORY_STEPS, AdmissionLedger
from streamrl.producers.dispatch.choosing import Decision, EveryPrompt, PromptChooser
from streamrl.producers.dispatch.fleet import (
    ABSENT_TIMEOUTS,
    OVERCOMMIT,
    Candidate,
    Flight,
    FlightTable,
    LiveWorkers,
    SamplesInGrading,
    least_loaded,
)
from streamrl.producers.dispatch.plans import log_deviation_of
from streamrl.producers.dispatch.policies import OnePolicyDispatch, PolicyDispatch
from streamrl.producers.dispatch.progress import ExpectedLength, HeldSample, PlanAccuracy, Progress, TrainerPace
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.lengths.calibration import Calibration
from streamrl.producers.lengths.predictor import LengthPredictor, ObservedCompletion
from streamrl.schemas.control import Control, FlowControl, RunFinished
from streamrl.schemas.identifiers import PolicyVersion, make_trajectory_id, partial_partition_of
from streamrl.schemas.lineage import SurvivingSteps
from streamrl.schemas.messages import Message
from streamrl.schemas.profiles import DEFAULT_CURVE, DecodeCurve
from streamrl.schemas.reports import ENDS_GROUP, Heartbeat, SkipReason, SkipRecord, StepReport, WorkerState
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import (
    FinishedCompletion,
    FinishReason,
    PartialSource,
    Prompt,
    Trajectory,
    UngradedTrajectory,
    WorkOrder,
    aborted_trajectory,
)

MAX_TIMEOUT_FACTOR = 8
"""Most times ``order_timeout_s`` that an order may be without progress."""


@dataclass
class PromptCursor:
    """The position of the next prompt, also after a crash.

    The prompts of a window are sent in the order of a plan, and the next window is drawn only after all of them are
    sent. A window has at most groups_per_step prompts, so prompts that were drawn and not sent are within that many
    positions below the cursor.

    ``cursor``: every position below it was drawn; ``unsent``: positions below it that must be sent before any other;
    ``ordered``: groups that once had an order, by records other than the order.
    """

    window: int
    cursor: int = 0
    unsent: list[int] = field(default_factory=list)
    ordered: frozenset[str] = frozenset()
    _seen: set[int] = field(default_factory=set)

    def see(self, position: int) -> None:
        """Note that this position had an order, or was passed over."""
        self.pass_to(position + 1)
        self._seen.add(position)
        # Positions more than a window below the cursor were all sent.
        if len(self._seen) > 4 * self.window:
            self._forget()

    def pass_to(self, cursor: int) -> None:
        """Note that every position below this one was drawn."""
        self.cursor = max(self.cursor, cursor)

    def find_unsent(self, ordered: Iterable[str]) -> None:
        """After a restart, find the positions that the last dispatcher may have left unsent."""
        self._forget()
        self.unsent = [n for n in range(max(0, self.cursor - self.window), self.cursor) if n not in self._seen]
        # The order for a position may have expired; then steps and skips still name its group.
        self.ordered = frozenset(ordered) if self.unsent else frozenset()
        self._seen.clear()

    def next(self, count: int) -> list[int]:
        """The next positions, unsent ones first; they count as drawn."""
        # At most a window, because find_unsent looks back no further after a crash.
        count = min(count, self.window)
        found, self.unsent = self.unsent[:count], self.unsent[count:]
        if not found:
            found = list(range(self.cursor, self.cursor + count))
            self.cursor += count
        return found

    def upcoming(self, count: int) -> list[int]:
        """The positions that ``next`` will return after the unsent ones; they do not count as drawn."""
        return list(range(self.cursor, self.cursor + count))

    def _forget(self) -> None:
        self._seen = {n for n in self._seen if n >= self.cursor - self.window}


@dataclass
class _PromptTokens:
    """Tokens per character of a prompt, from all sampled prompts; a quarter before the first."""

    tokens: float = 1.0
    characters: float = 4.0

    def observe(self, prompt: Prompt, tokens: int) -> None:
        self.tokens += tokens
        self.characters += len(prompt.text)

    def of(self, prompt: Prompt) -> int:
        return math.ceil(len(prompt.text) * self.tokens / self.characters)


@dataclass(frozen=True)
class OtherRoles:
    """The settings of other roles that the dispatcher needs.

    ``curve``: a worker's decode steps, in seconds; its scale is corrected for each worker by its completions.
    ``curves``: of workers that differ, by worker id or engine name. ``seed``: of the random numbers of all samples;
    None leaves them to the engines. ``has_graders``: samples pass through graders on the way to the trainer.
    ``history_steps``: how many steps a resumed trainer may be behind the one before it.
    """

    curve: DecodeCurve = DEFAULT_CURVE
    curves: Mapping[str, DecodeCurve] = field(default_factory=dict)
    seed: int | None = None
    has_graders: bool = False
    history_steps: int = HISTORY_STEPS


class DispatchState:
    """Ledger, flights, fleet, progress, predictor and positions, kept consistent with each other.

    ``policies``: for one policy by default. ``has_other_trainer``: the trainer that ends groups has changed since the
    state was built. ``settled``: released groups that workers may delete, by worker and incarnation, then group id,
    with the attempt. ``chooser``: orders every prompt by default. ``decided``: positions since the last order, as in
    ``WorkOrder``; ``passed_over``: number of prompts so far that were drawn and not ordered.
    """

    def __init__(
        self,
        loop: LoopSettings,
        settings: DispatchSettings,
        predictor: LengthPredictor,
        roles: OtherRoles = OtherRoles(),
        policies: PolicyDispatch | None = None,
        chooser: PromptChooser | None = None,
    ) -> None:
        self._settings = settings
        self._roles = roles
        self.policies = policies or OnePolicyDispatch()
        self.chooser = chooser or EveryPrompt()
        self.decided: dict[int, float] = {}
        self._decided_before: dict[int, float] = {}
        self.passed_over = 0
        self.loop = loop
        self.ledger = AdmissionLedger(
            loop.groups_per_step,
            loop.staleness_bound,
            has_fixed_batches=loop.has_fixed_batches,
            history_steps=roles.history_steps,
        )
        self.flights = FlightTable()
        self.grading = SamplesInGrading()
        self.fleet = LiveWorkers(loop.heartbeat_timeout_s)
        self.progress = Progress(self.measured_curve, loop.max_completion_length)
        self.trainer = TrainerPace()
        self._prompts = _PromptTokens()
        self.positions = PromptCursor(loop.groups_per_step)
        self.plan_accuracy = PlanAccuracy()
        self.predictor = predictor
        self.calibration = Calibration(loop, buckets=predictor.buckets)
        self.mode: Literal["run", "pause", "drain"] = "run"
        self.surviving = SurvivingSteps()
        self._early_skips: list[SkipRecord] = []
        self.finished = False
        self.has_lost_samples = False
        self.has_other_trainer = False
        self.settled: dict[tuple[str, str], dict[str, int]] = {}
        self._newest_created_at = 0.0
        self.admitted = self.reordered = self.moved = self.given_up = 0

    @property
    def cursor(self) -> int:
        """Every prompt below this position was drawn."""
        return self.positions.cursor

    def measured_curve(self, worker_id: str) -> DecodeCurve:
        """The curve measured for this worker, else for its engine, else the general one."""
        heartbeat = self.fleet.get(worker_id)
        curve, curves = self._roles.curve, self._roles.curves
        of_engine = curves.get(heartbeat.engine, curve) if heartbeat else curve
        return curves.get(worker_id, of_engine)

    def prompt_tokens(self, prompt: Prompt) -> int:
        """Tokens of a prompt, estimated from its characters: only workers have the tokenizer."""
        return self._prompts.of(prompt)

    def recall(self, message: Message, now: float) -> None:
        """Apply a message from before this process started. The age of an old heartbeat is unknown."""
        if isinstance(message, Heartbeat):
            self.fleet.recall(message, now)
        else:
            self.observe(message, now)
            self.has_other_trainer = False  # nothing was counted for the earlier trainer yet

    def observe(self, message: Message, at: float) -> None:
        """Apply one message of any topic; ``at``: when it was read."""
        if isinstance(message, Control) and self.policies.observe(message):
            self.has_other_trainer = True
        match message:
            case Heartbeat():
                self.fleet.observe(message, at)
                self.flights.heard(message, at)
                self._take_released(message, at)
            case Trajectory() | UngradedTrajectory():
                self._produced(message, at)
            case StepReport():
                self._stepped(self.policies.as_announced(message), at)
            case SkipRecord():
                self._skipped(self.policies.row_as_announced(message), at)
            case FlowControl():
                self.mode = message.mode
            case RunFinished():
                # An end below the current version is that of an earlier run, which this one continues.
                current, last = self.ledger.current, self.policies.announced_number(message.step)
                self.finished = self.finished or current is None or last >= current.number

    def _take_released(self, heartbeat: Heartbeat, at: float) -> None:
        for flight, released in self.flights.let_go(heartbeat):
            # Read now, while the worker is known and so is the offset from which it wrote partials.
            flight.order = flight.order.replace(partials=self.partials_of(flight))
            flight.on_record = dict(released.samples)
            flight.is_released = True
            self._take_from_worker(flight, at)
        # In other states the worker reads no orders, so the same request would be sent with every heartbeat.
        if heartbeat.state is WorkerState.READY and (settled := self.flights.settled(heartbeat)):
            self.settled[heartbeat.worker_id, heartbeat.incarnation] = settled

    def _produced(self, trajectory: FinishedCompletion, at: float) -> None:
        """Note a sample on the trajectories topic or with the graders: in both cases no worker owes it any more."""
        if trajectory.source == "request":  # has no order and is of no prompt source
            return
        self.positions.see(trajectory.position)
        # The trainer refuses a trajectory whose id does not match its group, so here its sample stays missing.
        if trajectory.trajectory_id != make_trajectory_id(trajectory.group_id, trajectory.sample_index):
            return
        is_graded = isinstance(trajectory, Trajectory)
        if is_graded:  # before that, rewards are missing
            self.chooser.observe(trajectory)
        was_sampled = is_graded and self.grading.end(trajectory.group_id, trajectory.sample_index)
        flight = (
            self.flights.get(trajectory.group_id)
            if was_sampled
            else self.flights.produced(trajectory.group_id, trajectory.sample_index, at)
        )
        # A repeat, or a sample of a group that has ended.
        if flight is None:
            return
        if is_graded:
            self._arrived(trajectory, flight, at)
        else:
            self.grading.begin(trajectory.group_id, trajectory.sample_index)
        # The lines below ran for this sample when it went to the graders.
        if was_sampled:
            return
        length, sample = len(trajectory.token_ids), (trajectory.group_id, trajectory.sample_index)
        # Only a sample by the worker that has the order shows how fast that worker is.
        if flight.worker_id == trajectory.worker_id:
            # Tokens that other workers sampled before took this worker no time.
            begun = trajectory.parts[-1].start if trajectory.parts else 0
            self.progress.finished(flight.worker_id, sample, length - begun, at)
        elif flight.worker_id is not None:
            # A worker that had the order before delivered it, so the present one need not.
            self.progress.drop(flight.worker_id, [sample], at)
        self._prompts.observe(flight.order.prompt, len(trajectory.prompt_token_ids))
        if not flight.missing:
            self.plan_accuracy.over(trajectory.group_id, at)
        # An aborted sample was cut short, so its length tells nothing about the prompt.
        if trajectory.finish_reason is FinishReason.ABORT:
            return
        self.predictor.observe(ObservedCompletion.of(trajectory, flight.order.prompt))
        self.calibration.observe(flight.order.estimate, length, trajectory.dataset)

    def _arrived(self, trajectory: FinishedCompletion, flight: Flight, at: float) -> None:
        group_id, is_whole = trajectory.group_id, not flight.missing and not self.grading.has(trajectory.group_id)
        self.trainer.produced(
            group_id, len(trajectory.token_ids) + len(trajectory.prompt_token_ids), at, is_whole=is_whole
        )
        if is_whole:
            self.ledger.produced(group_id)

    def _stepped(self, report: StepReport, at: float) -> None:
        self.positions.pass_to(report.prompt_cursor)
        before = self.ledger.current
        if before is not None and report.version.lineage > before.lineage:
            # The trainer resumed further back than the ledger remembers: the groups in flight must be read from the
            # topics. The same holds after a move to another cluster, which has other offsets (carried_parts).
            too_far = report.version.number < before.number - self.ledger.history_steps
            # The trainer continues from steps that had been undone. Groups that they ended are in flight here.
            redone = report.parent is not None and not self.surviving.chain.holds(report.parent)
            self.has_lost_samples |= too_far or redone or bool(report.carried_parts)
        self.surviving.add(report)
        if not self.ledger.advance(report.version, report.group_ids):
            return
        # The trainer went back, so it will decide again about samples that it skipped since.
        if before is not None and report.version.lineage > before.lineage:
            self.flights.forget_skips_after(report.version.number)
        self.trainer.stepped(report, at)
        self._end(report.group_ids, at)
        # Rows that were read before this lineage's first report.
        early, self._early_skips = self._early_skips, []
        for skip in early:
            self._skipped(skip, at)

    def _end(self, group_ids: Iterable[str], at: float) -> None:
        for group_id in group_ids:
            if (flight := self.flights.get(group_id)) is not None and flight.missing:
                self._take_from_worker(flight, at)
            self.flights.end(group_id)
            self.grading.forget(group_id)
            self.trainer.forget(group_id)
            self.plan_accuracy.over(group_id, at)

    def _take_from_worker(self, flight: Flight, at: float) -> None:
        """Take a flight from its worker."""
        if flight.worker_id is not None:
            self.progress.drop(flight.worker_id, flight.samples, at)
            self.flights.release(flight)

    def _skipped(self, skip: SkipRecord, at: float) -> None:
        """Apply a skip row. Rows of a lineage wait for its first report, which shows which older steps are undone."""
        if skip.lineage > self.ledger.lineage:
            self._early_skips.append(skip)
            return
        if skip.reason is SkipReason.RETENTION_EXPIRED or self.policies.is_never_read(skip):
            self.has_lost_samples = True
        group_id = skip.group_id
        if group_id is None or skip.reason is SkipReason.DUPLICATE or not self.ledger.is_in_flight(group_id):
            return
        if not self.ledger.is_undone(skip.step, skip.lineage) and self._is_skipped_whole(group_id, skip):
            self.ledger.end(group_id, skip.step)
            self._end([group_id], at)

    def end_unread_group(self, group_id: str, at: float) -> None:
        """End a group that the trainer will not train, because it never reads one of the group's samples."""
        if self.ledger.is_in_flight(group_id):
            self.ledger.end(group_id, 0 if self.ledger.current is None else self.ledger.current.number)
            self._end([group_id], at)

    def _is_skipped_whole(self, group_id: str, skip: SkipRecord) -> bool:
        """Whether with this row nothing of the group can be trained any more.

        The samples of a group that a resumed trainer reads again are not known, so its first skip counts for all.
        Late samples of a group that will still be trained are skipped as ``group_incomplete`` too.
        """
        if skip.reason in ENDS_GROUP or self.flights.get(group_id) is None:
            return True
        sample = skip.trajectory_id or f"{skip.partition}@{skip.offset}"
        return self.flights.skip(group_id, sample, skip.step, closed=skip.reason is SkipReason.GROUP_INCOMPLETE)

    def restore(self, order: WorkOrder, now: float) -> None:
        """Apply an order of an earlier dispatcher. Heartbeats must be applied before."""
        self.see_positions(order)
        self._newest_created_at = max(self._newest_created_at, order.created_at)
        self.ledger.restore(order.group_id, order.admitted_version, order.due_step)
        # Each worker has its own partition, so an order may be read after the group's next order.
        if (flight := self.flights.get(order.group_id)) is not None and flight.order.attempt > order.attempt:
            return
        # If the order's incarnation is not the worker's present one, the worker restarted and the order counts as lost.
        known = self.fleet.get(order.worker_id)
        incarnation = order.incarnation or (known.incarnation if known is not None else None)
        self.flights.send(order, incarnation, now)

    def see_positions(self, order: WorkOrder) -> None:
        """Note the positions that an order of an earlier dispatcher shows to be decided."""
        self.positions.see(order.position)
        for position, probability in order.decided or ():
            if probability == 0.0:
                self.positions.see(position)
            else:
                self.positions.pass_to(position + 1)
                self._decided_before[position] = probability

    def was_ordered(self, group_id: str) -> bool:
        """Whether a drawn prompt's group has an order already, by an earlier dispatcher."""
        return group_id in self.positions.ordered or self.ledger.is_in_flight(group_id)

    def decide(self, position: int, prompt: Prompt) -> Decision:
        """Whether to order a drawn prompt. The next order reports it."""
        version = 0 if self.ledger.current is None else self.ledger.current.number
        is_ordered, chance = self.chooser.decide(position, prompt, version)
        if chance is None:
            return Decision(is_ordered, None)
        # An earlier dispatcher decided to order it, with a probability that other orders may have reported.
        if (probability := self._decided_before.get(position)) is not None:
            is_ordered, chance = True, chance.model_copy(update={"probability": probability})
        self.decided[position] = chance.probability if is_ordered else 0.0
        self.passed_over += not is_ordered
        return Decision(is_ordered, chance)

    def resume(self, now: float) -> None:
        """Start counting the workers' progress, after everything was restored.

        Samples that expired were not found just now, so they already count as missing and are not lost.
        """
        self.has_lost_samples = False
        unsent = set(self.positions.unsent)
        self._decided_before = {at: known for at, known in self._decided_before.items() if at in unsent}
        for flight in self.flights.unfinished():
            if flight.worker_id is not None and (heartbeat := self.fleet.get(flight.worker_id)) is not None:
                self._work_on(flight.order, heartbeat.capacity, now)

    def created_at(self, time_of_day: float) -> float:
        """The next group's time stamp: later than all before, even if the clock went back. The bound depends on it."""
        return max(time_of_day, math.nextafter(self._newest_created_at, math.inf))

    def admit(self, order: WorkOrder, worker: Candidate, now: float) -> None:
        """Note a new group that is about to be sent to a worker.

        Raises:
            LifecycleError: admission does not allow it.
        """
        # The ledger first: if it refuses, nothing else has changed.
        self.ledger.admit(order.group_id, worker.version)
        self._send(order, worker, now)
        self._newest_created_at = order.created_at
        self.positions.pass_to(order.position + 1)
        self.decided = {}  # the order reports them
        self.admitted += 1

    def reassign(self, order: WorkOrder, worker: Candidate, now: float) -> None:
        """Note a group's missing samples that are about to be sent to another worker.

        Raises:
            LifecycleError: the worker's weights are too old for the group.
        """
        self.ledger.move(order.group_id, worker.version)
        flight = self.flights.get(order.group_id)
        moved = flight is not None and flight.is_released
        if flight is not None:
            self._take_from_worker(flight, now)
        self._send(order, worker, now)
        if moved:
            self.moved += 1
        else:
            self.reordered += 1

    def _send(self, order: WorkOrder, worker: Candidate, now: float) -> None:
        self.flights.send(order, worker.incarnation, now)
        self._work_on(order, worker.capacity, now)

    def _work_on(self, order: WorkOrder, slots: int, now: float) -> None:
        flight = self.flights.get(order.group_id)
        assert flight is not None, "an order that was sent has a flight"
        self.progress.send(order.worker_id, slots, flight.samples, self._expected(order), now, flight.begun)

    def _expected(self, order: WorkOrder) -> ExpectedLength:
        median, upper = order.estimate.median, order.estimate.upper
        deviation = log_deviation_of(median, upper) if self.loop.num_generations == 1 else 0.0
        return ExpectedLength(median, deviation, self.prompt_tokens(order.prompt))

    def missing_samples_of(self, flight: Flight) -> list[HeldSample]:
        """The missing samples of a group, as a worker would have them that continues the group."""
        return self.progress.held_if_continued(self._expected(flight.order), flight.begun)

    def partials_of(self, flight: Flight) -> tuple[PartialSource, ...]:
        """Where workers that had a group's order may have left tokens that can still be trained.

        Whether tokens are there is not known here: the worker that gets the order looks.
        """
        order = flight.order
        if not self.ledger.is_trainable(order.group_id):
            return ()
        offsets = {source.partition: source.offset for source in order.partials}
        own = partial_partition_of(order.worker_id)
        if (offset := self.fleet.partials_from(order.worker_id, flight.incarnation)) is not None:
            offsets[own] = min(offset, offsets.get(own, offset))
        return tuple(PartialSource(partition=at, offset=first) for at, first in sorted(offsets.items()))

    def give_up(self, flight: Flight, now: float, time_of_day: float) -> list[Trajectory]:
        """Give up a group that was ordered too often; returns aborted samples to publish, which complete it.

        The trainer ends it, as any other group.
        """
        self.given_up += 1
        self._take_from_worker(flight, now)
        self.plan_accuracy.over(flight.order.group_id, now)
        reason = f"given up after {flight.lost + 1} orders: each worker was lost, or did not deliver it"
        aborted = [
            aborted_trajectory(flight.order, index, reason, rewards=(), now=time_of_day)
            for index in sorted(flight.missing)
        ]
        self.flights.give_up(flight)
        return aborted

    def lost(self, now: float) -> list[Flight]:
        """Groups with samples missing that no worker seems to work on. Changes nothing.

        The worker released the group, exited or restarted; or its heartbeats do not name the group, so the order was
        lost; or they show no progress. The total time of a completion does not count.
        """
        return [flight for flight in self.flights.unfinished() if not self._is_worked_on(flight, now)]

    def take_from_lost_workers(self, now: float) -> list[Flight]:
        """The groups of ``lost``, after taking them from their workers."""
        lost = self.lost(now)
        for flight in lost:
            self._take_from_worker(flight, now)
        return lost

    def _is_worked_on(self, flight: Flight, now: float) -> bool:
        if flight.worker_id is None:
            return False
        if not self.fleet.has(flight.worker_id, flight.incarnation, now):
            return False
        absent_since = flight.absent_since
        if absent_since is not None and now - absent_since > ABSENT_TIMEOUTS * self.loop.heartbeat_timeout_s:
            return False
        # Doubled with every attempt: a group that is slow on every worker is long, not lost.
        timeout_s = self._settings.order_timeout_s * min(1 << flight.lost, MAX_TIMEOUT_FACTOR)
        return now - flight.progress_at <= timeout_s

    def extend(self, seconds: float) -> None:
        """Extend all time-outs by seconds in which this process could not receive records."""
        self.fleet.extend(seconds)
        self.flights.extend(seconds)

    def choose(
        self,
        samples: int,
        may_take: Callable[[PolicyVersion], bool],
        now: float,
        other_than: str = "",
        policy: str = "",
    ) -> Candidate | None:
        """A worker of a policy with room for the samples and acceptable weights; None if there is none now.

        ``other_than``: a worker to choose only if there is no other.
        """
        # Many workers have the same version, and ``may_take`` asks the ledger.
        fits = functools.cache(may_take)
        candidates = [
            candidate
            for candidate in self.candidates(now)
            if candidate.policy == policy and candidate.has_room(samples, OVERCOMMIT) and fits(candidate.version)
        ]
        # The worker that lost the group is better than none.
        candidates = [candidate for candidate in candidates if candidate.worker_id != other_than] or candidates
        return least_loaded(candidates) if candidates else None

    def candidates(self, now: float) -> list[Candidate]:
        """The workers that take new orders, by name; without those that wait to become idle."""
        ready = sorted(self.fleet.ready(now), key=lambda heartbeat: heartbeat.worker_id)
        return [self.candidate(heartbeat) for heartbeat in ready if heartbeat.awaits is None]

    def candidate(self, heartbeat: Heartbeat) -> Candidate:
        """The worker of this heartbeat, with its present load."""
        sequences, tokens = self.flights.load(heartbeat.worker_id)
        # The trainer that ends groups cannot compare another policy's versions with its own. For this trainer, their
        # samples are as old as its current version at the time of the order.
        newest = self.ledger.current if heartbeat.policy else None
        return Candidate(
            worker_id=heartbeat.worker_id,
            incarnation=heartbeat.incarnation,
            policy=heartbeat.policy,
            version=newest or heartbeat.version,
            capacity=heartbeat.capacity,
            sequences=sequences,
            predicted_tokens=tokens,
            # The engine's own report of its cache takes precedence over a profile.
            kv_tokens=heartbeat.kv_tokens or self.measured_curve(heartbeat.worker_id).settings.kv_tokens,
        )

    def is_over(self, now: float) -> bool:
        """Whether the run has finished, or drains and no live worker owes a sample."""
        if self.finished or self.mode != "drain":
            return self.finished
        return not any(self._is_worked_on(flight, now) for flight in self.flights.unfinished())
