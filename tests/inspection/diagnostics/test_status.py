import json

import pytest

from streamrl.bus.history import BusHistory
from streamrl.inspection.diagnostics.connect import RunConnection
from streamrl.inspection.diagnostics.lag import (
    GroupLag,
    PartitionLag,
    lag_json,
    lag_lines,
    measure_lags,
    newest_steps,
    shards_of,
)
from streamrl.inspection.diagnostics.status import read_status, status_json, status_lines
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.topics import TRAJECTORIES

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_status_of_a_run_is_read_from_the_ends_of_its_topics(living_run: RunConnection) -> None:
    status = await read_status(living_run)
    assert status.version == PolicyVersion(2, 5)
    assert status.state.progress.announced == PolicyVersion(2, 5)
    assert [entry.step for entry in status.state.learning.steps.entries] == [1, 2, 3, 4, 5]
    assert sorted(status.state.processes.workers) == ["worker-0", "worker-1"]
    assert (status.figures["running"], status.figures["waiting"]) == (6, 2)
    assert status.trained_groups == 10
    assert status.state.skipped == {"stale": 4}
    assert status.figures["dead_letters"] == 1
    assert status.state.lag == {0: 6, 1: 7, 2: 6, 3: 6}
    text = "\n".join(status_lines(status))
    assert "2-5" in text
    assert "worker-1" in text
    assert json.loads(json.dumps(status_json(status)))["lag"] == 25


async def test_lag_is_measured_by_partition_in_records_rates_and_seconds(living_run: RunConnection) -> None:
    (lag,) = await measure_lags(living_run, 2, interval_s=0.2)
    assert lag.group == f"{living_run.run}.grpo"
    assert lag.consumer_lag == 25
    third = lag.partitions[3]
    assert (third.partition, third.bucket, third.next_offset, third.end, third.consumer_lag) == (3, 1, 2, 6, 4)
    assert third.produced_per_s == third.consumed_per_s == 0.0
    assert third.behind_s is not None
    assert 0 < third.behind_s < 7200
    assert json.loads(json.dumps(lag_json(lag)))["consumer_lag"] == 25
    assert len(list(lag_lines(lag))) == 10


async def test_observers_do_not_affect_a_run_and_commit_nothing(living_run: RunConnection) -> None:
    before = await measure_lags(living_run, 2)
    await read_status(living_run)
    after = await measure_lags(living_run, 2)
    assert [lag.group for lag in after] == [f"{living_run.run}.grpo"]
    assert [each.next_offset for each in after[0].partitions] == [each.next_offset for each in before[0].partitions]


async def test_shards_are_worked_out_from_what_the_trainer_reports(living_run: RunConnection) -> None:
    partitions = len(await BusHistory(living_run.bus).extents(living_run.name_of(TRAJECTORIES)))
    assert shards_of(living_run, partitions, (await newest_steps(living_run)).metrics) == 2
    assert shards_of(living_run, partitions, {}) is None


async def test_the_lag_of_an_unread_topic_is_its_whole_length() -> None:
    lag = GroupLag(None, (PartitionLag(0, None, 0, 7),))
    assert lag.consumer_lag == 7
    assert "no consumer group" in next(iter(lag_lines(lag)))
