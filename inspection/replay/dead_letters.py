"""Dead letters, decoded with the code of today: what they would have taught at the newest checkpoint.

Letters keep their bytes and headers unchanged; ``dlq-*`` headers say where they stood and why they were refused.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from bus.port import Record
from consumers.batching.micro_batches import Group, Sample
from consumers.ingest.filters import weighted_reward
from inspection.replay.comparing import Row, measured_rows
from inspection.replay.replayer import Replayer
from inspection.replay.scratch_policy import ScratchPolicy
from inspection.replay.steps import as_cut_anew
from schemas.errors import MalformedFrame, WireError
from schemas.identifiers import PolicyVersion
from schemas.reports import RecordRef
from schemas.topics import DEAD_LETTERS, TRAJECTORIES
from schemas.trajectories import Trajectory

PREFIX = "dlq-"


@dataclass(frozen=True)
class JudgedDeadLetter:
    """A dead letter. ``origin``: topic, partition and offset it stood at; ``first_error``: why it was refused then.

    ``problem``: why it still cannot be used; empty if it can, and then ``row`` is what it would have contributed to
    a step of its group alone (its advantage is within the ``siblings`` found on the topic and itself).
    """

    letter_offset: int
    origin: str
    first_error: str
    problem: str
    row: Row | None = None
    siblings: int = 0


async def judged_dead_letters(replayer: Replayer) -> tuple[str, list[JudgedDeadLetter]]:
    """The version of the weights that were used (``none``: none were needed), and every letter in its order.

    Raises:
        UserError: there are letters that decode, and no weights to judge them with.
    """
    letters: list[JudgedDeadLetter] = []
    samples: dict[int, Sample] = {}
    async for record in replayer.history.records(DEAD_LETTERS.full_name(replayer.run)):
        place = _origin(record)
        letter = JudgedDeadLetter(record.offset, f"{place[0]}[{place[1]}]@{place[2]}", _header(record, "dlq-error"), "")
        try:
            samples[len(letters)] = _sample(record, place, replayer.reward_weights)
        except WireError as error:
            letter = replace(letter, problem=str(error))
        letters.append(letter)
    if not samples:
        return "none", letters
    policy, version = await replayer.newest()
    siblings = await _siblings(replayer, {sample.trajectory.group_id for sample in samples.values()})
    for number, sample in samples.items():
        group = _group(sample, siblings.get(sample.trajectory.group_id, {}))
        letters[number] = await _judged(replayer, policy, version, letters[number], sample, group)
    return str(version), letters


async def _judged(
    replayer: Replayer,
    policy: ScratchPolicy,
    version: PolicyVersion,
    letter: JudgedDeadLetter,
    sample: Sample,
    group: Group,
) -> JudgedDeadLetter:
    name = sample.trajectory.trajectory_id
    batch = as_cut_anew([group], replayer.recipe.algorithm, replayer.batching, policy.limits)
    if name not in batch.samples:
        why = dict(batch.left_out).get(name, "its group is not trained under the run's settings")
        return replace(letter, problem=why)
    rows = await replayer.compute(measured_rows, policy, batch, version)
    row = next(row for row in rows if row.trajectory_id == name)
    return replace(letter, row=row, siblings=len(group.samples) - 1)


def _group(sample: Sample, others: Mapping[int, Sample]) -> Group:
    """The sample among the others of its group, in the order of their index."""
    members = {**others, sample.trajectory.sample_index: sample}
    ordered = tuple(members[index] for index in sorted(members))
    return Group(sample.trajectory.group_id, sample.trajectory.created_at, ordered)


async def _siblings(replayer: Replayer, groups: Collection[str]) -> dict[str, dict[int, Sample]]:
    """Usable samples of these groups on the topic, the first of each index."""
    found: dict[str, dict[int, Sample]] = {}
    async for record in replayer.history.records(TRAJECTORIES.full_name(replayer.run)):
        if record.key not in groups:
            continue
        try:
            sample = _sample(record, (record.topic, record.partition, record.offset), replayer.reward_weights)
        except WireError:
            continue
        members = found.setdefault(sample.trajectory.group_id, {})
        members.setdefault(sample.trajectory.sample_index, sample)
    return found


def _sample(record: Record, place: tuple[str, int, int], weights: Mapping[str, float]) -> Sample:
    """Raises WireError: the record is no trajectory, or one without a reward."""
    trajectory = _decoded(record)
    reward, fault = weighted_reward(trajectory, weights)
    if fault is not None:
        raise MalformedFrame(fault)
    return Sample(trajectory, RecordRef(trajectory.trajectory_id, *place[1:]), reward, len(record.value or b""))


def _decoded(record: Record) -> Trajectory:
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
