"""A feed of the run that a command is attached to: which partitions are which bucket, and the trainer's offsets."""

from collections.abc import Callable, Mapping

from deploy.bus.cluster.groups import GroupOffsets
from deploy.inspection.bus_history import BusHistory
from deploy.live.feed import LiveFeed
from deploy.live.state import LiveState
from deploy.surveys.attachment import Attachment
from deploy.surveys.standing.standing import last_metrics, shards_of
from schemas.ports.bus import TopicPartition
from schemas.wire.topics import TRAJECTORIES


async def feed_of(attached: Attachment, state: LiveState, client_id: str, pace_s: Callable[[], float]) -> LiveFeed:
    """Of an attachment that names its run. ``pace_s``: see ``LiveFeed``.

    Raises:
        BusUnavailable: no broker answers.
    """
    partitions = len(await BusHistory(attached.bus, client_id).extents(attached.name_of(TRAJECTORIES)))
    metrics = {} if attached.settings is not None else await last_metrics(attached)
    shards, bus = shards_of(attached, partitions, metrics), attached.bus
    return LiveFeed(bus, state, shards, _TrainersOffsets(attached), client_id, bus.outage, bus.unhurried, pace_s)


class _TrainersOffsets:
    """Of the group that trains the run, which is named after it."""

    def __init__(self, attached: Attachment) -> None:
        self._group = f"{attached.run}."
        self._asked = GroupOffsets(attached.kafka, {attached.name_of(TRAJECTORIES)})

    async def ask(self) -> Mapping[TopicPartition, int]:
        groups = await self._asked.ask()
        return next((offsets for group, offsets in groups.items() if group.startswith(self._group)), {})

    async def close(self) -> None:
        await self._asked.close()
