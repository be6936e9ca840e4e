"""A writer and a reader of their own during a run, on its (otherwise unused) tokens topic, judged by Jepsen's rules.

What they were told by the real bus, under the same faults as everyone, is compared with the log that remains.
"""

import asyncio
import contextlib
from collections import defaultdict
from dataclasses import dataclass, field

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Outgoing, Publisher, Subscription, TopicPartition
from streamrl.schemas.errors import BusError
from streamrl.schemas.topics import TOKENS
from tests.pipeline.accounts import read_all
from tests.simulation.history import Acknowledged, BusHistory, Delivered, judge_bus

EVERY_S = 0.1
AGAIN_S = 0.3


@dataclass
class Witness:
    """``settings``: those of the run's processes, so that the same time-outs hold."""

    settings: KafkaSettings
    run: str
    acknowledged: list[Acknowledged] = field(default_factory=list)
    delivered: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    written: int = 0
    unknown: int = 0

    def __post_init__(self) -> None:
        self._topic = TOKENS.full_name(self.run)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self.write_loop()), asyncio.create_task(self.read_loop())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def write_loop(self) -> None:
        """Numbered records, round the partitions; what was not acknowledged is given up, never sent again."""
        while True:
            publisher: Publisher | None = None
            with contextlib.suppress(BusError):
                try:
                    publisher = await KafkaBus(self.settings).publisher("witness")
                    while True:
                        await self._write(publisher)
                        await asyncio.sleep(EVERY_S)
                finally:
                    if publisher is not None:
                        await publisher.close()
            self.unknown += 1
            await asyncio.sleep(AGAIN_S)

    async def _write(self, publisher: Publisher) -> None:
        self.written += 1
        number, partition = self.written, self.written % TOKENS.partitions
        position = await publisher.publish(Outgoing(self._topic, str(number).encode(), "witness", partition))
        self.acknowledged.append(Acknowledged("witness", self._topic, partition, position.offset, number))

    async def read_loop(self) -> None:
        """Reads on at its own offsets whenever the bus failed under it."""
        while True:
            subscription: Subscription | None = None
            with contextlib.suppress(BusError):
                try:
                    start = {
                        TopicPartition(self._topic, number): seen[-1] + 1 for number, seen in self.delivered.items()
                    }
                    subscription = await KafkaBus(self.settings).subscribe(
                        [self._topic], client_id="witness", start=start or "earliest"
                    )
                    while True:
                        for record in await subscription.poll(timeout_s=0.5):
                            self.delivered[record.partition].append(record.offset)
                finally:
                    if subscription is not None:
                        await subscription.close()
            await asyncio.sleep(AGAIN_S)

    async def problems(self, address: str) -> list[str]:
        """Call after ``stop``."""
        logs: dict[tuple[str, int], dict[int, int]] = {(self._topic, n): {} for n in range(TOKENS.partitions)}
        for record in await read_all(KafkaBus(KafkaSettings(bootstrap_servers=address)), self.run, TOKENS):
            logs[self._topic, record.partition][record.offset] = int(record.value or b"-1")
        delivered = [Delivered("witness", self._topic, number, seen) for number, seen in self.delivered.items()]
        found = [f"{each.rule}: {each.detail}" for each in judge_bus(BusHistory(logs, self.acknowledged, delivered))]
        counts: dict[int, int] = defaultdict(int)
        for log in logs.values():
            for number in log.values():
                counts[number] += 1
        return found + [
            f"duplicate: record {number} is on the log {count} times" for number, count in counts.items() if count > 1
        ]
