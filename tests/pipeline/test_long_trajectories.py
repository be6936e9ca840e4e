"""A group of 200,000-token trajectories with their text, all the way: bus, reader, dead letters, export, displays."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from streamrl.bus.history import BusHistory, Extent
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.limits import ClientLimits
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Bus, Outgoing
from streamrl.consumers.ingest.filters import IntakeRules
from streamrl.consumers.ingest.reader import ReadStream, TrajectoryReader
from streamrl.consumers.ingest.settings import IngestSettings
from streamrl.consumers.ingest.versions import OwnVersions
from streamrl.inspection.dashboard.records import SHOWN_TOKENS, history_json
from streamrl.inspection.dead_letters import read_dead_letters
from streamrl.inspection.export import ALL, Exporter, SegmentHistory
from streamrl.inspection.replay.history import HistoryReader
from streamrl.inspection.tables import trajectory_table
from streamrl.observability.record_index.following import IndexFollower
from streamrl.observability.record_index.store import RecordIndex
from streamrl.observability.run_state.trajectory_summary import PREVIEW, summary_of
from streamrl.schemas.topics import DEAD_LETTERS, TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory
from tests.broker_fixture import unique_numbers
from tests.consumers.factories import V0, trajectory
from tests.fakes.one_shard import OneShardLoop
from tests.fakes.topics import create_topics
from tests.progress import within

TOKENS = 200_000
LOOP = OneShardLoop(groups_per_step=1, num_generations=2, max_staleness=2, bucket_boundaries=(64,))
_numbers = unique_numbers()


def long_trajectory(index: int) -> Trajectory:
    """Tokens and log-probs that hardly compress; a text of letters and of characters of two, three and four bytes."""
    random = np.random.default_rng(index)
    text = "".join(random.choice(["word ", "größe ", "数学题 ", "🙂 "], TOKENS, p=[0.7, 0.1, 0.1, 0.1]))
    return trajectory(
        "d/0/0",
        index,
        tokens=TOKENS,
        token_ids=random.integers(0, 151_936, TOKENS, dtype=np.int32),
        logprobs=-random.exponential(0.5, TOKENS).astype(np.float32),
        prompt_text=text[: 4 * TOKENS // 10],
        completion_text=text,
    )


@pytest.fixture(params=["memory", *(pytest.param(codec, marks=pytest.mark.processes) for codec in ("none", "zstd"))])
async def bus(request: pytest.FixtureRequest) -> tuple[Bus, str]:
    """A bus with the catalogue's topics, as it is and compressed; and the name of a run on it."""
    run = f"long-{next(_numbers)}-{id(request):x}"
    if request.param == "memory":
        return create_topics(MemoryBus(), run, LOOP.trajectory_partitions), run
    servers = request.getfixturevalue("bootstrap_servers")
    await apply_topics(servers, run, LOOP.trajectory_partitions)
    # The broker may have to wait for a processor.
    patient = {"request_timeout_ms": 60_000}
    settings = {"bootstrap_servers": servers, "compression_type": request.param, **patient}
    return KafkaBus(KafkaSettings.model_validate(settings), limits=ClientLimits(connect_timeout_s=60.0)), run


async def test_200_000_tokens_and_their_text_go_all_the_way(bus: tuple[Bus, str], tmp_path: Path) -> None:
    opened, run = bus
    topic = TRAJECTORIES.full_name(run)
    sent = [long_trajectory(0), long_trajectory(1)]
    # The second one once more, with the last byte of its text damaged.
    records = [Outgoing.of(topic, one, key=one.group_id, partition=0) for one in sent]
    value = records[1].value
    assert value is not None
    damaged = records[1]._replace(value=value[:-1] + b"\xff")
    publisher = await opened.publisher("worker")
    await asyncio.gather(*[await publisher.submit(record) for record in (records[0], damaged, records[1])])
    await publisher.close()

    reader = TrajectoryReader(
        ReadStream(opened, run, run, "grpo"),
        IntakeRules(LOOP, IngestSettings(), {}),
        OwnVersions(lambda: V0, LOOP.staleness_bound),
        lambda: V0.number,
    )
    stop = asyncio.Event()
    reading = asyncio.create_task(reader.run(stop))
    try:
        group = await within(reader.next_group(), 30)
        await reader.flush()
    finally:
        stop.set()
        await asyncio.wait({reading})
    assert [sample.trajectory for sample in group.samples] == sent

    history = BusHistory(opened)
    (letter,) = [found async for found in read_dead_letters(history, run)]
    assert letter.record.value == damaged.value
    assert (await history.extents(DEAD_LETTERS.full_name(run))).popitem()[1] == Extent(0, 1)

    await Exporter(history, run, tmp_path / "my.toml", tmp_path / "export").export(ALL, ())
    for kept in (history, SegmentHistory(tmp_path / "export")):
        rows = (await trajectory_table(kept, run, "grpo", tokens=True)).to_pylist()
        assert [row["completion"] for row in rows] == [one.completion_text for one in sent]
        assert rows[1]["token_ids"] == sent[1].token_ids.tolist()

    with RecordIndex(None) as index:
        found = await HistoryReader(IndexFollower(history, run, index), "grpo").trace("d/0/0/0")
    shown = history_json(found, str, "runs/x")
    assert len(shown["tokens"]) == SHOWN_TOKENS
    assert len(json.dumps(shown)) < 1 << 20
    async for record in history.records(topic, {0: Extent(0, 1)}):
        summary = summary_of(record, {})
        assert summary is not None
        assert summary.completion == sent[0].completion_text[:PREVIEW] + "…"
