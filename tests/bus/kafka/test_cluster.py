import time
from collections.abc import Awaitable

import pytest

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.cluster import (
    CODECS,
    GroupOffsets,
    ask_cluster,
    codec_problem,
    committed_offsets,
    offsets_since,
    open_admin,
    release_at,
)
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Outgoing, TopicPartition
from tests.contract.topics import create_topic


@pytest.mark.parametrize(("level", "release"), [(0, None), (7, "3.3"), (19, "3.7"), (25, "4.0"), (99, "4.3")])
def test_a_release_is_known_by_the_highest_level_of_its_metadata(level: int, release: str | None) -> None:
    assert release_at(level) == release


@pytest.mark.parametrize("codec", CODECS)
def test_a_codec_reads_back_what_it_wrote(codec: str) -> None:
    assert codec_problem(codec) is None


async def test_a_cluster_reports_topics_settings_groups_and_offsets_by_time(bootstrap_servers: str) -> None:
    settings = KafkaSettings(bootstrap_servers=bootstrap_servers)
    await create_topic(bootstrap_servers, "asked", 2)
    facts = await ask_cluster(settings, lambda name: name == "asked")
    assert (facts.topics["asked"].partitions, facts.topics["asked"].leaderless) == (2, 0)
    assert (facts.number("socket.request.max.bytes") or 0) >= 100 << 20
    assert facts.number("no.such.setting") is None
    bus, before = KafkaBus(settings), time.time()
    publisher = await bus.publisher("w")
    await publisher.publish(Outgoing("asked", b"x", "k", 0))
    await publisher.close()
    first, second = TopicPartition("asked", 0), TopicPartition("asked", 1)
    assert await offsets_since(settings, [first, second], before - 60) == {first: 0, second: 0}
    assert await offsets_since(settings, [first, second], before + 60) == {first: 1, second: 0}
    reader = await bus.subscribe(["asked"], client_id="r", group_id="asked.grpo")
    await reader.commit({first: 1})
    await reader.close()
    assert await committed_offsets(settings, {"asked"}) == {"asked.grpo": {first: 1}}
    assert await committed_offsets(settings, {"other"}) == {}


async def test_groups_are_asked_again_over_the_same_connection(
    bootstrap_servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, opened = KafkaSettings(bootstrap_servers=bootstrap_servers), list[KafkaSettings]()

    def noted(each: KafkaSettings) -> Awaitable[object]:
        opened.append(each)
        return open_admin(each)

    monkeypatch.setattr("streamrl.bus.kafka.cluster.open_admin", noted)
    await create_topic(bootstrap_servers, "again", 1)
    place = TopicPartition("again", 0)
    publisher, asked = await KafkaBus(settings).publisher("w"), GroupOffsets(settings, {"again"})
    for _ in range(3):
        await publisher.publish(Outgoing("again", b"x", "k", 0))
    await publisher.close()
    reader = await KafkaBus(settings).subscribe(["again"], client_id="r", group_id="again.grpo")
    try:
        assert await asked.ask() == {}
        for offset in (1, 2):
            await reader.commit({place: offset})
            assert await asked.ask() == {"again.grpo": {place: offset}}
        assert len(opened) == 1
        await asked.close()
        assert await asked.ask() == {"again.grpo": {place: 2}}
    finally:
        await asked.close()
        await reader.close()
