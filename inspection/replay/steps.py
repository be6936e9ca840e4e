"""Groups → the micro-batches of a step: as recorded, or as other settings would have cut them. Pure."""

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bus.history import History
from bus.port import Record, TopicPartition
from consumers.algorithms.advantages import Credit, ModelLimits, credit_group, deviation, skip_reason_of
from consumers.algorithms.settings import AlgorithmSettings
from consumers.batching.micro_batches import Group, MicroBatch, MicroBatcher, Sample, TrainingSample, collate
from consumers.batching.settings import BatchingSettings
from consumers.ingest.filters import weighted_reward
from inspection.audit.index import LineageLink, LineageStart, surviving_chain
from schemas.errors import UserError, WireError
from schemas.identifiers import PolicyVersion
from schemas.reports import RecordRef, RefusedStep, SkipRecord, StepReport
from schemas.topics import STEPS, TRAJECTORIES
from schemas.trajectories import Trajectory

# The recorded steps by lineage, and which of them lie on the chain that leads to a lineage. Pure. Invariant
# only_the_surviving_chain_counts: of an ancestor, only the steps up to where its child went on from count.


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
class StepLog:
    """The reports of one algorithm, as they stand on the steps topic; repeats of a version are ignored.

    ``births``: by lineage; one whose first report is gone is taken to begin with the first step that is left of it.
    """

    reports: dict[PolicyVersion, StepReport] = field(default_factory=dict)
    births: dict[int, LineageStart] = field(default_factory=dict)
    refused: list[RefusedStep] = field(default_factory=list)

    def observe(self, message: StepReport | RefusedStep) -> None:
        """Take the next message of the topic."""
        if isinstance(message, RefusedStep):
            self.refused.append(message)
            return
        lineage, step = message.version.lineage, message.step
        if message.group_ids:
            self.reports.setdefault(message.version, message)
            self.births.setdefault(lineage, LineageStart(lineage, step - 1, None, 0))
        else:
            self.births.setdefault(lineage, LineageStart(lineage, step, message.parent, message.parent_skips))

    @property
    def newest(self) -> int:
        """The newest lineage, whose chain is the one that survives.

        Raises:
            UserError: there are no reports.
        """
        if not self.births:
            raise UserError("expected reports of optimizer steps on the steps topic, got none: nothing was trained")
        return max(self.births)

    def chain(self, lineage: int | None = None) -> tuple[ChainSegment, ...]:
        """The stretches that a lineage (None: the newest) consists of, oldest first.

        Raises:
            UserError: there is no such lineage.
        """
        return tuple(
            ChainSegment(link.lineage, link.after + 1, self._last(link) if link.until is None else link.until)
            for link in self._links(lineage)
            if link.after is not None
        )

    def _links(self, lineage: int | None) -> tuple[LineageLink, ...]:
        number = self.newest if lineage is None else lineage
        if number not in self.births:
            known = ", ".join(str(each) for each in sorted(self.births))
            raise UserError(f"expected one of the lineages {known}, got {lineage}")
        known_by_then = {each: birth for each, birth in self.births.items() if each <= number}
        return surviving_chain(known_by_then, beginning_is_held=False).links

    def _last(self, link: LineageLink) -> int:
        steps = [version.number for version in self.reports if version.lineage == link.lineage]
        return max(steps, default=link.after or 0)

    def counts(self, version: PolicyVersion) -> bool:
        """Whether this step is in the surviving chain."""
        stretch = holding(self.chain(), version.number)
        return stretch is not None and stretch.lineage == version.lineage

    def counts_row(self, row: SkipRecord) -> bool:
        """Whether a skip row belongs to the surviving chain."""
        link = next((link for link in self._links(None) if link.lineage == row.lineage), None)
        return link is not None and (link.rows is None or row.sequence <= link.rows)

    def attempts(self, step: int, chain: Iterable[ChainSegment]) -> list[RefusedStep]:
        """Gradients of this step that were not applied, computed from weights of the chain."""
        lineages = {stretch.lineage for stretch in chain if stretch.first <= step <= stretch.last + 1}
        return [refused for refused in self.refused if refused.step == step and refused.version.lineage in lineages]


def holding(chain: Iterable[ChainSegment], step: int) -> ChainSegment | None:
    """The stretch that a step is in."""
    return next((stretch for stretch in chain if stretch.first <= step <= stretch.last), None)


Cut = Sequence[Sequence[RecordRef]]


@dataclass(frozen=True)
class Batch:
    """What one step computes with. ``rewards``: shaped, by trajectory; ``left_out``: not in the gradient, and why."""

    micro_batches: tuple[MicroBatch, ...]
    samples: dict[str, TrainingSample]
    rewards: dict[str, float]
    left_out: tuple[tuple[str, str], ...]
    reward_deviation: float

    @property
    def trajectory_ids(self) -> list[str]:
        """Rows in the order in which they enter the gradient."""
        return [ref.trajectory_id for batch in self.micro_batches for ref in batch.refs]

    @property
    def totals(self) -> tuple[int, int]:
        """Trained sequences and tokens, as the learner counts them: a first token is never trained."""
        per_row = [batch.loss_mask[:, 1:].sum(axis=1) for batch in self.micro_batches]
        return sum(int((rows > 0).sum()) for rows in per_row), sum(int(rows.sum()) for rows in per_row)

    def keeping(self, wanted: Iterable[str]) -> "Batch":
        """Only these rows; advantages stay what they are within the whole groups."""
        names = set(wanted)
        kept = tuple(part for batch in self.micro_batches if (part := rows_of(batch, names)) is not None)
        return replace(self, micro_batches=kept)


