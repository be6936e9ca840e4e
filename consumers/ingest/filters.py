"""Decides about each record: undecodable, rejected with a reason, or a usable sample of its group.

Knows neither the source of records nor the consumer of groups. ``TrajectoryFilter`` runs the checks in order. The
checks follow it: staleness, reward, and the circuit breaker that stops a trainer whose input is mostly bad.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from streamrl.bus.port import Record
from streamrl.consumers.batching.micro_batches import Group, Sample
from streamrl.consumers.ingest.groups import ClosedGroup, GroupAssembler, Rejection
from streamrl.consumers.ingest.ledger import Ledger
from streamrl.consumers.ingest.limits import LIMITS, IntakeLimits
from streamrl.consumers.ingest.metrics import IngestMetrics
from streamrl.consumers.ingest.settings import IngestSettings
from streamrl.consumers.ingest.versions import CountedVersions
from streamrl.schemas.errors import BadInput, MalformedFrame, WireError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef, SkipReason
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import FinishReason, Trajectory, total_reward

log = structlog.get_logger()


@dataclass(frozen=True)
class IntakeRules:
    """Which samples of the stream may be trained.

    ``orphans_through``, ``changed_through``: lineages up to these are skipped, because the run restarted without them,
    or because its task changed after them; 0: none.
    """

    loop: LoopSettings
    settings: IngestSettings
    reward_weights: Mapping[str, float]
    orphans_through: int = 0
    changed_through: int = 0
    limits: IntakeLimits = LIMITS


class TrajectoryFilter:
    """The checks in their order: decodes, belongs to its group, no repeat, in time, fresh enough, rewarded.

    Invariant every_repeat_is_found: the assembler knows the samples of open groups, and the ledger those of all closed
    groups. So a repeat is refused, however late it arrives and however much was trained in between.
    """

    def __init__(self, rules: IntakeRules, versions: CountedVersions, ledger: Ledger, metrics: IngestMetrics) -> None:
        limits = rules.limits
        self._versions = versions
        self.rule = StalenessRule(versions.max_age, rules.orphans_through, versions.unit, rules.changed_through)
        self._max_wait_steps = 2 * (rules.loop.staleness_bound + 1)
        self.assembler = GroupAssembler()
        self._weights = rules.reward_weights
        self._ledger = ledger
        self._metrics = metrics
        in_a_row = limits.max_consecutive_faults
        self._undecodable = CircuitBreaker(
            "undecodable records", in_a_row, limits.max_undecodable_share, "correct the process that writes them"
        )
        self._unrewarded = CircuitBreaker(
            "trajectories without reward",
            in_a_row,
            rules.settings.max_unrewarded_share,
            "correct the reward function, or raise ingest.max_unrewarded_share",
        )
        self._refused = CircuitBreaker(
            "refused prompts",
            in_a_row,
            limits.max_refused_share,
            "correct the prompts or the model (streamrl run --dry-run says how many and why)",
        )

    def process(self, record: Record) -> ClosedGroup | None:
        """Check a record that is new to the ledger; returns the group if the record completed one.

        Raises:
            BadInput: too much of the input is bad.
        """
        trajectory = self._decode(record)
        if trajectory is None:
            return None
        self._metrics.observe_trajectory(trajectory)
        ref = RecordRef(trajectory.trajectory_id, record.partition, record.offset)
        # A record that is not a sample of its group is finished at once. All others are finished with their group.
        if (objection := self._objection(trajectory)) is not None:
            self._ledger.skip(Rejection(ref, *objection), trajectory.group_id)
            return None
        # After the check for repeats: the second copy of an accepted sample is a duplicate, not late.
        if self._ledger.is_closed(trajectory.group_id):
            late = Rejection(ref, SkipReason.GROUP_INCOMPLETE, "its group was closed before it arrived")
            self._ledger.skip_late(late, trajectory.group_id, trajectory.sample_index)
            return None
        outcome = self._evaluate(trajectory, ref)
        # A rejected sample still counts towards its group; otherwise the group could never be complete.
        if isinstance(outcome, Rejection):
            self._ledger.release(ref)
        return self.assembler.add(trajectory, outcome)

    def _decode(self, record: Record) -> Trajectory | None:
        try:
            message = record.message()
            if not isinstance(message, Trajectory):
                raise MalformedFrame(f"expected a trajectory, got a {message.SCHEMA}")
        except WireError as error:
            where = f"{record.topic}[{record.partition}]@{record.offset}"
            log.warning("undecodable record dead-lettered", where=where, error=str(error))
            self._ledger.rejections.dead_letter(record, error)
            ref = RecordRef("", record.partition, record.offset)
            self._ledger.skip(Rejection(ref, SkipReason.POISON, str(error)), record.key)
            # Last, since it may raise: the record that ends the trainer is in the ledger by then.
            self._undecodable.failed(f"{where}: {error}")
            return None
        self._undecodable.good()
        return message

    def _objection(self, trajectory: Trajectory) -> tuple[SkipReason, str] | None:
        """Why the record cannot be a sample of its group, by its names alone; None if it can."""
        objection = self.assembler.objection(trajectory)
        if objection is None and self._ledger.has_sample(trajectory.group_id, trajectory.sample_index):
            return (
                SkipReason.DUPLICATE,
                f"accepted before; this is attempt {trajectory.attempt}, {trajectory.worker_id}'s",
            )
        return objection

    def _evaluate(self, trajectory: Trajectory, ref: RecordRef) -> Sample | Rejection:
        # Age before rewards: failed rewards of samples that are too old do not count for the breaker.
        if (violation := self.rule.violation(trajectory, self._versions.current)) is not None:
            return Rejection(ref, *violation)
        if trajectory.refusal:
            reason = next(iter(trajectory.reward_errors.values()), "no worker can sample it")
            return Rejection(ref, SkipReason.REFUSED, f"{trajectory.refusal}: prompt {trajectory.prompt_id}: {reason}")
        if trajectory.finish_reason is FinishReason.ABORT:
            reason = next(iter(trajectory.reward_errors.values()), "the engine gave up on it")
            detail = f"generation was aborted after {len(trajectory.token_ids)} tokens: {reason}"
            return Rejection(ref, SkipReason.POISON, detail)
        # Workers abort completions in normal operation, so only failed rewards count for the breaker.
        reward, fault = weighted_reward(trajectory, self._weights)
        if fault is not None:
            self._unrewarded.failed(f"{trajectory.trajectory_id}: {fault}")
            return Rejection(ref, SkipReason.POISON, fault)
        self._unrewarded.good()
        return sample_of(trajectory, ref, reward, self._weights)

    def count_refused_prompt(self, closed: ClosedGroup) -> None:
        """Count whether a closed group's prompt was refused: then all its samples are refused.

        Raises:
            BadInput: too many prompts are refused.
        """
        refused = [found for found in closed.rejections if found.reason is SkipReason.REFUSED]
        if refused and len(refused) == len(closed.rejections) and not closed.group.samples:
            self._refused.failed(refused[0].detail)
        elif not refused:
            self._refused.good()

    def close_outdated(self, version: int | None = None) -> list[ClosedGroup]:
        """Close the groups that no worker can still be sampling.

        ``version``: the version number that was current when the topic held only records read by now; None: the
        present one. While the dispatcher waits for a sample of a group ordered at version b, no step after b +
        staleness bound + 1 is taken. Twice that distance leaves room for a resumed trainer, which may pass it.
        """
        newest = self._versions.current.number if version is None else version
        return self.assembler.close_outdated(newest - self._max_wait_steps)

    def outdated(self, group: Group) -> Rejection | None:
        """The rejection of a sample that has become too old since it was read; None if there is none."""
        current = self._versions.current
        for sample in group.samples:
            if (violation := self.rule.violation(sample.trajectory, current)) is not None:
                return Rejection(sample.ref, *violation)
        return None


@dataclass(frozen=True)
class StalenessRule:
    """Which samples are too old. ``max_staleness``: in ``unit``, the unit of ages.

    ``orphans_through``: all weights of lineages up to this one are orphaned, because the run restarted without them.
    Weights that were lost when a trainer crashed are like any others: importance weights correct their samples. No
    weight corrects a reward, though: ``changed_through`` is the last lineage before prompts, rewards or sampling
    changed.
    """

    max_staleness: int
    orphans_through: int = 0
    unit: str = "steps of staleness"
    changed_through: int = 0

    def violation(self, trajectory: Trajectory, current: PolicyVersion) -> tuple[SkipReason, str] | None:
        """Why the trajectory must be skipped; None if it may be trained."""
        lineage = first_lineage(trajectory)
        if self.orphans_through and lineage <= self.orphans_through:
            return (
                SkipReason.ORPHAN_LINEAGE,
                f"sampled by {trajectory.newest_version}, the run restarted without lineages to {self.orphans_through}",
            )
        if self.changed_through and lineage <= self.changed_through:
            return (
                SkipReason.TASK_CHANGED,
                f"sampled by {trajectory.oldest_version}, before prompts, rewards or sampling changed after lineage "
                f"{self.changed_through} (ingest.on_change)",
            )
        age = staleness(trajectory, current)
        if age > self.max_staleness:
            return SkipReason.STALE, f"expected at most {self.max_staleness} {self.unit}, got {age}"
        return None


def first_lineage(trajectory: Trajectory) -> int:
    """The first lineage whose weights sampled some of its tokens."""
    # A completion without tokens counts with the weights that it was admitted with. So does an arm's, whose spans are
    # versions of another policy.
    version = trajectory.admitted_version if trajectory.policy else trajectory.oldest_version
    return version.lineage


def staleness(trajectory: Trajectory, current: PolicyVersion) -> int:
    """Optimizer steps between the oldest weights that sampled a token and the current ones, at least 0.

    Numbers are compared across lineages, since each lineage continues the count of steps.
    """
    return max(0, current.number - oldest_version(trajectory))


def oldest_version(trajectory: Trajectory) -> int:
    """The number of the oldest weights that sampled a token; for an arm's, the version served when it was ordered."""
    if trajectory.policy:
        return trajectory.admitted_version.number
    # A completion without tokens has no spans: it counts with the weights that it was admitted with.
    return min((span.version.number for span in trajectory.version_spans), default=trajectory.admitted_version.number)


