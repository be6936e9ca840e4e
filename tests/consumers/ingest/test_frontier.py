import json

from hypothesis import given
from hypothesis import strategies as st

from streamrl.consumers.ingest.frontier import Frontier
from streamrl.schemas.reports import RecordRef


def refs(*offsets: int, partition: int = 0) -> list[RecordRef]:
    return [RecordRef("t", partition, offset) for offset in offsets]


def frontier_after(read: list[int], done: list[int]) -> Frontier:
    frontier = Frontier()
    for offset in read:
        frontier.mark_read(0, offset)
    frontier.mark_done(refs(*done))
    return frontier


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Reads in rising order with gaps, finishes of what was read in any order, and restarts in between."""
    events: list[tuple[str, int]] = []
    offset, pending = 0, []
    for _ in range(draw(st.integers(0, 40))):
        kind = draw(st.sampled_from(["read", "read", "done", "restart"]))
        if kind == "read":
            offset += draw(st.sampled_from([0, 0, 0, 1, 5]))
            events.append(("read", offset))
            pending.append(offset)
            offset += 1
        elif kind == "done" and pending:
            events.append(("done", pending.pop(draw(st.integers(0, len(pending) - 1)))))
        elif kind == "restart":
            events.append(("restart", 0))
    return events


@given(histories())
def test_the_frontier_agrees_with_a_set(history: list[tuple[str, int]]) -> None:
    """All three invariants together, in any history of reads, gaps, finishes and restarts."""
    frontier, log, done = Frontier(), list[int](), set[int]()
    for kind, offset in history:
        if kind == "read":
            log.append(offset)
            assert frontier.mark_read(0, offset)
        elif kind == "done":
            done.add(offset)
            frontier.mark_done(refs(offset))
        else:
            frontier = Frontier.from_json(json.loads(json.dumps(frontier.to_json())))
            low = frontier.lows().get(0, 0)
            again = [number for number in log if number >= low and frontier.mark_read(0, number)]
            assert again == [number for number in log if number not in done]
        unfinished = [number for number in log if number not in done]
        if log:
            assert frontier.lows()[0] == (unfinished[0] if unfinished else log[-1] + 1)
            assert frontier.partition(0).unfinished() == len(unfinished)
        assert all(frontier.is_done(0, number) == (number in done) for number in log)


def test_finished_records_stay_finished() -> None:
    before = frontier_after([0, 1, 2, 3], [1, 3])
    after = Frontier.from_json(json.loads(json.dumps(before.to_json())))
    assert [offset for offset in range(before.lows()[0], 4) if after.mark_read(0, offset)] == [0, 2]


def test_the_low_mark_never_passes_an_unfinished_record() -> None:
    frontier = frontier_after([0, 1, 2, 3], [0, 2, 3])
    assert frontier.lows() == {0: 1}
    frontier.mark_done(refs(1))
    assert frontier.lows() == {0: 4}


def test_gaps_do_not_hold_the_low_mark() -> None:
    frontier = frontier_after([0, 4, 9], [0, 4])
    assert frontier.lows() == {0: 9}
    assert frontier.is_done(0, 7)


def test_a_partition_that_starts_late_is_finished_below_its_first_record() -> None:
    frontier = frontier_after([1_000_000_000], [])
    assert frontier.lows() == {0: 1_000_000_000}
    assert frontier.is_done(0, 5)


def test_a_record_read_twice_is_met_once() -> None:
    frontier = Frontier()
    assert [frontier.mark_read(0, offset) for offset in (0, 1, 1, 0, 2)] == [True, True, False, False, True]


def test_partitions_are_apart() -> None:
    frontier = Frontier()
    frontier.mark_read(0, 0)
    frontier.mark_read(3, 7)
    frontier.mark_done(refs(7, partition=3))
    assert frontier.lows() == {0: 0, 3: 8}
    assert not frontier.is_done(1, 0)


def test_a_copy_stays_what_it_was() -> None:
    frontier = frontier_after([0, 1, 2], [1])
    kept = frontier.copy()
    frontier.mark_done(refs(0, 2))
    frontier.mark_read(0, 3)
    assert kept.to_json() == {"0": {"low": 0, "done": [1]}}
    assert frontier.to_json() == {"0": {"low": 3, "done": []}}


def test_offsets_that_vanished_while_we_were_away_leave_no_trace() -> None:
    frontier = Frontier.from_json({"0": {"low": 2, "done": [4, 6]}})
    assert frontier.mark_read(0, 5)
    assert frontier.to_json() == {"0": {"low": 5, "done": [6]}}


def test_a_stretch_that_is_gone_is_finished_while_records_before_it_are_not() -> None:
    frontier = Frontier.from_json({"0": {"low": 3, "done": [5]}})
    assert frontier.partition(0).unfinished_stretches(3, 8) == [(3, 5), (6, 8)]
    frontier.mark_read(0, 3)
    frontier.partition(0).pass_over(4, 8)
    again = Frontier.from_json(frontier.to_json())
    for found in (frontier, again):
        assert [found.is_done(0, offset) for offset in range(3, 9)] == [False, True, True, True, True, False]
        assert found.partition(0).unfinished_stretches(3, 9) == [(3, 4), (8, 9)]
    frontier.mark_done([RecordRef("t", 0, 3)])
    assert frontier.to_json() == {"0": {"low": 8, "done": []}}
