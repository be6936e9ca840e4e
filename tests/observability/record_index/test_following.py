import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrl.bus.history import BusHistory, Extent
from streamrl.bus.port import Record, TopicPartition
from streamrl.inspection.opening import open_index
from streamrl.inspection.replay import history
from streamrl.inspection.replay.history import GroupHistory, TrajectoryHistory
from streamrl.observability.record_index import following
from streamrl.observability.record_index.entries import Kind, RefKind
from streamrl.observability.record_index.following import IndexFollower
from streamrl.observability.record_index.store import RecordIndex
from streamrl.schemas.errors import BusError, UserError
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.topics import TRAJECTORIES
from tests.inspection.audit.written_topics import RUN
from tests.observability.record_index.written import TOPIC, WrittenRun, fates_of, found_by
from tests.progress import patience

PRODUCE, DAMAGE, TRAIN, SKIP, SAVE, CRASH, READ, KILL, RESTORE, MOVE = range(10)
CHOICES = st.tuples(
    st.sampled_from([PRODUCE, PRODUCE, DAMAGE, TRAIN, SKIP, SAVE, CRASH, READ, KILL, RESTORE, MOVE]), st.integers(0, 9)
)


class Interrupted(BusHistory):
    """Stands for a process that is killed after so many records."""

    async def within(self, ranges, left=3):  # type: ignore[no-untyped-def]
        async for record in super().within(ranges):
            if left == 0:
                raise BusError("killed")
            left -= 1
            yield record