def weighted_reward(trajectory: Trajectory, weights: Mapping[str, float]) -> tuple[float, str | None]:
    """A trajectory's total reward, and the problem if it has none.

    If one function failed, the trajectory has no reward at all, because its siblings were scored by more functions.
    """
    if trajectory.reward_errors:
        return 0.0, "; ".join(f"reward {name}: {text}" for name, text in sorted(trajectory.reward_errors.items()))
    total = total_reward(trajectory.rewards, weights)
    if total is None:
        return 0.0, f"no reward applies, of {sorted(trajectory.rewards)}"
    return total, None


def sample_of(trajectory: Trajectory, ref: RecordRef, reward: float, weights: Mapping[str, float]) -> Sample:
    """An accepted trajectory with its weighted reward, in total and by turn."""
    if not any(turn.rewards for turn in trajectory.turns):
        return Sample(trajectory, ref, reward)
    by_turn = (total_reward(turn.rewards, weights) or 0.0 for turn in trajectory.turns)
    return Sample(trajectory, ref, reward, tuple(by_turn))


BREAKER_WINDOW = 1000  # the number in the description of ``ingest.max_unrewarded_share`` and in ``limits.py``
BREAKER_MIN_SEEN = 100
"""Fewest records for judging a share: among ten records, a single bad one would already be a tenth."""
BREAKER_MIN_BAD = 10
"""Most bad records that no share is judged by: a few damaged records are no trend, even early in a run."""


