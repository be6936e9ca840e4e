"""Which policies of a run have topics of their own: what its control topic says."""

from contextlib import aclosing

from streamrl.bus.history import Extent, History
from streamrl.bus.port import TopicPartition, message_of
from streamrl.schemas.identifiers import scope_of
from streamrl.schemas.topics import CONTROL
from streamrl.settings.features import displays


async def scopes_of(history: History, run: str, read: dict[TopicPartition, int] | None = None) -> tuple[str, ...]:
    """Sorted scopes of the policies that ever had topics of their own in addition to the run's.

    ``read``: offsets of the control topic to start from; this call moves them to its ends.

    Raises:
        BusUnavailable: the topic cannot be read.
    """
    found: set[str] = set()
    policies_in = [display.policy_in for display in displays()]
    read = {} if read is None else read
    held = await history.extents(CONTROL.full_name(run))
    # A partition that ends before an offset that was read was recreated, and is read from its start.
    starts = {tp: at for tp, at in read.items() if tp in held and at <= held[tp].end}
    unread = {tp: Extent(max(extent.first, starts.get(tp, 0)), extent.end) for tp, extent in held.items()}
    async with aclosing(history.within(unread)) as records:
        async for record in records:
            if (message := message_of(record)) is not None:
                found |= {scope_of(run, policy) for one in policies_in if (policy := one(message)) is not None}
    read |= {tp: extent.end for tp, extent in held.items()}
    return tuple(sorted(found))