def act(run: WrittenRun, action: int, number: int) -> None:
    pending = run.pending()
    named = [(p, o) for p, o in pending if run.log[p][o] is not None]
    if action == PRODUCE:
        # Few names, so that some come twice; a group's samples share a partition.
        run.produce(f"d/{number % 3}/0/{number // 3}", number % 2)
    elif action == DAMAGE:
        position = run.produce(None, number % 2)
        run.refuse(position)
        run.skip(position, SkipReason.POISON)
    elif action == TRAIN and named:
        run.step(named[: 1 + number // 3])
        run.announce()
    elif action == SKIP and pending:
        run.skip(pending[number % len(pending)], SkipReason.STALE)
    elif action == SAVE:
        run.checkpoint()
    elif action == CRASH:
        run.restart(run.saved[number % len(run.saved)] if run.saved else None)
    elif action == RESTORE and run.saved:
        run.roll_back(run.saved[number % len(run.saved)])
    elif action == MOVE and run.saved:
        run.restart(run.saved[number % len(run.saved)], elsewhere=True)


async def live(path: Path, actions: list[tuple[int, int]]) -> None:
    run = WrittenRun()
    for action, number in actions:
        act(run, action, number)
        run.publish()
        if action in (READ, KILL):
            with RecordIndex(path) as index:
                follower = run.follower(index)
                if action == KILL:
                    follower.history = Interrupted(run.bus)
                    try:
                        await follower.catch_up()
                    except BusError:
                        continue
                else:
                    await follower.catch_up()
    with RecordIndex(path) as index:
        follower = run.follower(index)
        await follower.catch_up()
        truth = run.truth()
        for name, records in truth.items():
            found = await found_by(follower, name)
            assert isinstance(found, TrajectoryHistory)
            assert fates_of(found) == records
        for group in {name.rpartition("/")[0] for name in truth}:
            members = await found_by(follower, group)
            assert isinstance(members, GroupHistory)
            told = {(s.trajectory_id, s.record.partition, s.record.offset) for s in members.samples}
            assert told == {(n, *p) for n, found in truth.items() if n.startswith(f"{group}/") for p in found}
        damaged = {(p, o) for p, names in run.log.items() for o, name in enumerate(names) if name is None}
        assert {(row.of_partition, row.of_offset) for row in index.refs(RefKind.DEAD_LETTER, damaged)} == damaged


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(CHOICES, max_size=30))
def test_the_index_leads_to_what_happened(
    actions: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was written, read in between, or killed while it was read."""
    monkeypatch.setattr(following, "CHUNK", 2)
    asyncio.run(live(tmp_path_factory.mktemp("index") / "records.sqlite", actions))


def small_run(groups: int = 3) -> WrittenRun:
    run = WrittenRun()
    for number in range(groups):
        for sample in range(4):
            run.produce(f"d/{number}/0/{sample}", number % 2)
    run.publish()
    return run


async def test_records_are_read_once(tmp_path: Path) -> None:
    run, delivered = small_run(), list[Record]()

    class Noted(BusHistory):
        async def within(self, ranges):  # type: ignore[no-untyped-def]
            async for record in super().within(ranges):
                delivered.append(record)
                yield record

    for expected in (12 + 1, 0, 1 + 1):
        with RecordIndex(tmp_path / "records.sqlite") as index:
            delivered.clear()
            await IndexFollower(Noted(run.bus), RUN, index).catch_up()
        assert len(delivered) == expected
        if not expected:
            run.produce("d/9/0/0", 0)
            run.publish()


@pytest.mark.parametrize("shorter", [True, False])
async def test_a_recreated_topic_starts_a_new_index(tmp_path: Path, *, shorter: bool) -> None:
    with RecordIndex(tmp_path / "records.sqlite") as index:
        await small_run().follower(index).catch_up()
        anew = small_run(1) if shorter else WrittenRun()
        if not shorter:
            for number in range(20):
                anew.produce(f"other/{number}/0/0", number % 2)
            anew.publish()
        follower = anew.follower(index)
        await follower.catch_up()
        assert index.places("d/2/0", Kind.TRAJECTORY) == []
        name = "d/0/0/1" if shorter else "other/7/0/0"
        assert fates_of(await found_by(follower, name)) == anew.truth()[name]  # type: ignore[arg-type]


async def test_the_index_is_never_trusted() -> None:
    """Records of another topic stand where it was read, as many as before: nothing new shows that it is another."""
    index = RecordIndex(None)
    await small_run().follower(index).catch_up()
    anew = WrittenRun()
    for number in (7, 5, 9):
        for sample in range(4):
            anew.produce(f"d/{number}/0/{sample}", 0 if number < 9 else 1)
    anew.publish()
    follower = anew.follower(index)
    with pytest.raises(UserError, match="which is not there"):
        await found_by(follower, "d/0/0/1")
    assert fates_of(await found_by(follower, "d/7/0/1")) == anew.truth()["d/7/0/1"]  # type: ignore[arg-type]


async def test_records_deleted_by_retention_before_reading_are_passed_over(tmp_path: Path) -> None:
    run, index = small_run(), RecordIndex(tmp_path / "records.sqlite")
    await run.follower(index).catch_up()
    for number in range(40):
        run.produce(f"late/{number}/0/0", 0)
    run.publish()

    class Retained(BusHistory):
        async def extents(self, *topics: str):  # type: ignore[no-untyped-def]
            held = await super().extents(*topics)
            return {
                tp: each._replace(first=30) if (tp.topic, tp.partition) == (TOPIC, 0) else each
                for tp, each in held.items()
            }

    follower = IndexFollower(Retained(run.bus), RUN, index)
    await follower.catch_up()
    assert index.places("late/39/0", Kind.TRAJECTORY) != []
    assert index.places("late/1/0", Kind.TRAJECTORY) == []
    assert index.places("d/1/0", Kind.TRAJECTORY) != []
    index.close()


async def test_a_run_without_topics_is_one_line() -> None:
    run = WrittenRun()
    del run.bus.logs[TRAJECTORIES.full_name(RUN)]
    with pytest.raises(UserError, match="expected the topics of run"):
        await run.follower(RecordIndex(None)).catch_up()


async def test_the_loop_indexes_new_records_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "FIRST_FOLLOW_S", 0.01)
    monkeypatch.setattr(following, "FOLLOW_EVERY_S", 0.01)
    run, index, stop = small_run(), RecordIndex(None), asyncio.Event()
    follower = run.follower(index)
    follower.every_s = lambda: 0.01
    task = asyncio.create_task(follower.run(stop))
    run.produce("late/1/0/0", 0)
    run.publish()
    async with patience(10):
        while not index.places("late/1/0", Kind.TRAJECTORY):
            await asyncio.sleep(0.01)
        stop.set()
        await task


def test_an_index_is_kept_in_the_runs_directory_or_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "run").mkdir()
    with open_index(tmp_path / "run", "a:1", "r") as own, open_index(None, "a:1", "r") as cached:
        assert own.path == tmp_path / "run" / "records.sqlite"
        assert cached.path is not None
        assert cached.path.parent == tmp_path / "cache" / "indexes"
    with open_index(None, "b:1", "r") as other:
        assert other.path != cached.path
    monkeypatch.setenv("STREAMRL_CACHE", "/dev/null/nowhere")
    with open_index(tmp_path / "absent", "a:1", "r") as nowhere:
        assert nowhere.path is None


async def test_records_finished_on_another_cluster_are_reported_as_finished_elsewhere() -> None:
    run = small_run()
    run.step([(0, 0), (0, 1)])
    run.skip((1, 0), SkipReason.STALE)
    run.checkpoint()
    run.announce()
    run.step([(0, 2)])
    run.announce()
    run.restart(run.saved[0], elsewhere=True)
    run.publish()
    with RecordIndex(None) as index:
        follower = run.follower(index)
        await follower.catch_up()
        for name, records in run.truth().items():
            found = await found_by(follower, name)
            assert isinstance(found, TrajectoryHistory)
            assert fates_of(found) == records
            told = {event.what for event in found.events} & {"trained", "skipped", "finished elsewhere"}
            assert told == ({"finished elsewhere"} if records.keys() & run.current.carried else set())


async def test_changed_fates_are_looked_for_only_on_topics_that_hold_fates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a run that goes on, most of what comes is trajectories and orders, and somebody waits."""
    run, index = small_run(), RecordIndex(None)
    asked = list[tuple[str, ...]]()

    class Noted(BusHistory):
        async def extents(self, *topics: str) -> dict[TopicPartition, Extent]:
            asked.append(topics)
            return await super().extents(*topics)

    follower = IndexFollower(Noted(run.bus), RUN, index)
    monkeypatch.setattr(history, "FRESH_S", 0.0)
    assert fates_of(await found_by(follower, "d/0/0/1")) == run.truth()["d/0/0/1"]  # type: ignore[arg-type]
    run.produce("d/7/0/0", 0)
    run.publish()
    await found_by(follower, "d/0/0/1")
    assert [TOPIC in topics for topics in asked] == [True, False]
    assert index.places("d/7/0", Kind.TRAJECTORY) == []
    # What is not known may be on any.
    assert await found_by(follower, "d/7/0/0") is not None
    assert TOPIC in asked[-1]