@dataclass
class CircuitBreaker:
    """Raises when too much input is bad: too many bad records in a row, or too many of the last ``BREAKER_WINDOW``.

    ``fault``: the kind of bad input, for the message.
    """

    fault: str
    max_consecutive: int
    max_share: float
    advice: str
    consecutive: int = 0
    bad: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=BREAKER_WINDOW))

    def good(self) -> None:
        """Count a record without this fault."""
        self._count(is_bad=False)
        self.consecutive = 0

    def failed(self, detail: str) -> None:
        """Count a record with this fault.

        Raises:
            BadInput: there are too many.
        """
        self._count(is_bad=True)
        self.consecutive += 1
        seen = len(self.recent)
        # Consecutive faults are counted too, since a share is judged only from BREAKER_MIN_SEEN records on: if all
        # records are bad, there is no need to wait for so many.
        is_judged = seen >= BREAKER_MIN_SEEN and self.bad > BREAKER_MIN_BAD
        if self.consecutive > self.max_consecutive or (is_judged and self.bad / seen > self.max_share):
            raise BadInput(
                f"expected few {self.fault}, got {self.consecutive} in a row and {self.bad} among the last {seen}, "
                f"the latest: {detail}; {self.advice}"
            )

    def _count(self, *, is_bad: bool) -> None:
        if len(self.recent) == BREAKER_WINDOW:
            self.bad -= self.recent[0]  # about to fall out of the window
        self.recent.append(is_bad)
        self.bad += is_bad
