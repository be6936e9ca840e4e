"""What others may do to the trajectories topic: repeats, garbage, deletion."""

import asyncio
import random
import time

from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Outgoing, Record
from streamrl.schemas.errors import DataLossRefused
from streamrl.schemas.topics import TRAJECTORIES
from tests.chaos.faults.plan import Event, Fault
from tests.chaos.runs.chaos_run import ChaosRun
from tests.chaos.runs.waiting import FleetFailed
from tests.pipeline.accounts import read_all

END_S = 60.0
FLOOD = 250


async def repeat_recent(run: ChaosRun, event: Event) -> float:
    """A producer sends records again that it sent a moment ago."""
    records = await _records(run)
    await _send(run, records[-random.Random(event.seed).randint(5, 25) :])
    return time.time()


async def repeat_old(run: ChaosRun, event: Event) -> float:
    """Sends that were given up long ago arrive after all."""
    records = await _records(run)
    await _send(run, records[: random.Random(event.seed).randint(5, 25)])
    return time.time()


async def poison(run: ChaosRun, event: Event) -> float:
    """Bytes that are none of our messages, at whatever depth the partitions have by then; too few to stop the trainer.

    A run has two such events at most, and a trainer stops at more than ``BREAKER_MIN_BAD`` records.
    """
    generator = random.Random(event.seed)
    for _ in range(4):
        await _send(run, [_garbage(run, generator)])
        await asyncio.sleep(0.3)
    return time.time()


async def poison_flood(run: ChaosRun, event: Event) -> float:
    """60 % of what arrives is garbage: the trainer must stop, and say why."""
    generator = random.Random(event.seed)
    await run.fleet.end_trainer()
    records = await _records(run)
    flood = [_garbage(run, generator) if generator.random() < 0.6 else generator.choice(records) for _ in range(FLOOD)]
    await _send(run, flood)
    ended = await run.fleet.run_once("trainer", END_S)
    if ended.code == 0 or not ended.last_line.startswith("error: "):
        raise FleetFailed(f"a trainer fed 60 % garbage ended with {ended}")
    run.reaches_last_step = False
    return time.time()


async def recreate_topic(run: ChaosRun, _event: Event) -> float:
    """The trajectories topic is deleted and made again, and filled with other records to the same length."""
    await run.until(lambda: run.step() >= 8, "checkpoint")
    await run.fleet.end_trainer()
    await run.fleet.end_others()
    run.is_whole = run.reaches_last_step = False
    records = await _records(run)
    topic = TRAJECTORIES.full_name(run.setting.name)
    admin = AIOKafkaAdminClient(bootstrap_servers=run.broker.address)
    await admin.start()
    try:
        await admin.delete_topics([topic])
        await asyncio.sleep(1.0)
        partitions = run.setting.settings.loop.trajectory_partitions
        await admin.create_topics(
            [NewTopic(topic, partitions, 1, topic_configs=TRAJECTORIES.configs(replication_factor=1))]
        )
    finally:
        await admin.close()
    await asyncio.sleep(1.0)
    await _send(run, records[::-1])
    await _expect_refusal(run)
    return time.time()


async def add_partition(run: ChaosRun, _event: Event) -> float:
    """The topic grows by a partition, something is sent there, and the trainer's next life has to account for it."""
    topic = TRAJECTORIES.full_name(run.setting.name)
    count = run.setting.settings.loop.trajectory_partitions
    records = (await _records(run))[-8:]
    admin = AIOKafkaAdminClient(bootstrap_servers=run.broker.address)
    await admin.start()
    try:
        await admin.create_partitions({topic: NewPartitions(count + 1)})
    finally:
        await admin.close()
    await asyncio.sleep(1.0)
    await _send(run, [record._replace(partition=count) for record in records])
    run.fleet.kill(await run.fleet.living("trainer"))
    return time.time()


async def expire_retention(run: ChaosRun, _event: Event) -> float:
    """Records that the trainer has not had are deleted: it refuses to start, and goes on when the loss is accepted."""
    await run.until(lambda: run.step() >= 8, "checkpoint")
    await run.fleet.end_trainer()
    await asyncio.sleep(2.0)
    bus = KafkaBus(KafkaSettings(bootstrap_servers=run.broker.address))
    subscription = await bus.subscribe([TRAJECTORIES.full_name(run.setting.name)], client_id="chaos")
    ends = await subscription.end_offsets()
    await subscription.close()
    admin = AIOKafkaAdminClient(bootstrap_servers=run.broker.address)
    await admin.start()
    try:
        await admin.delete_records(
            {KafkaPartition(*tp): RecordsToDelete(before_offset=end) for tp, end in ends.items()}
        )
    finally:
        await admin.close()
    await _expect_refusal(run)
    accepted = time.time()
    run.fleet.start_trainer("--ingest.accept_loss=true")
    return accepted


async def _expect_refusal(run: ChaosRun) -> None:
    ended = await run.fleet.run_once("trainer", END_S)
    if ended.code != DataLossRefused.exit_code:
        raise FleetFailed(f"expected a trainer that refuses with code {DataLossRefused.exit_code}, got {ended}")


async def _records(run: ChaosRun) -> list[Record]:
    bus = KafkaBus(KafkaSettings(bootstrap_servers=run.broker.address))
    return sorted(await read_all(bus, run.setting.name, TRAJECTORIES), key=lambda record: record.timestamp)


async def _send(run: ChaosRun, records: "list[Record] | list[Outgoing] | list[Record | Outgoing]") -> None:
    bus = KafkaBus(KafkaSettings(bootstrap_servers=run.broker.address))
    publisher = await bus.publisher("rogue")
    try:
        for record in records:
            await publisher.publish(Outgoing(record.topic, record.value, record.key, record.partition, record.headers))
    finally:
        await publisher.close()


def _garbage(run: ChaosRun, generator: random.Random) -> Outgoing:
    partition = generator.randrange(run.setting.settings.loop.trajectory_partitions)
    value = generator.choice([generator.randbytes(generator.randint(1, 400)), b"", None])
    headers = generator.choice([(), (("schema", b"trajectory"), ("schema-version", b"1"))])
    return Outgoing(TRAJECTORIES.full_name(run.setting.name), value, "vandal/0/0", partition, headers)


FAULTS = (
    Fault("duplicates", repeat_recent, ("B2",)),
    Fault("late-sends", repeat_old, ("B2",)),
    Fault("poison", poison, ("F1",)),
    Fault("poison-flood", poison_flood, ("F3",), mixes=False),
    Fault("partition-added", add_partition, ("A11",), mixes=False),
    Fault("topic-recreated", recreate_topic, ("A10",), mixes=False),
    Fault("retention-expired", expire_retention, ("A12",), mixes=False),
)