def as_recorded(groups: Iterable[Group], cut: Cut, algorithm: AlgorithmSettings, limits: ModelLimits) -> Batch:
    """The micro-batches in their recorded order of rows.

    Raises:
        UserError: a recorded row would not be trained under these settings.
    """
    credits = _credits(groups, algorithm, limits)
    samples = _samples(credits)
    if lacking := [ref.trajectory_id for rows in cut for ref in rows if ref.trajectory_id not in samples]:
        reasons = {sample.trajectory.trajectory_id: detail for credit in credits for sample, detail in credit.left_out}
        why = reasons.get(lacking[0], "its group is not trained")
        raise UserError(f"expected {lacking[0]} to be trained under the run's settings, got: {why}")
    return _batch(credits, samples, [collate([samples[ref.trajectory_id] for ref in rows]) for rows in cut])


def as_cut_anew(
    groups: Iterable[Group], algorithm: AlgorithmSettings, batching: BatchingSettings, limits: ModelLimits
) -> Batch:
    """The micro-batches that the trainer would have cut, had the groups come in this order."""
    credits = _credits(groups, algorithm, limits)
    batcher = MicroBatcher(batching)
    cut = [batch for credit in credits for batch in batcher.add(credit.training_samples)]
    return _batch(credits, _samples(credits), [*cut, *batcher.flush()])


def rows_of(batch: MicroBatch, wanted: set[str]) -> MicroBatch | None:
    """The rows of these trajectories at the batch's width; none if there are none."""
    rows = [index for index, ref in enumerate(batch.refs) if ref.trajectory_id in wanted]
    if len(rows) == len(batch.refs):
        return batch
    if not rows:
        return None
    return batch.take(rows)


def _credits(groups: Iterable[Group], algorithm: AlgorithmSettings, limits: ModelLimits) -> list[Credit]:
    """Of the groups that these settings let into a step."""
    credits = [credit_group(group, algorithm, limits) for group in groups]
    return [credit for credit in credits if skip_reason_of(credit, algorithm) is None]


def _samples(credits: Iterable[Credit]) -> dict[str, TrainingSample]:
    return {item.sample.ref.trajectory_id: item for credit in credits for item in credit.training_samples}


def _batch(credits: list[Credit], samples: dict[str, TrainingSample], cut: list[MicroBatch]) -> Batch:
    rewards: dict[str, float] = {}
    for credit in credits:
        members = [item.sample for item in credit.training_samples] + [sample for sample, _ in credit.left_out]
        members.sort(key=lambda sample: sample.trajectory.sample_index)
        rewards |= {
            sample.ref.trajectory_id: reward for sample, reward in zip(members, credit.rewards.tolist(), strict=True)
        }
    everything = [reward for credit in credits for reward in credit.rewards.tolist()]
    return Batch(
        micro_batches=tuple(cut),
        samples=samples,
        rewards=rewards,
        left_out=tuple((sample.ref.trajectory_id, why) for credit in credits for sample, why in credit.left_out),
        reward_deviation=deviation(np.array(everything, dtype=np.float64)),
    )


# Finds the step that somebody asks for, or says in one line why there is none. Pure.

Step = StepReport | RefusedStep


def taken_step(log: StepLog, step: int, lineage: int | None = None) -> StepReport:
    """The report of a step of the surviving chain, or of a lineage's own.

    Raises:
        UserError: the step was never taken, was undone by a crash, or its report is gone.
    """
    chain = log.chain(lineage)
    stretch = holding(chain, step)
    if stretch is None:
        raise UserError(_absent(log, step, chain, lineage))
    report = log.reports.get(PolicyVersion(stretch.lineage, step))
    if report is None:
        raise UserError(
            f"expected the report of step {step} (lineage {stretch.lineage}) on the steps topic, got none: "
            "retention has deleted it; choose a later step, or read an export made before"
        )
    return report


def steps_between(log: StepLog, first: int, last: int, lineage: int | None = None) -> list[StepReport]:
    """The reports of steps ``first`` to ``last``, both inclusive.

    Raises:
        UserError: one of them is missing, or there is nothing between.
    """
    if first > last:
        raise UserError(f"expected --steps FIRST:LAST with FIRST <= LAST, got {first}:{last}")
    return [taken_step(log, step, lineage) for step in range(first, last + 1)]


