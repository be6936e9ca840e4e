"""Every kind of corruption, planted in a busy run that balances, is found, and its first trajectory named."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from streamrl.bus.port import Outgoing
from streamrl.consumers.ingest.ledger import KnownRecord
from streamrl.inspection.audit.checks import check_balance
from streamrl.inspection.audit.report import EXPLANATIONS, AuditReport, ViolationKind
from streamrl.inspection.audit.rows import RowContent
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import RecordRef, SkipReason, SkipRecord, StepReport
from streamrl.schemas.topics import SKIPS, STEPS, TRAJECTORIES, Topic
from tests.inspection.audit.test_balance import busy_world
from tests.inspection.audit.written_topics import RUN, WrittenTopics

SEEDS = range(3)


@dataclass
class Planted:
    """What must be found. ``name`` None: the violation has no trajectory."""

    kind: ViolationKind
    name: str | None
    verdict: AuditReport


def change(world: WrittenTopics, topic: Topic, edit: Callable[[Message], Message | None]) -> None:
    """Rewrite the messages of a topic; None drops one."""
    kept: list[tuple[Topic, Outgoing]] = []
    for where, out in world.written:
        if where is topic:
            message = edit(decode(out.value, out.headers))
            if message is None:
                continue
            out = out._replace(value=encode(message))
        kept.append((where, out))
    world.written = kept


def surviving_steps(world: WrittenTopics) -> list[StepReport]:
    """Of the newest lineage, up to its checkpoint."""
    newest = world.saved[-1].manifest.policy_version
    reports = [record.message() for record in world.records(STEPS)]
    return [
        r for r in reports if isinstance(r, StepReport) and r.micro_batches and (newest[0], 0) < r.version <= newest
    ]


def surviving_rows(world: WrittenTopics) -> list[SkipRecord]:
    newest = world.saved[-1].manifest
    rows = [record.message() for record in world.records(SKIPS)]
    return [
        r
        for r in rows
        if isinstance(r, SkipRecord) and r.lineage == newest.lineage and r.sequence <= newest.skips.count
    ]


def refs_of(report: StepReport) -> list[RecordRef]:
    return [ref for batch in report.micro_batches for ref in batch]


def with_refs(report: StepReport, refs: list[RecordRef]) -> StepReport:
    return report.replace(micro_batches=(tuple(refs),))


def edit_step(world: WrittenTopics, version: PolicyVersion, edit: Callable[[list[RecordRef]], list[RecordRef]]) -> None:
    def changed(message: Message) -> Message:
        hit = isinstance(message, StepReport) and message.version == version and message.micro_batches
        return with_refs(message, edit(refs_of(message))) if hit else message  # type: ignore[arg-type]

    change(world, STEPS, changed)


def lost_from_a_step(world: WrittenTopics) -> Planted:
    report = surviving_steps(world)[3]
    victim = refs_of(report)[1]
    edit_step(world, report.version, lambda refs: [ref for ref in refs if ref != victim])
    return Planted(ViolationKind.LOST, victim.trajectory_id, world.audit())


def lost_in_the_frontier(world: WrittenTopics) -> Planted:
    position = world.pending()[0]
    manifest = world.saved[-1].manifest
    frontier: dict[str, Any] = dict(manifest.frontier)
    part = frontier[str(position[0])]
    frontier[str(position[0])] = {**part, "done": [*part["done"], position[1]]}
    world.saved[-1].manifest = manifest.model_copy(update={"frontier": frontier})
    return Planted(ViolationKind.LOST, world.log[position[0]][position[1]], world.audit())


def trained_in_two_steps(world: WrittenTopics) -> Planted:
    one, other = surviving_steps(world)[1:3]
    victim = refs_of(one)[0]
    edit_step(world, other.version, lambda refs: [*refs, victim])
    return Planted(ViolationKind.TRAINED_TWICE, victim.trajectory_id, world.audit())


def trained_across_a_crash(world: WrittenTopics) -> Planted:
    counted = world.audit().algorithms[0].lineages
    reports = [record.message() for record in world.records(STEPS)]
    old = next(r for r in reports if isinstance(r, StepReport) and refs_of(r) and r.version[0] == counted[0])
    victim, last = refs_of(old)[0], surviving_steps(world)[-1]
    edit_step(world, last.version, lambda refs: [*refs, victim])
    return Planted(ViolationKind.TRAINED_TWICE, victim.trajectory_id, world.audit())


def trained_twice_in_one_step(world: WrittenTopics) -> Planted:
    report = surviving_steps(world)[0]
    victim = refs_of(report)[0]
    edit_step(world, report.version, lambda refs: [*refs, victim])
    return Planted(ViolationKind.TRAINED_TWICE, victim.trajectory_id, world.audit())


def a_duplicate_trained_too(world: WrittenTopics) -> Planted:
    victim = refs_of(surviving_steps(world)[0])[0]
    position = world.produce(victim.trajectory_id, 0)
    world.step([position])
    world.announce()
    return Planted(ViolationKind.TRAINED_TWICE, victim.trajectory_id, world.audit())


def trained_and_skipped(world: WrittenTopics) -> Planted:
    victim = refs_of(surviving_steps(world)[0])[0]
    world.skip((victim.partition, victim.offset), SkipReason.FILTERED)
    return Planted(ViolationKind.TWO_FATES, victim.trajectory_id, world.audit())


def skipped_by_two_rows(world: WrittenTopics) -> Planted:
    row = surviving_rows(world)[0]
    world.skip((row.partition, row.offset), SkipReason.FILTERED)
    return Planted(ViolationKind.SKIPPED_TWICE, row.trajectory_id, world.audit())


def a_step_refers_to_nothing(world: WrittenTopics) -> Planted:
    report = surviving_steps(world)[2]
    ghost = RecordRef("ghost/0/0/0", 1, 10_000)
    edit_step(world, report.version, lambda refs: [*refs, ghost])
    return Planted(ViolationKind.UNKNOWN_RECORD, ghost.trajectory_id, world.audit())


def a_step_names_another_trajectory(world: WrittenTopics) -> Planted:
    report = surviving_steps(world)[2]
    edit_step(world, report.version, lambda refs: [refs[0]._replace(trajectory_id="other/0/0/0"), *refs[1:]])
    return Planted(ViolationKind.WRONG_RECORD, "other/0/0/0", world.audit())


def the_record_changed_its_name(world: WrittenTopics) -> Planted:
    victim = refs_of(surviving_steps(world)[2])[0]
    world.log[victim.partition][victim.offset] = None
    index = world.index()
    records = index.trajectories.records
    names = [records.names[i] for i in range(len(records))]
    names[names.index(victim.trajectory_id)] = "other/0/0/0"
    fresh = type(records)(records.partitions, records.offsets)
    for name in names:
        fresh.names.append(name)
    index.trajectories.records = fresh
    return Planted(ViolationKind.WRONG_RECORD, victim.trajectory_id, check_balance(RUN, index, world.manifests()))


def the_frontier_forgot_a_record(world: WrittenTopics) -> Planted:
    """A restart would train it again."""
    victim = min(refs_of(surviving_steps(world)[4]), key=lambda ref: (ref.partition, ref.offset))
    manifest = world.saved[-1].manifest
    frontier: dict[str, Any] = dict(manifest.frontier)
    part = frontier[str(victim.partition)]
    done = {*range(part["low"]), *part["done"]} - {victim.offset}
    frontier[str(victim.partition)] = {"low": 0, "done": sorted(done)}
    world.saved[-1].manifest = manifest.model_copy(update={"frontier": frontier})
    return Planted(ViolationKind.NOT_FINISHED, victim.trajectory_id, world.audit())


def finished_before_it_was_trained(world: WrittenTopics) -> Planted:
    newest = world.saved[-1].manifest
    reports = [record.message() for record in world.records(STEPS)]
    last = max((r for r in reports if isinstance(r, StepReport)), key=lambda report: report.version)
    victim = min(refs_of(last), key=lambda ref: (ref.partition, ref.offset))
    frontier: dict[str, Any] = dict(newest.frontier)
    part = frontier[str(victim.partition)]
    frontier[str(victim.partition)] = {**part, "done": [*part["done"], victim.offset]}
    world.saved[-1].manifest = newest.model_copy(update={"frontier": frontier})
    return Planted(ViolationKind.FINISHED_EARLY, victim.trajectory_id, world.audit())


def the_log_is_shorter_than_the_frontier(world: WrittenTopics) -> Planted:
    manifest = world.saved[-1].manifest
    frontier: dict[str, Any] = {**manifest.frontier, "1": {"low": 99_999, "done": []}}
    world.saved[-1].manifest = manifest.model_copy(update={"frontier": frontier})
    return Planted(ViolationKind.ORPHAN_FRONTIER, None, world.audit())


def the_topic_was_made_anew(world: WrittenTopics) -> Planted:
    manifest = world.saved[-1].manifest
    anchors = {**manifest.anchors, "0": KnownRecord(offset=0, trajectory_id="of/another/topic/0")}
    world.saved[-1].manifest = manifest.model_copy(update={"anchors": anchors})
    return Planted(ViolationKind.ORPHAN_FRONTIER, "of/another/topic/0", world.audit())


def a_row_disappeared(world: WrittenTopics) -> Planted:
    victim = surviving_rows(world)[1]
    change(world, SKIPS, lambda m: None if (m.lineage, m.sequence) == (victim.lineage, victim.sequence) else m)  # type: ignore[attr-defined]
    return Planted(ViolationKind.SKIP_ROW_MISSING, None, world.audit())


def a_row_changed_its_reason(world: WrittenTopics) -> Planted:
    victim = surviving_rows(world)[1]
    reason = next(reason for reason in (SkipReason.STALE, SkipReason.FILTERED) if reason is not victim.reason)

    def edited(message: Message) -> Message:
        assert isinstance(message, SkipRecord)
        hit = (message.lineage, message.sequence) == (victim.lineage, victim.sequence)
        return message.replace(reason=reason) if hit else message

    change(world, SKIPS, edited)
    verdict = world.audit()
    return Planted(ViolationKind.SKIP_MISMATCH, verdict.violations[0].trajectory_id, verdict)


def the_tally_hash_differs(world: WrittenTopics) -> Planted:
    manifest = world.saved[-1].manifest
    skips = manifest.skips.model_copy(update={"hash": "0" * 32})
    world.saved[-1].manifest = manifest.model_copy(update={"skips": skips})
    return Planted(ViolationKind.SKIP_MISMATCH, None, world.audit())


def a_step_was_never_reported(world: WrittenTopics) -> Planted:
    gap, after = surviving_steps(world)[2:4]
    change(world, STEPS, lambda m: None if m.version == gap.version else m)  # type: ignore[attr-defined]
    first = min(refs_of(after), key=lambda ref: (ref.partition, ref.offset))
    return Planted(ViolationKind.STEP_GAP, first.trajectory_id, world.audit())


def a_lineage_never_announced_itself(world: WrittenTopics) -> Planted:
    parent = world.audit().algorithms[0].lineages[-2]

    def edited(message: Message) -> Message | None:
        assert isinstance(message, StepReport)
        return None if message.version.lineage == parent and not message.micro_batches else message

    change(world, STEPS, edited)
    return Planted(ViolationKind.BROKEN_CHAIN, None, world.audit())


def a_lineage_forgot_its_parent(world: WrittenTopics) -> Planted:
    newest = world.lineages

    def edited(message: Message) -> Message:
        assert isinstance(message, StepReport)
        hit = message.version.lineage == newest and not message.micro_batches
        return message.replace(parent=None) if hit else message

    change(world, STEPS, edited)
    return Planted(ViolationKind.BROKEN_CHAIN, None, world.audit())


def a_checkpoint_nobody_reported(world: WrittenTopics) -> Planted:
    manifest = world.saved[-1].manifest
    version = PolicyVersion(manifest.lineage, manifest.step + 7)
    world.saved[-1].manifest = manifest.model_copy(update={"policy_version": version, "step": version.number})
    return Planted(ViolationKind.UNREPORTED_CHECKPOINT, None, world.audit())


def a_checkpoint_of_a_lineage_nobody_knows(world: WrittenTopics) -> Planted:
    manifest = world.saved[-1].manifest
    version = PolicyVersion(manifest.lineage + 1, manifest.step)
    update = {"policy_version": version, "lineage": version.lineage}
    world.saved[-1].manifest = manifest.model_copy(update=update)
    return Planted(ViolationKind.UNREPORTED_CHECKPOINT, None, world.audit())


def one_version_with_two_contents(world: WrittenTopics) -> Planted:
    report = surviving_steps(world)[2]
    refs = refs_of(report)
    world.write(STEPS, with_refs(report, refs[:1]))
    return Planted(ViolationKind.CONFLICT, refs[0].trajectory_id, world.audit())


def one_row_number_with_two_contents(world: WrittenTopics) -> Planted:
    row = surviving_rows(world)[0]
    world.write(SKIPS, row.replace(offset=row.offset + 1))
    return Planted(ViolationKind.CONFLICT, row.trajectory_id, world.audit())


PLANTS = (
    lost_from_a_step,
    lost_in_the_frontier,
    trained_in_two_steps,
    trained_across_a_crash,
    trained_twice_in_one_step,
    a_duplicate_trained_too,
    trained_and_skipped,
    skipped_by_two_rows,
    a_step_refers_to_nothing,
    a_step_names_another_trajectory,
    the_record_changed_its_name,
    the_frontier_forgot_a_record,
    finished_before_it_was_trained,
    the_log_is_shorter_than_the_frontier,
    the_topic_was_made_anew,
    a_row_disappeared,
    a_row_changed_its_reason,
    the_tally_hash_differs,
    a_step_was_never_reported,
    a_lineage_never_announced_itself,
    a_lineage_forgot_its_parent,
    a_checkpoint_nobody_reported,
    a_checkpoint_of_a_lineage_nobody_knows,
    one_version_with_two_contents,
    one_row_number_with_two_contents,
)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_corruption_is_found_and_named(plant: Callable[[WrittenTopics], Planted], seed: int) -> None:
    planted = plant(busy_world(seed))
    assert not planted.verdict.is_balanced
    mine = [violation for violation in planted.verdict.violations if violation.kind is planted.kind]
    assert len(mine) == 1
    assert mine[0].trajectory_id == planted.name
    if planted.name is not None:
        assert planted.name in str(mine[0])
    assert EXPLANATIONS[planted.kind] in str(mine[0])


def of_kinds(*kinds: ViolationKind) -> None:
    """Everything planted that breaks a rule is found as one of the kinds that the rule has, and all of these are."""
    planted = [plant(busy_world(0)) for plant in PLANTS]
    found = {one.kind: {violation.kind for violation in one.verdict.violations} for one in planted}
    assert all(kind in found[kind] for kind in kinds)


def test_every_surviving_step_is_reported() -> None:
    of_kinds(ViolationKind.STEP_GAP, ViolationKind.BROKEN_CHAIN)


def test_no_record_has_two_fates() -> None:
    of_kinds(ViolationKind.TWO_FATES, ViolationKind.SKIPPED_TWICE)


def test_every_reference_is_right() -> None:
    of_kinds(ViolationKind.UNKNOWN_RECORD, ViolationKind.WRONG_RECORD)


def test_nothing_finished_is_unexplained() -> None:
    of_kinds(ViolationKind.LOST, ViolationKind.FINISHED_EARLY)


def test_nothing_counted_is_read_again() -> None:
    of_kinds(ViolationKind.NOT_FINISHED)


def test_the_checkpoint_contains_the_rows_on_the_topic() -> None:
    of_kinds(ViolationKind.SKIP_ROW_MISSING, ViolationKind.SKIP_MISMATCH)


def test_every_kind_of_violation_is_planted() -> None:
    found = {plant(busy_world(0)).kind for plant in PLANTS}
    assert found == set(ViolationKind)


def test_a_checkpoint_that_waits_for_its_report_is_no_violation() -> None:
    world = busy_world(0)
    world.step(world.pending()[:2])
    world.checkpoint()
    verdict = world.audit()
    assert verdict.is_balanced
    assert "has not been announced yet" in verdict.algorithms[0].notes[0]


def test_with_forgotten_steps_a_finished_record_proves_nothing() -> None:
    world = busy_world(0)
    index = world.index()
    own = index.algorithms["grpo"]
    for version in sorted(own.steps)[:4]:
        del own.steps[version]
    keep = [i for i in range(len(own.entries)) if own.entries.codes[i] or own.entries.numbers[i] > 4]
    fresh = type(own)(lineage_starts={k: v for k, v in own.lineage_starts.items() if k > 1}, steps=own.steps)
    for i in keep:
        e = own.entries
        if e.codes[i]:
            content = RowContent(e.codes[i], e.partitions[i], e.offsets[i], e.ends[i])
            fresh.rows.keep(e.lineages[i], e.numbers[i], content)
        fresh.entries.append(
            e.codes[i], e.lineages[i], e.numbers[i], (e.partitions[i], e.offsets[i]), e.ends[i], e.names[i]
        )
    index.algorithms["grpo"] = fresh
    index.steps_begin = False
    verdict = check_balance(RUN, index, world.manifests())
    assert verdict.violations == ()
    assert verdict.is_balanced
    assert verdict.algorithms[0].expired_fates > 0
    assert any(record.topic.endswith(TRAJECTORIES.name) for record in world.records(TRAJECTORIES))
