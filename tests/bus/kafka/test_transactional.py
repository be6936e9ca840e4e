"""What a commit asks of the broker besides the transaction itself."""

from collections.abc import Callable

import pytest
from aiokafka.client import AIOKafkaClient

from bus.kafka.bus import KafkaBus
from bus.kafka.settings import KafkaSettings
from bus.port import Outgoing
from schemas.errors import BusError
from tests.contract.topics import create_topic

pytestmark = pytest.mark.kafka


async def test_the_topics_are_asked_for_once_and_not_at_every_commit(
    bootstrap_servers: str, counted: Callable[[], int]
) -> None:
    bus, topic = KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers)), "transactional-1"
    await create_topic(bootstrap_servers, topic, 1)
    publisher = await bus.transactional(f"{topic}-writer")
    for number in range(5):
        await publisher.commit([Outgoing(topic, b"%d" % number, None, 0)])
    assert counted() == 1
    with pytest.raises(BusError, match="partition below"):
        await publisher.commit([Outgoing(topic, b"elsewhere", None, 99)])
    with pytest.raises(BusError, match="existing topic"):
        await publisher.commit([Outgoing(f"{topic}-not-there", b"nowhere", None)])
    assert counted() == 2
    await publisher.close()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often a client asked for the metadata of all topics."""
    calls = []
    ask = AIOKafkaClient.fetch_all_metadata

    async def counting(client: AIOKafkaClient) -> object:
        calls.append(client)
        return await ask(client)

    monkeypatch.setattr(AIOKafkaClient, "fetch_all_metadata", counting)
    return lambda: len(calls)
