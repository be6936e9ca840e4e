import pytest

from streamrl.inspection.replay.steps import ChainSegment, StepLog, refused_step, steps_between, taken_step
from streamrl.schemas.errors import UserError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef, RefusedStep, StepReport
from tests.fakes.messages import skip_record, step_report


def start(lineage: int, step: int, parent: PolicyVersion | None = None, parent_skips: int = 0) -> StepReport:
    return step_report(lineage, step, parent=parent, parent_skips=parent_skips)


def report(lineage: int, step: int) -> StepReport:
    refs = ((RecordRef(f"g/{step}/0/0", 0, step),),)
    return step_report(lineage, step, group_ids=(f"g/{step}/0",), micro_batches=refs)


def refusal(lineage: int, step: int, problem: str) -> RefusedStep:
    return RefusedStep(
        algorithm="grpo",
        step=step,
        version=PolicyVersion(lineage, step - 1),
        problem=problem,
        group_ids=("g/9/0",),
        micro_batches=((RecordRef("g/9/0/0", 0, 9),),),
        metrics={},
        sent_at=0.0,
    )


@pytest.fixture
def log() -> StepLog:
    """Lineage 1 took 8 steps; 2 went on from its step 4, took 2, and crashed; 3 went on from 5 and took 2."""
    found = StepLog()
    messages: list[StepReport | RefusedStep] = [start(1, 0), *(report(1, step) for step in range(1, 9))]
    messages += [report(1, 4), start(2, 4, PolicyVersion(1, 4)), report(2, 5), report(2, 6)]
    messages += [report(2, 5), start(3, 5, PolicyVersion(2, 5), 7), refusal(3, 6, "first"), refusal(3, 6, "second")]
    messages += [report(3, 6), report(3, 7), refusal(3, 8, "only")]
    for message in messages:
        found.observe(message)
    return found


def test_only_the_surviving_chain_counts(log: StepLog) -> None:
    assert log.chain() == (ChainSegment(1, 1, 4), ChainSegment(2, 5, 5), ChainSegment(3, 6, 7))
    assert [taken_step(log, step).version for step in range(1, 8)] == [
        *(PolicyVersion(1, step) for step in range(1, 5)),
        PolicyVersion(2, 5),
        PolicyVersion(3, 6),
        PolicyVersion(3, 7),
    ]
    assert not log.counts(PolicyVersion(1, 5))
    assert not log.counts(PolicyVersion(2, 6))


def test_skip_rows_count_up_to_where_the_child_went_on(log: StepLog) -> None:
    row = skip_record(step=5, lineage=2, sequence=7)
    assert log.counts_row(row)
    assert not log.counts_row(row.replace(sequence=8))
    assert log.counts_row(row.replace(lineage=3, sequence=1000))


def test_a_lineage_can_be_followed_beyond_where_a_crash_undid_it(log: StepLog) -> None:
    assert log.chain(2) == (ChainSegment(1, 1, 4), ChainSegment(2, 5, 6))
    assert taken_step(log, 8, lineage=1).version == PolicyVersion(1, 8)
    assert [each.version.lineage for each in steps_between(log, 4, 6, lineage=2)] == [1, 2, 2]


def test_an_unknown_step_names_the_steps_there_are(log: StepLog) -> None:
    with pytest.raises(UserError, match=r"steps 1 to 4 of lineage 1, steps 5 to 5 of lineage 2, steps 6 to 7.*step 99"):
        taken_step(log, 99)
    with pytest.raises(UserError, match="lineages 1, 2, 3, got 4"):
        taken_step(log, 1, lineage=4)


def test_a_step_that_a_crash_undid_says_so_and_how_to_replay_it() -> None:
    log = StepLog()
    for message in (start(1, 0), report(1, 1), report(1, 2), report(1, 3), start(2, 1, PolicyVersion(1, 1))):
        log.observe(message)
    with pytest.raises(UserError, match="lineage 1 took and a crash or a restore undid; replay it with --lineage 1"):
        taken_step(log, 3)
    assert taken_step(log, 3, lineage=1).step == 3


def test_a_refused_step_is_chosen_by_its_attempt(log: StepLog) -> None:
    assert refused_step(log, 6, 2).problem == "second"
    assert refused_step(log, 8, None).problem == "only"
    with pytest.raises(UserError, match=r"--attempt 1 \(3-5\): first; --attempt 2 \(3-5\): second"):
        refused_step(log, 6, None)
    with pytest.raises(UserError, match="--attempt 1"):
        refused_step(log, 6, 3)
    with pytest.raises(UserError, match="only refused"):
        taken_step(log, 8)


def test_a_report_that_has_expired_is_named() -> None:
    log = StepLog()
    for message in (start(1, 0), report(1, 1), report(1, 3)):
        log.observe(message)
    with pytest.raises(UserError, match="report of step 2"):
        taken_step(log, 2)


def test_a_topic_without_reports_says_that_nothing_was_trained() -> None:
    with pytest.raises(UserError, match="nothing was trained"):
        taken_step(StepLog(), 1)
