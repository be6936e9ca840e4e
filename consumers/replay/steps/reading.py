"""Reads the steps topic, and the trajectories that a step took. Works on any history and writes nothing."""

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping

from consumers.batching.samples import Group, Sample
from consumers.intake.judging.reward import weighted_reward
from consumers.replay.steps.chain import StepLog
from consumers.replay.steps.choosing import Step
from schemas.errors import UserError, WireError
from schemas.messages.reports import RecordRef, RefusedStep, StepReport
from schemas.messages.trajectories import Trajectory
from schemas.ports.bus import Record, TopicPartition
from schemas.ports.history import History
from schemas.wire.topics import STEPS, TRAJECTORIES

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
