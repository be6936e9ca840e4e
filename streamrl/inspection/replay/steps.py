"""Finds a recorded step's report, its trajectories, and its micro-batches. Writes nothing.

``StepLog`` holds the steps topic by lineage. Invariant only_the_surviving_chain_counts: an ancestor's steps count only
up to the step that its child started from.

``read_groups`` fetches a step's trajectories. ``recorded_batch`` packs them into micro-batches in the recorded order,
``rebatched`` as other batching settings would have packed them. The order of rows matters: floating-point sums depend
on it, and a replay must be equal to the last bit.
"""

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from streamrl.bus.history import History
from streamrl.bus.port import Record, TopicPartition, message_of
from streamrl.consumers.algorithms.advantages import Credit, ModelLimits, credit_group, skip_reason_of
from streamrl.consumers.algorithms.estimators import deviation
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.micro_batches import Group, MicroBatch, MicroBatcher, Sample, TrainingSample, collate
from streamrl.consumers.batching.settings import BatchingSettings, Packing
from streamrl.consumers.ingest.filters import sample_of, weighted_reward
from streamrl.observability.record_index.entries import StepKind, StepRow
from streamrl.schemas.errors import UserError, WireError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.lineage import LineageChain, LineageLink, LineageStart, surviving_chain
from streamrl.schemas.reports import RecordRef, RefusedStep, SkipRecord, StepReport
from streamrl.schemas.topics import STEPS, TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory

Step = StepReport | RefusedStep
RecordedMicroBatches = Sequence[Sequence[RecordRef]]
"""References by micro-batch and row, as a report names them."""

MAX_LISTED = 3
"""Missing records that an error lists."""
FETCH_SIZE = 2048
"""Records fetched at once: enough that the round trip to the broker matters little, and few enough for memory."""


@dataclass(frozen=True)
class ChainSegment:
    """Steps ``first`` to ``last`` (both inclusive; none if last < first) of one lineage, as part of a chain."""

    lineage: int
    first: int
    last: int

    def __str__(self) -> str:
        steps = f"steps {self.first} to {self.last}" if self.last >= self.first else "no step"
        return f"{steps} of lineage {self.lineage}"


@dataclass
class Lineages:
    """Which steps and skip rows of one algorithm survive.

    ``lineage_starts``: by lineage. If a lineage's first report is deleted, it counts as starting with its first
    remaining step. ``last_steps``: the last known step of each lineage.
    """

    lineage_starts: dict[int, LineageStart] = field(default_factory=dict)
    last_steps: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, first_reports: Iterable[StepRow], last_steps: dict[int, int]) -> "Lineages":
        """The lineages as the index of records has them."""
        starts = {}
        for row in first_reports:
            if row.kind == StepKind.STEP:
                starts[row.lineage] = LineageStart(row.lineage, row.step - 1, None, 0)
            else:
                known = row.parent_lineage is not None and row.parent_number is not None
                parent = PolicyVersion(row.parent_lineage or 0, row.parent_number or 0) if known else None
                start = LineageStart(row.lineage, row.step, parent, row.parent_skips, carried_parts=row.carried_parts)
                starts[row.lineage] = start
        return cls(starts, last_steps)

    @property
    def newest(self) -> int:
        """The newest lineage, whose chain is the one that survives.

        Raises:
            UserError: there are no reports.
        """
        if not self.lineage_starts:
            raise UserError("expected reports of optimizer steps on the steps topic, found none: nothing was trained")
        return max(self.lineage_starts)

    def chain(self, lineage: int | None = None) -> tuple[ChainSegment, ...]:
        """The segments of the chain that ends in a lineage (None: the newest), oldest first.

        Raises:
            UserError: there is no such lineage.
        """
        # An ancestor whose reports are all deleted has no known first step, and nothing to replay.
        return tuple(
            ChainSegment(link.lineage, link.after + 1, self._last(link) if link.until is None else link.until)
            for link in self._chain_to(lineage).links
            if link.after is not None
        )

    @property
    def begin(self) -> int:
        """The first lineage on this cluster: reports of lineages below it are about records of another cluster."""
        return surviving_chain(self.lineage_starts, beginning_is_held=False).begin

    def _chain_to(self, lineage: int | None) -> LineageChain:
        number = self.newest if lineage is None else lineage
        if number not in self.lineage_starts:
            known = ", ".join(str(each) for each in sorted(self.lineage_starts))
            raise UserError(f"expected one of the lineages {known}, got {lineage}")
        # The chain at the time of this lineage: later lineages may have cut it, or belong to another branch.
        known_by_then = {each: start for each, start in self.lineage_starts.items() if each <= number}
        return surviving_chain(known_by_then, beginning_is_held=False)

    def _last(self, link: LineageLink) -> int:
        return self.last_steps.get(link.lineage, link.after or 0)

    def counts(self, version: PolicyVersion) -> bool:
        """Whether this step is in the surviving chain."""
        segment = segment_with(self.chain(), version.number)
        return segment is not None and segment.lineage == version.lineage

    def counts_row(self, row: SkipRecord) -> bool:
        """Whether a skip row belongs to the surviving chain."""
        # A child starts from a checkpoint. It undid rows that are not in this checkpoint, with the steps after it.
        link = self._chain_to(None).link(row.lineage)
        return link is not None and link.holds_row(row.sequence)


