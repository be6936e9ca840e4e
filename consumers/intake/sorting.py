"""Sorts records: what does not decode, what is refused, and what becomes a member of a group.

Knows neither where records come from nor who takes the groups.
"""

from collections.abc import Callable, Mapping

import structlog

from consumers.batching.samples import Group, Sample
from consumers.intake.judging.breaker import CircuitBreaker
from consumers.intake.judging.dedupe import DedupeWindow, Place
from consumers.intake.judging.groups import Closed, GroupAssembler, Refusal
from consumers.intake.judging.reward import weighted_reward
from consumers.intake.judging.staleness import StalenessRule
from consumers.intake.ledger import Ledger
from consumers.intake.measures import IntakeMeasures
from consumers.intake.settings import IntakeSettings
from schemas.errors import MalformedFrame, WireError
from schemas.identifiers import PolicyVersion
from schemas.messages.reports import RecordRef, SkipReason
from schemas.messages.trajectories import FinishReason, Trajectory
from schemas.ports.bus import Record
from schemas.settings import LoopSettings

log = structlog.get_logger()


class Sorter:
    """The judgements in their order: decode, belongs, known, late, old, rewarded. ``finished``: ids of a checkpoint."""

    def __init__(
        self,
        loop: LoopSettings,
        settings: IntakeSettings,
        *,
        reward_weights: Mapping[str, float],
        current_version: Callable[[], PolicyVersion],
        ledger: Ledger,
        measures: IntakeMeasures,
        finished: Mapping[str, Place],
    ) -> None:
        groups = max(1_000, 8 * loop.max_groups_in_flight)
        self.rule = StalenessRule(loop.staleness_bound, settings.orphan_lineage, current_version())
        self.dedupe = DedupeWindow(groups * loop.num_generations)
        self.dedupe.restore(finished)
        self.assembler = GroupAssembler(settings.group_timeout_s, groups)
        self.assembler.restore(finished)
        self._weights = reward_weights
        self._current_version = current_version
        self._ledger = ledger
        self._measures = measures
        limit = settings.max_consecutive_poison
        self._undecodable = CircuitBreaker("undecodable records", limit, settings.max_undecodable_share)
        self._unrewarded = CircuitBreaker("trajectories without reward", limit, settings.max_unrewarded_share)

    def take(self, record: Record, now: float) -> Closed | None:
        """Judge a record that is new to the books; the group that it made whole, if any. ``now``: see the assembler.

        Raises:
            BadInput: too much of it is bad.
        """
        trajectory = self._decoded(record)
        if trajectory is None:
            return None
        self._measures.observe_trajectory(trajectory)
        ref = RecordRef(trajectory.trajectory_id, record.partition, record.offset)
        if (objection := self._foreign(trajectory, ref)) is not None:
            self._ledger.skip(Refusal(ref, *objection), trajectory.group_id)
            return None
        if self.assembler.is_closed(trajectory.group_id):
            late = Refusal(ref, SkipReason.GROUP_INCOMPLETE, "its group was closed before it came")
            self._ledger.skip_late(late, trajectory.group_id)
            return None
        outcome = self._judged(trajectory, ref, len(record.value or b""))
        if isinstance(outcome, Refusal):
            self._ledger.release(ref)
        return self.assembler.add(trajectory, outcome, now)

    def outdated(self, group: Group) -> list[Refusal]:
        """The samples that were not too old when they were read, and are now."""
        current = self._current_version()
        verdicts = ((sample.ref, self.rule.verdict(sample.trajectory, current)) for sample in group.samples)
        return [Refusal(ref, *verdict) for ref, verdict in verdicts if verdict is not None]

    def _decoded(self, record: Record) -> Trajectory | None:
        try:
            message = record.message()
            if not isinstance(message, Trajectory):
                raise MalformedFrame(f"expected a trajectory, got a {message.SCHEMA}")
        except WireError as error:
            where = f"{record.topic}[{record.partition}]@{record.offset}"
            log.warning("undecodable record dead-lettered", where=where, error=str(error))
            self._ledger.rejects.dead_letter(record, error)
            ref = RecordRef("", record.partition, record.offset)
            self._ledger.skip(Refusal(ref, SkipReason.POISON, str(error)), record.key)
            self._undecodable.failed(f"{where}: {error}")
            return None
        self._undecodable.good()
        return message

    def _foreign(self, trajectory: Trajectory, ref: RecordRef) -> tuple[SkipReason, str] | None:
        """Why the record is no sample of its group, whatever it contains."""
        objection = self.assembler.objection(trajectory)
        if objection is None and not self.dedupe.accept(trajectory.trajectory_id, (ref.partition, ref.offset)):
            return SkipReason.DUPLICATE, "this trajectory was accepted before"
        return objection

    def _judged(self, trajectory: Trajectory, ref: RecordRef, size: int) -> Sample | Refusal:
        if (verdict := self.rule.verdict(trajectory, self._current_version())) is not None:
            return Refusal(ref, *verdict)
        if trajectory.finish_reason is FinishReason.ABORT:
            tokens = len(trajectory.token_ids)
            return Refusal(ref, SkipReason.POISON, f"generation was aborted after {tokens} tokens")
        reward, fault = weighted_reward(trajectory, self._weights)
        if fault is not None:
            self._unrewarded.failed(f"{trajectory.trajectory_id}: {fault}")
            return Refusal(ref, SkipReason.POISON, fault)
        self._unrewarded.good()
        return Sample(trajectory, ref, reward, size)
