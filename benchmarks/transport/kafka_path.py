"""Our path: typed arrays → Trajectory → frame → Kafka → frame → Trajectory with arrays.

*batched*: as the worker publishes, in batches that close after ``linger_s`` or ``max_batch_bytes``. *single*: each
trajectory is acknowledged before the next is sent.
"""

from collections.abc import Awaitable, Callable

from benchmarks.transport.round import Ends, MicroBatches, Round
from benchmarks.transport.workload import as_message, ended_trajectories, index_of
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Outgoing
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import Trajectory

PARTITIONS = LoopSettings().shards
"""Trajectories of one predicted length spread over this many partitions."""


async def produce(asked: Round, started: Callable[[], Awaitable[None]]) -> Ends:
    """Publish the round; returns when the broker has everything."""
    pool = ended_trajectories(asked.tokens, asked.seed)
    publisher = await _bus(asked).publisher("bench-worker")
    for partition in range(PARTITIONS):  # opens the connections; the consumer starts behind these
        await publisher.publish(Outgoing(asked.stream, None, "warm", partition))
    await started()
    ends = Ends(asked)
    async for index in ends:
        message = as_message(pool[index % len(pool)], index)
        partition = index // message.num_generations % PARTITIONS
        record = Outgoing.of(asked.stream, message, key=message.group_id, partition=partition)
        if asked.batching == "single":
            await publisher.publish(record)
        else:
            await publisher.submit(record)
    await publisher.close()
    return ends


async def consume(asked: Round, started: Callable[[], Awaitable[None]]) -> MicroBatches:
    """Read and decode the round."""
    subscription = await _bus(asked).subscribe([asked.stream], client_id="bench-trainer", start="latest")
    await started()
    batches = MicroBatches()
    while len(batches.entered) < asked.count:
        for record in await subscription.poll():
            message = record.message()
            assert isinstance(message, Trajectory)
            batches.add(index_of(message), message, len(message.token_ids))
    await subscription.close()
    return batches


def _bus(asked: Round) -> KafkaBus:
    return KafkaBus(KafkaSettings(bootstrap_servers=asked.address))