@dataclass
class StepLog(Lineages):
    """The reports of one algorithm on the steps topic; repeats of a version are ignored."""

    reports: dict[PolicyVersion, StepReport] = field(default_factory=dict)
    refused: list[RefusedStep] = field(default_factory=list)

    def observe(self, message: StepReport | RefusedStep) -> None:
        """Add the next message of the topic."""
        if isinstance(message, RefusedStep):
            self.refused.append(message)
            return
        lineage, step = message.version.lineage, message.step
        if message.group_ids:
            self.reports.setdefault(message.version, message)
            self.last_steps[lineage] = max(self.last_steps.get(lineage, 0), message.version.number)
            # On the topic, a lineage's announcement comes before its steps. If it is still there, it is known by now.
            self.lineage_starts.setdefault(lineage, LineageStart(lineage, step - 1, None, 0))
        else:
            self.lineage_starts.setdefault(lineage, LineageStart.of(message))

    def attempts(self, step: int, chain: Iterable[ChainSegment]) -> list[RefusedStep]:
        """Refused attempts at this step whose gradients were computed from weights of the chain."""
        # A refused attempt at step n follows step n - 1, which may be the last of its segment.
        lineages = {segment.lineage for segment in chain if segment.first <= step <= segment.last + 1}
        return [refused for refused in self.refused if refused.step == step and refused.version.lineage in lineages]


def segment_with(chain: Iterable[ChainSegment], step: int) -> ChainSegment | None:
    """The segment that contains a step; None if there is none."""
    return next((segment for segment in chain if segment.first <= step <= segment.last), None)


@dataclass(frozen=True)
class StepBatch:
    """The inputs of one step. ``rewards``: shaped, by trajectory; ``left_out``: trajectories that are not in the
    gradient, and why.
    """

    micro_batches: tuple[MicroBatch, ...]
    samples: dict[str, TrainingSample]
    rewards: dict[str, float]
    left_out: tuple[tuple[str, str], ...]
    reward_deviation: float

    @property
    def trajectory_ids(self) -> list[str]:
        """Ids of the rows in the order in which they enter the gradient."""
        return [ref.trajectory_id for batch in self.micro_batches for ref in batch.refs]

    @property
    def totals(self) -> tuple[int, int]:
        """Trained sequences and tokens, as the learner counts them: a sequence's first token is never trained."""
        # Masks [B, S]; trained tokens by row [B].
        per_row = [batch.loss_mask[:, 1:].sum(axis=1) for batch in self.micro_batches]
        return sum(int((rows > 0).sum()) for rows in per_row), sum(int(rows.sum()) for rows in per_row)

    def keeping(self, wanted: Iterable[str]) -> "StepBatch":
        """The batch with only these rows. They keep the advantages that they have within their whole groups."""
        names = set(wanted)
        # A micro-batch without rows is dropped.
        kept = tuple(part for batch in self.micro_batches if (part := rows_of(batch, names)) is not None)
        return replace(self, micro_batches=kept)


def recorded_batch(
    groups: Iterable[Group], recorded: RecordedMicroBatches, algorithm: AlgorithmSettings, limits: ModelLimits
) -> StepBatch:
    """The micro-batches in their recorded order of rows.

    Raises:
        UserError: a recorded row would not be trained under these settings.
    """
    # Advantages are computed again from the rewards. Only the order and the packing are from the report.
    credits = _credits(groups, algorithm, limits)
    samples = _samples(credits)
    if lacking := [ref.trajectory_id for rows in recorded for ref in rows if ref.trajectory_id not in samples]:
        reasons = {sample.trajectory.trajectory_id: detail for credit in credits for sample, detail in credit.left_out}
        why = reasons.get(lacking[0], "its group is not trained")
        raise UserError(f"expected {lacking[0]} to be trained under the run's settings, got: {why}")
    return _batch(credits, samples, [collate([samples[ref.trajectory_id] for ref in rows]) for rows in recorded])


def rebatched(
    groups: Iterable[Group],
    algorithm: AlgorithmSettings,
    batching: BatchingSettings,
    limits: ModelLimits,
    packing: Packing = "padded",
) -> StepBatch:
    """The micro-batches that the trainer would have made if it had read the groups in this order."""
    credits = _credits(groups, algorithm, limits)
    batcher = MicroBatcher(batching, packing=packing)
    # Group by group, as in the trainer: where a micro-batch ends depends on the samples that the batcher holds.
    full = [batch for credit in credits for batch in batcher.hold(credit.training_samples)]
    return _batch(credits, _samples(credits), [*full, *batcher.flush()])


