"""A pytest plugin: ``living_run`` is a run of known content on the session's broker, as it stands while it runs.

Two workers, five steps, some lag.
"""

import os
import time

import pytest_asyncio

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.bus.port import Outgoing, TopicPartition
from streamrl.inspection.diagnostics.connect import RunConnection
from streamrl.schemas.control import WeightsReady
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import WorkerState
from streamrl.schemas.topics import CONTROL, DEAD_LETTERS, HEARTBEATS, STEPS, TRAJECTORIES
from tests.schemas.examples import SHA256, examples, trajectory

RUN = f"living_run{os.environ.get('PYTEST_XDIST_WORKER', '')}"
"""Each process of a session writes one of its own to the broker that they share."""
PARTITIONS, BUCKETS, STEPS_TAKEN = 8, 4, 5
METRICS = {
    **{f"kafka/finished/bucket_{bucket}": 4.0 for bucket in range(BUCKETS)},
    **{f"kafka/lag/bucket_{bucket}": 1.0 for bucket in range(BUCKETS)},
    "ledger/groups": 2.0,
    "ledger/skipped/stale": 4.0,
    "reward": 0.5,
    "num_tokens": 1000.0,
    "off_policy/max": 2.0,
}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def written_run(bootstrap_servers: str) -> RunConnection:
    """Written once; its workers may be silent by now."""
    await write_run(bootstrap_servers, RUN)
    return RunConnection(KafkaSettings(bootstrap_servers=bootstrap_servers), RUN)


@pytest_asyncio.fixture(loop_scope="session")
async def living_run(bootstrap_servers: str, written_run: RunConnection) -> RunConnection:
    """The same run, its workers just heard of."""
    await beat(bootstrap_servers, RUN)
    return written_run


async def write_run(servers: str, run: str) -> None:
    """40 trajectories, two of them finished in each partition, one that does not decode, and a dead letter."""
    await apply_topics(servers, run, PARTITIONS)
    bus, now = KafkaBus(KafkaSettings(bootstrap_servers=servers)), time.time()
    publisher = await bus.publisher("writer")
    topic = TRAJECTORIES.full_name(run)
    for number in range(40):
        message = trajectory(5 + number, trajectory_id=f"gsm8k/7/0/{number}", worker_id=f"worker-{number % 2}")
        await publisher.submit(Outgoing.of(topic, message, key="gsm8k/7/0", partition=number % PARTITIONS))
    await publisher.publish(Outgoing(topic, b"rubbish", None, 3))
    await publisher.publish(
        Outgoing(DEAD_LETTERS.full_name(run), b"x", "k", 0, (("dlq-error-class", b"MalformedFrame"),))
    )
    ready = WeightsReady(
        sequence=1, sent_at=now, version=PolicyVersion(2, 5), step=5, manifest_sha256=SHA256, relays=("http://r:1",)
    )
    await publisher.publish(Outgoing.of(CONTROL.full_name(run), ready, key="weights/policy"))
    await publisher.close()
    trainer = await bus.transactional(f"{run}.grpo")
    report = examples()["step-report"].replace(finished=False, metrics=METRICS)
    for step in range(1, STEPS_TAKEN + 1):
        record = report.replace(step=step, version=PolicyVersion(2, step), sent_at=now + step / 10)
        offsets = {TopicPartition(topic, partition): step // 2 for partition in range(PARTITIONS)}
        await trainer.commit(
            [Outgoing.of(STEPS.full_name(run), record, key="grpo")], offsets=offsets, group_id=f"{run}.grpo"
        )
    await trainer.close()


async def beat(servers: str, run: str) -> None:
    """Both workers say that they live, now: a status forgets those unheard of for a minute."""
    publisher = await KafkaBus(KafkaSettings(bootstrap_servers=servers)).publisher("writer")
    example = examples()["heartbeat"].replace(sent_at=time.time(), state=WorkerState.READY)
    for number in range(2):
        heartbeat = example.replace(worker_id=f"worker-{number}")
        await publisher.publish(Outgoing.of(HEARTBEATS.full_name(run), heartbeat, key=f"worker-{number}"))
    await publisher.close()
