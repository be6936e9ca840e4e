"""Committed offsets of consumer groups, as the broker keeps them. Joins no group and commits nothing."""

import time
from collections.abc import Collection

from aiokafka.admin import AIOKafkaAdminClient

from deploy.bus.client.stopping import discard
from deploy.bus.cluster.facts import answered, open_admin
from deploy.bus.settings import KafkaSettings
from schemas.ports.bus import TopicPartition

LIST_EVERY_S = 30.0
"""Between two looks for groups that are new; those that are known are asked each time."""

Offsets = dict[TopicPartition, int]


class GroupOffsets:
    """Asked now and then, over one connection: to open one costs the broker more than what is asked."""

    def __init__(self, settings: KafkaSettings, topics: Collection[str]) -> None:
        self._settings = settings
        self._topics = frozenset(topics)
        self._admin: AIOKafkaAdminClient | None = None
        self._groups: list[str] = []
        self._listed_at = 0.0

    async def ask(self) -> dict[str, Offsets]:
        """For each consumer group that committed offsets of these topics: the next offset it wants, by partition.

        Raises:
            BrokerUnreachable: no broker answers.
            BusError: the broker refuses.
        """
        if self._admin is None:
            self._admin = await open_admin(self._settings)
        try:
            async with answered(self._settings):
                return await self._asked(self._admin)
        except BaseException:
            await self.close()  # the next one to be asked may be another broker
            raise

    async def close(self) -> None:
        """Release; bounded in time; idempotent, and the next question connects anew."""
        admin, self._admin = self._admin, None
        self._groups = []
        if admin is not None:
            await discard(admin)

    async def _asked(self, admin: AIOKafkaAdminClient) -> dict[str, Offsets]:
        now = time.monotonic()
        if listing := not self._groups or now - self._listed_at >= LIST_EVERY_S:
            self._groups = sorted(group for group, *_ in await admin.list_consumer_groups())
        asked = {group: await self._offsets(admin, group) for group in self._groups}
        found = {group: offsets for group, offsets in asked.items() if offsets}
        if listing:
            self._groups, self._listed_at = list(found), now
        return found

    async def _offsets(self, admin: AIOKafkaAdminClient, group: str) -> Offsets:
        """Looks for the group's coordinator each time: aiokafka takes the refusal of a former one for no offsets."""
        return {
            TopicPartition(tp.topic, tp.partition): kept.offset
            for tp, kept in (await admin.list_consumer_group_offsets(group)).items()
            if tp.topic in self._topics and kept.offset >= 0
        }


async def committed_offsets(settings: KafkaSettings, topics: Collection[str]) -> dict[str, Offsets]:
    """Ask once; see ``GroupOffsets.ask``."""
    asked = GroupOffsets(settings, topics)
    try:
        return await asked.ask()
    finally:
        await asked.close()
