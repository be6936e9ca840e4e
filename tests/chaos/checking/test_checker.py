"""Each rule holds for a sound history, and breaks for one that was spoilt in one place."""

from collections.abc import Callable
from typing import Any

import pytest

from streamrl.schemas.control import WeightsReady
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef, SkipRecord, StepReport
from tests.chaos.checking.books import Books, Produced, Reported
from tests.chaos.checking.checker import Durable, Findings, Finished, check
from tests.chaos.checking.recovery import FaultTime, recoveries
from tests.fakes.messages import heartbeat, skip_record

GROUPS = 1


def ref(offset: int) -> RecordRef:
    return RecordRef(f"d/{offset}/0/0", 0, offset)


def report(lineage: int, step: int, *offsets: int, **changes: Any) -> Reported:
    fields: dict[str, Any] = {
        "algorithm": "grpo",
        "step": step,
        "version": PolicyVersion(lineage, step),
        "manifest_sha256": None,
        "group_ids": tuple(f"d/{offset}/0" for offset in offsets),
        "micro_batches": ((tuple(ref(offset) for offset in offsets)),) if offsets else (),
        "metrics": {},
        "sent_at": 0.0,
    }
    return Reported(0, float(step), StepReport(**{**fields, **changes}))


def skip(offset: int, lineage: int, sequence: int, **changes: Any) -> SkipRecord:
    named = {"trajectory_id": f"d/{offset}/0/0", "group_id": f"d/{offset}/0"}
    return skip_record(offset, **named | {"step": 1, "lineage": lineage, "sequence": sequence} | changes)


def sound() -> Books:
    """Lineage 1 took steps 1 to 3 and was killed; lineage 2 went on from step 2, took step 3 again, and a step 4."""
    books = Books(
        produced={(0, offset): Produced(f"d/{offset}/0/0", "w", float(offset)) for offset in range(7)},
        first_held={0: 0},
        # Graders gave the first one back, and have the other in hand.
        ungraded={(0, 0): Produced("d/0/0/0", "w", 0.0), (0, 1): Produced("d/50/0/0", "w", 0.0)},
        graded_to={0: 1},
    )
    books.reports = [
        report(1, 0),
        report(1, 1, 0),
        report(1, 2, 1),
        report(1, 3, 2),
        report(1, 2, 1),  # announced once more from the checkpoint
        report(2, 2, parent=PolicyVersion(1, 2), parent_skips=1),
        report(2, 3, 3),
        report(2, 4, 2),
    ]
    books.skips = [skip(4, 1, 1), skip(5, 1, 2), skip(5, 2, 1), skip(5, 2, 1)]
    books.heartbeats = [
        heartbeat("w", finished_trajectories=3),
        heartbeat("w", finished_trajectories=2),
        heartbeat("w", finished_trajectories=4, incarnation="b"),
    ]
    books.controls = [
        WeightsReady(sequence=n, sent_at=0.0, version=version, step=0, manifest_sha256="0" * 64, relays=())
        for n, version in enumerate([PolicyVersion(1, 0), PolicyVersion(1, 3), PolicyVersion(2, 3)])
    ]
    return books


DURABLE = Durable(4, {0: Finished(2, frozenset({2, 3, 4, 5}))})


def findings(books: Books, durable: Durable | None = DURABLE) -> Findings:
    return check(books, durable, GROUPS, last_step=4)


def test_a_sound_history_with_a_crash_in_it_breaks_no_rule() -> None:
    found = findings(sound())
    assert found.problems == []
    assert (found.produced, found.trained, found.skipped.total(), found.pending) == (7, 4, 2, 1)
    assert (found.lost, found.trained_twice) == (0, 0)


def spoil_trained_twice(books: Books) -> None:
    books.reports[-1] = report(2, 4, 0)


def spoil_id_trained_twice(books: Books) -> None:
    books.produced[0, 2] = books.produced[0, 0]
    books.reports[-1] = report(2, 4, 2, micro_batches=((RecordRef("d/0/0/0", 0, 2),),))


def spoil_trained_and_skipped(books: Books) -> None:
    books.skips.append(skip(3, 2, 2))


def spoil_fate_undone_by_the_crash(books: Books) -> None:
    del books.skips[2:]


def spoil_missing_record(books: Books) -> None:
    del books.produced[0, 3]


def spoil_other_record(books: Books) -> None:
    books.produced[0, 3] = Produced("d/99/0/0", "w", 0.0)


def spoil_gap(books: Books) -> None:
    del books.reports[-2]


def spoil_zombie(books: Books) -> None:
    books.reports.append(report(1, 4, 6))


def spoil_two_stories(books: Books) -> None:
    books.reports[4] = report(1, 2, 6)


def spoil_acknowledged(books: Books) -> None:
    books.heartbeats.append(heartbeat("w", finished_trajectories=9))


def spoil_announcements(books: Books) -> None:
    books.controls.reverse()


def spoil_announced_without_report(books: Books) -> None:
    books.controls.append(books.controls[-1].model_copy(update={"version": PolicyVersion(2, 9)}))


def spoil_step_size(books: Books) -> None:
    books.reports[-1] = report(2, 4, 2, group_ids=("a", "b"))


def spoil_graded(books: Books) -> None:
    books.graded_to[0] = 2


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (spoil_trained_twice, "duplicate effect"),
        (spoil_id_trained_twice, "duplicate effect"),
        (spoil_trained_and_skipped, "two fates"),
        (spoil_fate_undone_by_the_crash, "lost"),
        (spoil_missing_record, "lost write"),
        (spoil_other_record, "lost write"),
        (spoil_gap, "internal skip"),
        (spoil_zombie, "nonmonotonic send"),
        (spoil_two_stories, "aborted read"),
        (spoil_acknowledged, "lost write"),
        (spoil_announcements, "nonmonotonic announcement"),
        (spoil_announced_without_report, "aborted read"),
        (spoil_step_size, "step size"),
        (spoil_graded, "lost in grading"),
    ],
)
def test_each_rule_finds_what_breaks_it(spoil: Callable[[Books], None], rule: str) -> None:
    books = sound()
    spoil(books)
    assert any(problem.startswith(f"{rule}: ") for problem in findings(books).problems), findings(books).problems


def test_a_checkpoint_that_would_train_a_record_again_is_found() -> None:
    found = findings(sound(), Durable(4, {0: Finished(2, frozenset({2, 4, 5}))}))
    assert [problem.partition(":")[0] for problem in found.problems] == ["not finished"]


def test_a_run_that_ended_early_is_found() -> None:
    assert any(problem.startswith("last step") for problem in check(sound(), None, GROUPS, last_step=5).problems)


def test_recovery_is_measured_from_the_end_of_a_fault_that_was_alone() -> None:
    books = sound()
    alone = FaultTime("a", 0.5, 2.5, "w")
    (found,) = recoveries(books, [alone])
    assert (found.step_s, found.trajectory_s, found.capacity_s) == (0.5, 0.5, 0.5)
    assert recoveries(books, [alone, FaultTime("b", 2.6, 2.7)]) == [recoveries(books, [FaultTime("b", 2.6, 2.7)])[0]]
