"""Decodes dead letters with today's code, and computes their contribution at the newest checkpoint.

A dead letter keeps its bytes and headers. Additional ``dlq-*`` headers hold its position and why it was refused.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from streamrl.bus.port import Record
from streamrl.consumers.batching.micro_batches import Group, Sample
from streamrl.consumers.ingest.filters import sample_of, weighted_reward
from streamrl.inspection.replay.comparing import TrajectoryContribution, measure_contributions
from streamrl.inspection.replay.replayer import Replayer
from streamrl.inspection.replay.scratch_policy import ScratchPolicy
from streamrl.inspection.replay.steps import rebatched
from streamrl.observability.record_index.entries import Kind
from streamrl.observability.record_index.following import IndexFollower
from streamrl.observability.record_index.store import RecordIndex
from streamrl.schemas.errors import MalformedFrame, WireError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef
from streamrl.schemas.topics import DEAD_LETTERS, TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory

PREFIX = "dlq-"


@dataclass(frozen=True)
class ReplayedDeadLetter:
    """A dead letter. ``origin``: the record's topic, partition and offset; ``first_error``: why it was refused.

    ``problem``: why it cannot be used today either; empty if it can. Then ``row`` is its contribution to a step of its
    group alone. ``siblings``: number of the group's other samples on the topic; the advantage compares it with them.
    """

    offset: int
    origin: str
    first_error: str
    problem: str
    row: TrajectoryContribution | None = None
    siblings: int = 0


async def replay_dead_letters(replayer: Replayer, index: RecordIndex) -> tuple[str, list[ReplayedDeadLetter]]:
    """The version of the weights that were used (``none`` if none were needed), and every dead letter in order.

    Raises:
        UserError: some dead letters decode, but there are no weights to compute with.
    """
    dead_letters: list[ReplayedDeadLetter] = []
    samples: dict[int, Sample] = {}
    async for record in replayer.history.records(DEAD_LETTERS.full_name(replayer.run)):
        position = _origin(record)
        dead_letter = ReplayedDeadLetter(
            record.offset, f"{position[0]}[{position[1]}]@{position[2]}", _header(record, "dlq-error"), ""
        )
        try:
            samples[len(dead_letters)] = _sample(record, position, replayer.reward_weights)
        except WireError as error:
            dead_letter = replace(dead_letter, problem=str(error))
        dead_letters.append(dead_letter)
    # Load the model only if it is needed.
    if not samples:
        return "none", dead_letters
    policy, version = await replayer.newest()
    siblings = await _siblings(replayer, index, {sample.trajectory.group_id for sample in samples.values()})
    for number, sample in samples.items():
        group = _group(sample, siblings.get(sample.trajectory.group_id, {}))
        dead_letters[number] = await _contribution(replayer, policy, version, dead_letters[number], sample, group)
    return str(version), dead_letters


async def _contribution(
    replayer: Replayer,
    policy: ScratchPolicy,
    version: PolicyVersion,
    dead_letter: ReplayedDeadLetter,
    sample: Sample,
    group: Group,
) -> ReplayedDeadLetter:
    name = sample.trajectory.trajectory_id
    config = replayer.config
    batch = rebatched([group], config.algorithm, replayer.batching, policy.limits, config.training.packing)
    if name not in batch.samples:
        why = dict(batch.left_out).get(name, "its group is not trained under the run's settings")
        return replace(dead_letter, problem=why)
    if not policy.learner.algorithm.is_separable:
        why = f"usable, but {replayer.config.algorithm.name} has no separate share of the gradient for a trajectory"
        return replace(dead_letter, problem=why)
    rows = await replayer.compute(measure_contributions, policy, batch, version)
    row = next(row for row in rows if row.trajectory_id == name)
    return replace(dead_letter, row=row, siblings=len(group.samples) - 1)


def _group(sample: Sample, others: Mapping[int, Sample]) -> Group:
    """The sample and the others of its group, ordered by index."""
    # A group has one sample of each index: the dead letter replaces a sample of its index on the topic.
    members = {**others, sample.trajectory.sample_index: sample}
    ordered = tuple(members[index] for index in sorted(members))
    return Group(sample.trajectory.group_id, sample.trajectory.created_at, ordered)


async def _siblings(replayer: Replayer, index: RecordIndex, groups: Collection[str]) -> dict[str, dict[int, Sample]]:
    """The usable samples of these groups that are on the topic, the first of each index."""
    await IndexFollower(replayer.history, replayer.run, index).catch_up()
    places = [place for group in groups for place in index.places(group, Kind.TRAJECTORY)]
    positions = [(place.partition, place.offset) for place in places]
    records = await replayer.history.fetch(TRAJECTORIES.full_name(replayer.run), positions)
    found: dict[str, dict[int, Sample]] = {}
    for record in (records[position] for position in positions if position in records):
        try:
            sample = _sample(record, (record.topic, record.partition, record.offset), replayer.reward_weights)
        except WireError:
            continue
        # The record's own group counts; the index only says where to look.
        if sample.trajectory.group_id in groups:
            members = found.setdefault(sample.trajectory.group_id, {})
            members.setdefault(sample.trajectory.sample_index, sample)
    return found


def _sample(record: Record, position: tuple[str, int, int], weights: Mapping[str, float]) -> Sample:
    """Raises WireError: the record is not a trajectory, or has no reward."""
    trajectory = _decoded(record)
    reward, fault = weighted_reward(trajectory, weights)
    if fault is not None:
        raise MalformedFrame(fault)
    ref = RecordRef(trajectory.trajectory_id, *position[1:])
    return sample_of(trajectory, ref, reward, weights)


def _decoded(record: Record) -> Trajectory:
    # Without the dlq-* headers, this is the refused record again.
    headers = tuple((name, value) for name, value in record.headers if not name.startswith(PREFIX))
    message = record._replace(headers=headers).message()
    if not isinstance(message, Trajectory):
        raise MalformedFrame(f"expected a trajectory, got a {message.SCHEMA}")
    return message


def _origin(record: Record) -> tuple[str, int, int]:
    partition, offset = _header(record, "dlq-partition"), _header(record, "dlq-offset")
    return (
        _header(record, "dlq-topic"),
        int(partition) if partition.isdigit() else 0,
        int(offset) if offset.isdigit() else 0,
    )


def _header(record: Record, name: str) -> str:
    return dict(record.headers).get(name, b"").decode(errors="replace")
