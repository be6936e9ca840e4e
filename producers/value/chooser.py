"""The dispatcher's chooser of prompts: values of prompts, fed from the topics of this run and of earlier ones.

Invariant a_start_reads_a_bounded_number_of_samples: of each run, the newest samples of each partition, up to a number
and to a size in bytes.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import structlog

from streamrl.bus.port import Bus, Record, TopicPartition, message_of
from streamrl.producers.dispatch.choosing import Decision
from streamrl.producers.value.estimates import PromptValues
from streamrl.schemas.errors import SettingsError, TopicMissing
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import FinishedCompletion, Prompt, Trajectory

log = structlog.get_logger()

MAX_RECORDS = 65_536
"""Samples read of each run, over all partitions: of 8 a group, several passes over 2,000 prompts, in some seconds."""
MAX_BYTES = 256 << 20
"""Most bytes of these samples, about: long trajectories have megabytes each."""
MEASURED = 16
"""Newest samples of a partition whose mean size is taken for all."""
CLIENT_ID = "value-replay"


class ValuedPrompts:
    """Orders prompts by their values; see ``PromptChooser``. ``history``: names of earlier runs on the same broker."""

    def __init__(
        self, reward_weights: Mapping[str, float], generations: int, seed: int, history: Sequence[str] = ()
    ) -> None:
        self.values = PromptValues(reward_weights, generations, seed)
        self._history = tuple(history)

    def observe(self, sample: FinishedCompletion) -> None:
        """See ``PromptChooser``."""
        self.values.observe(sample)

    def decide(self, position: int, prompt: Prompt, version: int) -> Decision:
        """See ``PromptChooser``."""
        return self.values.decide(position, prompt, version)

    async def recall(self, bus: Bus, run: str, on_poll: Callable[[], None]) -> None:
        """See ``PromptChooser``.

        Raises:
            SettingsError: the broker does not have an earlier run.
        """
        await self._read(bus, run, "", on_poll)
        for earlier in self._history:
            try:
                await self._read(bus, earlier, earlier, on_poll)
            except TopicMissing as error:
                raise SettingsError(
                    f"expected dispatch.value_history to name runs whose topics this broker has, got {earlier!r}; "
                    "leave it out"
                ) from error
        log.info("values of prompts known", prompts=self.values.prompts)

    async def _read(self, bus: Bus, run: str, name: str, on_poll: Callable[[], None]) -> None:
        topic = TRAJECTORIES.full_name(run)
        # The first subscription only reads offsets: a start offset must be given when subscribing.
        subscription = await bus.subscribe([topic], client_id=CLIENT_ID, start="latest")
        try:
            first, ends = await subscription.beginning_offsets(), await subscription.end_offsets()
        finally:
            await subscription.close()
        newest = {tp: max(first[tp], ends[tp] - MEASURED) for tp in ends}
        sizes = [len(record.value or b"") async for record in _records(bus, topic, newest, on_poll)]
        # Partitions are length buckets, and all samples of a group are in one. The same share of each is read.
        total = sum(ends[tp] - first[tp] for tp in ends)
        share = min(1.0, MAX_RECORDS / max(1, total), MAX_BYTES * len(sizes) / max(1, total * sum(sizes)))
        start = {tp: ends[tp] - int(share * (ends[tp] - first[tp])) for tp in ends}
        async for record in _records(bus, topic, start, on_poll):
            if isinstance(message := message_of(record), Trajectory):
                self.values.observe(message, name)


async def _records(
    bus: Bus, topic: str, start: Mapping[TopicPartition, int], on_poll: Callable[[], None]
) -> AsyncIterator[Record]:
    """The records from these offsets up to the present ends."""
    subscription = await bus.subscribe([topic], client_id=CLIENT_ID, start=start)
    try:
        ends = await subscription.end_offsets()
        while any(at < ends[tp] for tp, at in (await subscription.positions()).items()):
            on_poll()
            for record in await subscription.poll(timeout_s=1.0):
                yield record
    finally:
        await subscription.close()