def rows_of(batch: MicroBatch, wanted: set[str]) -> MicroBatch | None:
    """The rows of these trajectories at the batch's width; None if there are none."""
    rows = [index for index, ref in enumerate(batch.refs) if ref.trajectory_id in wanted]
    if len(rows) == len(batch.refs):
        return batch
    if not rows:
        return None
    return batch.take(rows)


def _credits(groups: Iterable[Group], algorithm: AlgorithmSettings, limits: ModelLimits) -> list[Credit]:
    """The credits of those groups that these settings allow in a step."""
    credits = [credit_group(group, algorithm, limits) for group in groups]
    return [credit for credit in credits if skip_reason_of(credit, algorithm) is None]


def _samples(credits: Iterable[Credit]) -> dict[str, TrainingSample]:
    return {item.sample.ref.trajectory_id: item for credit in credits for item in credit.training_samples}


def _batch(credits: list[Credit], samples: dict[str, TrainingSample], micro_batches: list[MicroBatch]) -> StepBatch:
    rewards: dict[str, float] = {}
    for credit in credits:
        # ``credit.rewards`` has one reward per sample of the group, by index, including samples that are left out.
        members = [item.sample for item in credit.training_samples] + [sample for sample, _ in credit.left_out]
        members.sort(key=lambda sample: sample.trajectory.sample_index)
        rewards |= {
            sample.ref.trajectory_id: reward for sample, reward in zip(members, credit.rewards.tolist(), strict=True)
        }
    # ``scale_rewards = "batch"`` divides by the deviation of all rewards of the step, also of rows that are left out.
    everything = [reward for credit in credits for reward in credit.rewards.tolist()]
    return StepBatch(
        micro_batches=tuple(micro_batches),
        samples=samples,
        rewards=rewards,
        left_out=tuple((sample.ref.trajectory_id, why) for credit in credits for sample, why in credit.left_out),
        reward_deviation=deviation(np.array(everything, dtype=np.float64)),
    )


def taken_step(log: StepLog, step: int, lineage: int | None = None) -> StepReport:
    """The report of a step of the surviving chain, or of the chain that ends in ``lineage``.

    Raises:
        UserError: the step was never taken, was undone, or its report is deleted.
    """
    chain = log.chain(lineage)
    segment = segment_with(chain, step)
    if segment is None:
        raise UserError(_absent(log, step, chain, lineage))
    report = log.reports.get(PolicyVersion(segment.lineage, step))
    # The chain can contain a step whose report has expired: a child lineage names the step that it started from.
    if report is None:
        raise UserError(
            f"expected the report of step {step} (lineage {segment.lineage}) on the steps topic, found none: "
            "retention has deleted it; choose a later step, or read an older export"
        )
    return report


def steps_between(log: StepLog, first: int, last: int, lineage: int | None = None) -> list[StepReport]:
    """The reports of steps ``first`` to ``last``, both inclusive.

    Raises:
        UserError: one of them is missing, or ``first`` is above ``last``.
    """
    if first > last:
        raise UserError(f"expected --steps FIRST:LAST with FIRST <= LAST, got {first}:{last}")
    return [taken_step(log, step, lineage) for step in range(first, last + 1)]


def refused_step(log: StepLog, step: int, attempt: int | None, lineage: int | None = None) -> RefusedStep:
    """A refused attempt at a step. ``attempt``: its number, counted from 1; None: the only one.

    Raises:
        UserError: there is no such attempt, or there are several and ``attempt`` is None.
    """
    attempts = log.attempts(step, log.chain(lineage))
    if attempt is None and len(attempts) == 1:
        return attempts[0]
    if attempt is None or not 1 <= attempt <= len(attempts):
        raise UserError(
            f"expected the number of a refused attempt at step {step}, got {attempt or 'none'}: "
            f"{describe_attempts(attempts)}"
        )
    return attempts[attempt - 1]


def describe_attempts(attempts: Sequence[RefusedStep]) -> str:
    """Refused attempts in one line."""
    if not attempts:
        return "this step was never refused"
    return "; ".join(
        f"--attempt {number} ({refused.version}): {refused.problem}" for number, refused in enumerate(attempts, 1)
    )


