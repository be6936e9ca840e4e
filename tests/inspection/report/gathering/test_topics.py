from pathlib import Path

import pytest

from streamrl.bus.history import BusHistory
from streamrl.bus.memory import MemoryBus
from streamrl.inspection.report import gathering as topics
from streamrl.inspection.report.gathering import SAMPLES, gather_topics
from streamrl.schemas.control import Served
from streamrl.schemas.identifiers import PolicyVersion, group_id_of
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import CONTROL, STEPS, TRAJECTORIES
from tests.inspection.report.recorded import BEGIN, Recorded, record_run
from tests.observability.run_state.made_up_run import Happening
from tests.observability.run_state.writing import append


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record_run(tmp_path_factory.mktemp("runs") / "trial")


async def test_a_runs_topics_tell_of_workers_lengths_and_staleness(recorded: Recorded) -> None:
    found = await gather_topics(recorded.history, recorded.name, recorded.directory.logs, {})
    assert found is not None
    assert found.held == found.read > 300
    assert sorted(found.workers) == ["worker-0", "worker-1", "worker-2"]
    for activity in found.workers.values():
        starts_and_ends = [moment for stretch in activity.generating for moment in stretch]
        assert starts_and_ends == sorted(starts_and_ends)
        assert BEGIN < starts_and_ends[0] < starts_and_ends[-1] < BEGIN + 90
        assert len(activity.adopted) > 3
    assert found.lengths is not None
    assert found.lengths.count == found.read == sum(count for *_, count in found.lengths.cells)
    assert 0.5 < (found.lengths.recall or 0.0) < 1.0
    assert found.lengths.constant == pytest.approx(0.2, abs=0.05)
    assert 0.7 < (found.lengths.coverage or 0.0) < 1.0
    assert 1.1 < (found.lengths.factor or 0.0) < 1.6
    assert sum(found.staleness.values()) > 200
    assert min(found.staleness) >= 0


async def test_samples_are_of_different_groups_oldest_first(recorded: Recorded) -> None:
    found = await gather_topics(recorded.history, recorded.name, recorded.directory.logs, {})
    assert found is not None
    for samples in (found.first, found.last):
        assert len({group_id_of(sample.trajectory_id) for sample in samples}) == len(samples) == SAMPLES
    numbers = [[int(sample.trajectory_id.split("/")[1]) for sample in samples] for samples in (found.first, found.last)]
    assert max(numbers[0]) < min(numbers[1])


async def test_without_log_files_heartbeats_tell_of_adoptions(recorded: Recorded, tmp_path: Path) -> None:
    by_logs = await gather_topics(recorded.history, recorded.name, recorded.directory.logs, {})
    by_beats = await gather_topics(recorded.history, recorded.name, tmp_path, {})
    assert by_logs is not None
    assert by_beats is not None
    for worker, activity in by_beats.workers.items():
        exact = {version: at for at, version in by_logs.workers[worker].adopted}
        assert activity.adopted
        assert all(exact[version] - 0.01 <= at < exact[version] + 3 for at, version in activity.adopted[1:])


async def test_replaced_trainers_and_the_promoted_policy_are_marks(tmp_path: Path) -> None:
    recorded = record_run(tmp_path / "trial")
    first = next(iter(recorded.bus.log(f"{recorded.name}.{STEPS.name}").partitions[0])).message()
    assert isinstance(first, StepReport)
    for lineage, step, undoes in ((2, 7, 0), (3, 4, 2)):
        start = first.replace(
            version=PolicyVersion(lineage, step), step=step, sent_at=BEGIN + 10 * lineage, group_ids=(),
            micro_batches=(), parent=PolicyVersion(1, step), undoes=undoes,
        )  # fmt: skip
        append(recorded.bus, recorded.name, Happening(start.sent_at, STEPS, "grpo", 0, start))
    served = Served(sequence=1, sent_at=BEGIN + 25, policy="rloo", since=PolicyVersion(2, 9))
    append(recorded.bus, recorded.name, Happening(served.sent_at, CONTROL, "served", 0, served))
    found = await gather_topics(recorded.history, recorded.name, recorded.directory.logs, {})
    assert found is not None
    assert [(mark.at - BEGIN, mark.kind, mark.text) for mark in found.marks] == [
        (20.0, "restart", "a new trainer, from step 7"),
        (25.0, "promotion", "rloo is served"),
        (30.0, "restart", "a restore, from step 4"),
    ]


async def test_a_fixed_number_of_records_is_read(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = await gather_topics(recorded.history, recorded.name, recorded.directory.logs, {})
    monkeypatch.setitem(topics.MOST, TRAJECTORIES, 100)
    found = await gather_topics(recorded.history, recorded.name, recorded.directory.logs, {})
    assert found is not None
    assert whole is not None
    assert 80 < found.read <= 100
    assert found.held == whole.held
    assert found.last[-1] == whole.last[-1]


async def test_no_trajectory_is_nothing_to_tell(tmp_path: Path) -> None:
    assert await gather_topics(BusHistory(MemoryBus()), "nobody", tmp_path, {}) is None
