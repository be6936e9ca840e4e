import json

import pytest

from bus.history import BusHistory
from inspection.diagnostics.connect import Attachment
from inspection.diagnostics.lag import GroupLag, PartitionLag, measure_lags
from inspection.diagnostics.status import (
    lag_json,
    lag_lines,
    last_metrics,
    read_standing,
    shards_of,
    status_json,
    status_lines,
)
from schemas.identifiers import PolicyVersion
from schemas.topics import TRAJECTORIES

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="session")]


async def test_a_run_s_standing_is_read_from_the_ends_of_its_topics(surveyed: Attachment) -> None:
    standing = await read_standing(surveyed)
    assert standing.version == PolicyVersion(2, 5)
    assert standing.orders.announced == PolicyVersion(2, 5)
    assert [point.step for point in standing.state.steps] == [1, 2, 3, 4, 5]
    assert sorted(standing.workers) == ["worker-0", "worker-1"]
    assert standing.generating == 8
    assert standing.trained_groups == 10
    assert standing.skipped == {"stale": 4}
    assert standing.dead_letters == 1
    (lag,) = standing.lags
    assert lag.by_bucket() == {0: 6, 1: 7, 2: 6, 3: 6}
    text = "\n".join(status_lines(standing))
    assert "2-5" in text
    assert "worker-1" in text
    assert json.loads(json.dumps(status_json(standing)))["in_flight"]["unread"] == 25


async def test_lag_is_measured_by_partition_in_records_rates_and_seconds(surveyed: Attachment) -> None:
    (lag,) = await measure_lags(surveyed, 2, interval_s=0.2)
    assert lag.group == "surveyed.grpo"
    assert lag.lag == 25
    third = lag.partitions[3]
    assert (third.partition, third.bucket, third.next_offset, third.end, third.lag) == (3, 1, 2, 6, 4)
    assert third.produced_per_s == third.consumed_per_s == 0.0
    assert third.behind_s is not None
    assert 0 < third.behind_s < 7200
    assert json.loads(json.dumps(lag_json(lag)))["by_bucket"] == {"0": 6, "1": 7, "2": 6, "3": 6}
    assert len(list(lag_lines(lag))) == 11


async def test_looking_commits_nothing_and_joins_no_group(surveyed: Attachment) -> None:
    before = await measure_lags(surveyed, 2)
    await read_standing(surveyed)
    after = await measure_lags(surveyed, 2)
    assert [lag.group for lag in after] == ["surveyed.grpo"]
    assert [each.next_offset for each in after[0].partitions] == [each.next_offset for each in before[0].partitions]


async def test_shards_are_worked_out_from_what_the_trainer_reports(surveyed: Attachment) -> None:
    partitions = len(await BusHistory(surveyed.bus).extents(surveyed.name_of(TRAJECTORIES)))
    assert shards_of(surveyed, partitions, await last_metrics(surveyed)) == 2
    assert shards_of(surveyed, partitions, {}) is None


async def test_a_topic_that_nobody_reads_has_its_whole_length_as_lag() -> None:
    lag = GroupLag(None, (PartitionLag(0, None, 0, 7),))
    assert lag.lag == 7
    assert lag.by_bucket() == {None: 7}
    assert "no consumer group" in next(iter(lag_lines(lag)))
