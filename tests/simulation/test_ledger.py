"""The judge of training finds each kind of fault in what was written of an algorithm, and nothing in sound books."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from streamrl.schemas.identifiers import PolicyVersion, group_id_of
from streamrl.schemas.reports import RecordRef, SkipReason, SkipRecord, StepReport
from streamrl.schemas.trajectories import Trajectory, VersionSpan
from tests.fakes.messages import step_report
from tests.schemas.examples import examples
from tests.simulation.judges.ledger import Checkpoint, Evidence, judge_training


def trajectory(number: int, sampled_by: PolicyVersion) -> Trajectory:
    example = examples()["trajectory"]
    assert isinstance(example, Trajectory)
    length = len(example.token_ids)
    spans = (VersionSpan(version=sampled_by, start=0, end=length),)
    group_id = f"p/{number}/0"
    return example.replace(trajectory_id=f"{group_id}/0", group_id=group_id, sample_index=0, version_spans=spans)


def ref(number: int, offset: int | None = None) -> RecordRef:
    return RecordRef(f"p/{number}/0/0", 0, number if offset is None else offset)


def first(lineage: int, step: int = 0, parent: PolicyVersion | None = None, parent_skips: int = 0) -> StepReport:
    return step_report(lineage, step, parent=parent, parent_skips=parent_skips)


def step(lineage: int, number: int, *refs: RecordRef) -> StepReport:
    groups = tuple(group_id_of(reference.trajectory_id) for reference in refs)
    return first(lineage, number).replace(group_ids=groups, micro_batches=(refs,), parent=None)


def row(number: int, lineage: int = 1, sequence: int = 1, **fields: object) -> SkipRecord:
    return SkipRecord.model_validate(
        {
            "algorithm": "grpo",
            "reason": SkipReason.STALE,
            "trajectory_id": None,
            "group_id": None,
            "partition": 0,
            "offset": number,
            "step": 0,
            "lineage": lineage,
            "sequence": sequence,
            "sent_at": 0.0,
            **fields,
        }
    )


def checkpoint(lineage: int, number: int, low: int, contents: Iterable[RecordRef], skips: int = 0) -> Checkpoint:
    return Checkpoint(PolicyVersion(lineage, number), {"0": {"low": low, "done": []}}, tuple(contents), skips)


SOUND = Evidence(
    records={(0, number): trajectory(number, PolicyVersion(1, 0)) for number in range(5)},
    reports=[
        first(1),
        step(1, 1, ref(0), ref(1)),
        step(1, 2, ref(3), ref(4)),
        first(2, 1, PolicyVersion(1, 1), 1),
        first(2, 1, PolicyVersion(1, 1), 1),
        step(2, 2, ref(4), ref(3)),
        step(2, 2, ref(4), ref(3)),
    ],
    rows=[row(2), row(2), row(3, sequence=2)],
    groups_per_step=2,
    max_staleness=2,
    checkpoint=checkpoint(2, 2, 5, [ref(0), ref(1), ref(4), ref(3)]),
)


def rules(evidence: Evidence) -> set[str]:
    return {problem.rule for problem in judge_training(evidence)}


def test_sound_books_have_no_problems_although_a_crash_undid_a_step_and_a_row() -> None:
    assert rules(SOUND) == set()


@pytest.mark.parametrize(
    ("evidence", "rule"),
    [
        (replace(SOUND, reports=[*SOUND.reports, step(2, 3, ref(0), ref(1))]), "duplicate effect"),
        (replace(SOUND, rows=[*SOUND.rows, row(4, lineage=2)]), "ledger"),
        (replace(SOUND, rows=[]), "lost"),
        (replace(SOUND, rows=[*SOUND.rows, row(7, lineage=2)]), "phantom"),
        (replace(SOUND, reports=[*SOUND.reports, step(2, 3, ref(9), ref(8))]), "phantom"),
        (replace(SOUND, checkpoint=checkpoint(2, 2, 4, [ref(0), ref(1), ref(4), ref(3)])), "frontier"),
        (replace(SOUND, checkpoint=checkpoint(2, 2, 5, [ref(0), ref(1), ref(3), ref(3)])), "contents"),
        (replace(SOUND, checkpoint=checkpoint(1, 2, 5, [ref(0), ref(1), ref(3), ref(4)])), "lineage"),
        (replace(SOUND, groups_per_step=1), "step size"),
        (replace(SOUND, max_staleness=0), "staleness"),
        (replace(SOUND, reports=SOUND.reports[3:]), "lineage without a beginning"),
        (replace(SOUND, reports=[*SOUND.reports, step(2, 2, ref(3), ref(4))]), "two steps of one version"),
        (replace(SOUND, rows=[*SOUND.rows, row(4)]), "two rows of one number"),
        (replace(SOUND, reports=[*SOUND.reports, step(2, 4, ref(8), ref(9))]), "steps"),
    ],
)
def test_a_broken_rule_is_named(evidence: Evidence, rule: str) -> None:
    assert rule in rules(evidence)