def _absent(log: StepLog, step: int, chain: Sequence[ChainSegment], lineage: int | None) -> str:
    if attempts := log.attempts(step, chain):
        return f"expected a step that was taken, got step {step}, which was only refused: {describe_attempts(attempts)}"
    there = ", ".join(str(segment) for segment in chain if segment.last >= segment.first) or "no step yet"
    undone = [version for version in log.reports if version.number == step and not log.counts(version)]
    if undone and lineage is None:
        version = max(undone)
        return (
            f"expected a step of the surviving chain ({there}), got step {step}, which lineage {version.lineage} took "
            f"and a crash or a restore undid; replay it with --lineage {version.lineage}"
        )
    return f"expected one of {there}, got step {step}"


async def read_steps(history: History, run: str, algorithm: str) -> StepLog:
    """The log of one algorithm's steps."""
    log = StepLog()
    async for record in history.records(STEPS.full_name(run)):
        # If a report does not decode, only its own step is missing; all others can be replayed.
        message = message_of(record)
        if isinstance(message, StepReport | RefusedStep) and message.algorithm == algorithm:
            log.observe(message)
    return log


async def read_groups(
    history: History, run: str, steps: Iterable[Step], weights: Mapping[str, float]
) -> AsyncGenerator[tuple[Step, tuple[Group, ...]], None]:
    """The groups of each step as the trainer saw them: samples by index, groups in the order in which they were added.

    Raises:
        UserError: a record is deleted, or is not the one that was trained.
    """
    topic = TRAJECTORIES.full_name(run)
    # Several steps per fetch: a fetch opens a subscription, which costs more than the records of a small step.
    for together in _chunks(steps):
        positions = [(ref.partition, ref.offset) for step in together for ref in refs_of(step)]
        records = await history.fetch(topic, positions)
        for step in together:
            refs = refs_of(step)
            if missing := [ref for ref in refs if (ref.partition, ref.offset) not in records]:
                raise UserError(await _gone(history, topic, step.step, missing))
            samples = [_sample(records[ref.partition, ref.offset], ref, weights) for ref in refs]
            yield step, _grouped(step, samples)


def refs_of(step: Step) -> list[RecordRef]:
    """All records that a step names."""
    return [*(ref for batch in step.micro_batches for ref in batch), *step.left_out]


def _chunks(steps: Iterable[Step]) -> Iterator[list[Step]]:
    """Lists of steps whose records are fetched at once."""
    together: list[Step] = []
    for step in steps:
        together.append(step)
        # A step is never split, so a fetch may exceed ``FETCH_SIZE``.
        if sum(len(refs_of(each)) for each in together) >= FETCH_SIZE:
            yield together
            together = []
    if together:
        yield together


def _sample(record: Record, ref: RecordRef, weights: Mapping[str, float]) -> Sample:
    try:
        message = record.message()
    except WireError as error:
        raise UserError(f"expected trajectory {ref.trajectory_id} at {_position(record)}, got: {error}") from error
    # A recreated topic has other records at the same offsets, with other ids.
    if not isinstance(message, Trajectory) or message.trajectory_id != ref.trajectory_id:
        found = message.trajectory_id if isinstance(message, Trajectory) else message.SCHEMA
        raise UserError(
            f"expected trajectory {ref.trajectory_id} at {_position(record)}, got {found}: the topic was deleted and "
            "created again, or belongs to another run; read an older export"
        )
    reward, _ = weighted_reward(message, weights)
    return sample_of(message, ref, reward, weights)


def _grouped(step: Step, samples: Iterable[Sample]) -> tuple[Group, ...]:
    # The dictionary keeps the order in which the report lists the groups, for any order of the records.
    members: dict[str, list[Sample]] = {group_id: [] for group_id in step.group_ids}
    for sample in samples:
        members.setdefault(sample.trajectory.group_id, []).append(sample)
    return tuple(_group(group_id, found) for group_id, found in members.items() if found)


def _group(group_id: str, samples: list[Sample]) -> Group:
    ordered = sorted(samples, key=lambda sample: sample.trajectory.sample_index)
    return Group(group_id, min(sample.trajectory.created_at for sample in ordered), tuple(ordered))


def _position(record: Record) -> str:
    return f"{record.topic}[{record.partition}]@{record.offset}"


async def _gone(history: History, topic: str, step: int, missing: list[RecordRef]) -> str:
    extents = await history.extents(topic)
    positions = ", ".join(
        f"[{ref.partition}]@{ref.offset}" for ref in sorted(missing, key=lambda ref: ref[1:])[:MAX_LISTED]
    )
    more = f" and {len(missing) - MAX_LISTED} more" if len(missing) > MAX_LISTED else ""
    held = ", ".join(
        f"[{number}] {extent.first} to {extent.end - 1}"
        for number in sorted({ref.partition for ref in missing})
        if (extent := extents.get(TopicPartition(topic, number))) is not None
    )
    return (
        f"expected the trajectories of step {step} on {topic}, found none at {positions}{more} "
        f"(it holds {held or 'nothing'}): retention has deleted them; choose a later step, or read an older export"
    )
