"""A feed of the run that a command is attached to: which partitions are which bucket, and the trainer's offsets."""

from collections.abc import Mapping

from deploy.bus.cluster.groups import committed_offsets
from deploy.inspection.bus_history import BusHistory
from deploy.live.feed import Committed, LiveFeed
from deploy.live.state import LiveState
from deploy.surveys.attachment import Attachment
from deploy.surveys.standing.standing import last_metrics, shards_of
from schemas.ports.bus import TopicPartition
from schemas.wire.topics import TRAJECTORIES


async def feed_of(attached: Attachment, state: LiveState, client_id: str) -> LiveFeed:
    """Of an attachment that names its run.

    Raises:
        BusUnavailable: no broker answers.
    """
    partitions = len(await BusHistory(attached.bus, client_id).extents(attached.name_of(TRAJECTORIES)))
    metrics = {} if attached.settings is not None else await last_metrics(attached)
    shards, bus = shards_of(attached, partitions, metrics), attached.bus
    return LiveFeed(bus, state, shards, _committed(attached), client_id, bus.outage, bus.unhurried)


def _committed(attached: Attachment) -> Committed:
    topic = attached.name_of(TRAJECTORIES)

    async def committed() -> Mapping[TopicPartition, int]:
        groups = await committed_offsets(attached.kafka, {topic})
        ours = [offsets for group, offsets in groups.items() if group.startswith(f"{attached.run}.")]
        return ours[0] if ours else {}

    return committed