def refused_step(log: StepLog, step: int, attempt: int | None, lineage: int | None = None) -> RefusedStep:
    """An attempt at a step whose gradient was not applied, counted from 1; None: the only one.

    Raises:
        UserError: there is no such attempt, or there are several and none was named.
    """
    attempts = log.attempts(step, log.chain(lineage))
    if attempt is None and len(attempts) == 1:
        return attempts[0]
    if attempt is None or not 1 <= attempt <= len(attempts):
        raise UserError(
            f"expected an attempt at step {step} that was refused, got {attempt or 'none'}: {listed(attempts)}"
        )
    return attempts[attempt - 1]


def listed(attempts: Sequence[RefusedStep]) -> str:
    """Refused attempts in one line."""
    if not attempts:
        return "this step was never refused"
    return "; ".join(
        f"--attempt {number} ({refused.version}): {refused.problem}" for number, refused in enumerate(attempts, 1)
    )


def _absent(log: StepLog, step: int, chain: Sequence[ChainSegment], lineage: int | None) -> str:
    if attempts := log.attempts(step, chain):
        return f"expected a step that was taken, got step {step}, which was only refused: {listed(attempts)}"
    there = ", ".join(str(stretch) for stretch in chain if stretch.last >= stretch.first) or "no step yet"
    undone = [version for version in log.reports if version.number == step and not log.counts(version)]
    if undone and lineage is None:
        version = max(undone)
        return (
            f"expected a step of the surviving chain ({there}), got step {step}, which lineage {version.lineage} took "
            f"and a crash undid; replay it with --lineage {version.lineage}"
        )
    return f"expected one of {there}, got step {step}"


# Reads the steps topic, and the trajectories that a step took. Works on any history and writes nothing.

NAMED = 3
"""Missing places that an error spells out."""
FETCHED = 2048
"""Records fetched at once: enough to make the way to the broker worth it, few enough to be held."""


async def read_steps(history: History, run: str, algorithm: str) -> StepLog:
    """The log of one algorithm's steps."""
    log = StepLog()
    async for record in history.records(STEPS.full_name(run)):
        try:
            message = record.message()
        except WireError:
            continue
        if isinstance(message, StepReport | RefusedStep) and message.algorithm == algorithm:
            log.observe(message)
    return log


async def read_groups(
    history: History, run: str, steps: Iterable[Step], weights: Mapping[str, float]
) -> AsyncGenerator[tuple[Step, tuple[Group, ...]], None]:
    """The groups of each step as the trainer saw them: samples by index, groups in the order they were taken in.

    Raises:
        UserError: a record is gone, or is another one than was trained.
    """
    topic = TRAJECTORIES.full_name(run)
    for together in _chunks(steps):
        places = [(ref.partition, ref.offset) for step in together for ref in refs_of(step)]
        records = await history.fetch(topic, places)
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
    """Steps whose records are fetched in one go."""
    together: list[Step] = []
    for step in steps:
        together.append(step)
        if sum(len(refs_of(each)) for each in together) >= FETCHED:
            yield together
            together = []
    if together:
        yield together


def _sample(record: Record, ref: RecordRef, weights: Mapping[str, float]) -> Sample:
    try:
        message = record.message()
    except WireError as error:
        raise UserError(f"expected trajectory {ref.trajectory_id} at {_place(record)}, got: {error}") from error
    if not isinstance(message, Trajectory) or message.trajectory_id != ref.trajectory_id:
        found = message.trajectory_id if isinstance(message, Trajectory) else message.SCHEMA
        raise UserError(
            f"expected trajectory {ref.trajectory_id} at {_place(record)}, got {found}: the topic was deleted and made "
            "anew, or belongs to another run; read an export made before"
        )
    reward, _ = weighted_reward(message, weights)
    return Sample(message, ref, reward, len(record.value or b""))


def _grouped(step: Step, samples: Iterable[Sample]) -> tuple[Group, ...]:
    members: dict[str, list[Sample]] = {group_id: [] for group_id in step.group_ids}
    for sample in samples:
        members.setdefault(sample.trajectory.group_id, []).append(sample)
    return tuple(_group(group_id, found) for group_id, found in members.items() if found)


def _group(group_id: str, samples: list[Sample]) -> Group:
    ordered = sorted(samples, key=lambda sample: sample.trajectory.sample_index)
    return Group(group_id, min(sample.trajectory.created_at for sample in ordered), tuple(ordered))


def _place(record: Record) -> str:
    return f"{record.topic}[{record.partition}]@{record.offset}"


async def _gone(history: History, topic: str, step: int, missing: list[RecordRef]) -> str:
    extents = await history.extents(topic)
    places = ", ".join(f"[{ref.partition}]@{ref.offset}" for ref in sorted(missing, key=lambda ref: ref[1:])[:NAMED])
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    held = ", ".join(
        f"[{number}] {extent.first} to {extent.end - 1}"
        for number in sorted({ref.partition for ref in missing})
        if (extent := extents.get(TopicPartition(topic, number))) is not None
    )
    return (
        f"expected the trajectories of step {step} on {topic}, got none at {places}{more} (held: {held or 'nothing'}): "
        "retention has deleted them; choose a later step, or read an export made before"
    )
