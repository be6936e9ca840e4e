from hypothesis import given
from hypothesis import strategies as st

from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.lineage import LineageStart, SurvivingSteps, surviving_chain
from streamrl.schemas.reports import RecordRef, SkipRecord, StepReport
from tests.fakes.messages import skip_record, step_report
from tests.simulation.judges.ledger import Chain
from tests.simulation.judges.ledger import surviving_chain as judged


def first_report(lineage: int, step: int, parent: PolicyVersion | None = None, **changes: int) -> StepReport:
    return step_report(lineage, step, parent=parent, **changes)


def report(lineage: int, step: int) -> StepReport:
    refs = ((RecordRef(f"g/{step}/0/0", 0, step),),)
    return step_report(lineage, step, group_ids=(f"g/{step}/0",), micro_batches=refs)


def row(lineage: int, sequence: int) -> SkipRecord:
    return skip_record(step=5, lineage=lineage, sequence=sequence)


def test_an_ancestor_holds_only_the_steps_that_its_child_resumed_from() -> None:
    chain = SurvivingSteps([first_report(1, 0), first_report(2, 4, PolicyVersion(1, 4), parent_skips=7)]).chain
    assert [chain.holds(PolicyVersion(1, number)) for number in (4, 5)] == [True, False]
    assert [chain.holds_row(row(1, number)) for number in (7, 8)] == [True, False]
    assert chain.holds(PolicyVersion(2, 900))
    assert chain.holds_row(row(2, 900))


def test_resuming_from_an_undone_step_brings_it_back() -> None:
    steps = SurvivingSteps([first_report(1, 0), first_report(2, 2, PolicyVersion(1, 2))])
    assert not steps.chain.holds(PolicyVersion(1, 6))
    steps.add(first_report(3, 6, PolicyVersion(1, 6)))
    assert steps.chain.holds(PolicyVersion(1, 6))
    assert not steps.chain.holds(PolicyVersion(2, 3))


def test_lineages_before_a_missing_start_are_unknown() -> None:
    """Retention took its first report, so its parent is unknown; and of a lineage to come nothing is known yet."""
    chain = SurvivingSteps([first_report(7, 40, PolicyVersion(5, 40))]).chain
    held = {lineage: chain.holds(PolicyVersion(lineage, 41)) for lineage in (0, 3, 5, 6, 7, 8)}
    assert held == {0: True, 3: True, 5: False, 6: False, 7: True, 8: True}


def test_reports_of_lineages_on_another_cluster_do_not_count() -> None:
    """A lineage that went on here from another cluster says itself which records were finished there."""
    chain = SurvivingSteps([first_report(1, 0), first_report(3, 4, PolicyVersion(2, 4), carried_parts=1)]).chain
    assert (chain.begin, [link.lineage for link in chain.links]) == (3, [3])
    assert not chain.holds(PolicyVersion(1, 2))
    assert not chain.holds_row(row(1, 0))


def test_a_first_report_that_is_sent_again_changes_nothing() -> None:
    steps = SurvivingSteps([first_report(1, 0), first_report(2, 4, PolicyVersion(1, 4))])
    before = steps.chain
    steps.add(first_report(1, 0))
    steps.add(report(2, 5))
    assert steps.chain is before


def test_a_parent_that_is_not_older_ends_the_chain() -> None:
    starts = {2: LineageStart(2, 4, PolicyVersion(3, 4), 0), 3: LineageStart(3, 4, PolicyVersion(2, 4), 0)}
    chain = surviving_chain(starts, beginning_is_held=True)
    assert [link.lineage for link in chain.links] == [2, 3]
    assert any("not older" in broken.problem for broken in chain.broken)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 9)), max_size=8))
def test_the_chain_is_the_one_that_the_simulation_s_judge_follows(drawn: list[tuple[int, int, int]]) -> None:
    """Any tree of lineages, each from some step of an older one."""
    firsts = [first_report(1, 0)]
    for lineage, (parent, number, skips) in enumerate(drawn, start=2):
        firsts.append(
            first_report(lineage, number, PolicyVersion(1 + parent % (lineage - 1), number), parent_skips=skips)
        )
    steps = [report(lineage, number) for lineage in range(1, len(firsts) + 1) for number in range(1, 10)]
    expected = judged([*firsts, *steps], [])
    assert isinstance(expected, Chain)
    chain = SurvivingSteps(firsts).chain
    for one in steps:
        assert chain.holds(one.version) == expected.contains(one.version), one.version
