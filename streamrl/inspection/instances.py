"""Which instances were ever attached to a run: what its control topic says."""

from contextlib import aclosing

from streamrl.bus.history import Extent, History
from streamrl.bus.port import TopicPartition, message_of
from streamrl.schemas.control import InstanceState
from streamrl.schemas.identifiers import scope_of
from streamrl.schemas.topics import CONTROL


async def instances_of(history: History, run: str, read: dict[TopicPartition, int] | None = None) -> tuple[str, ...]:
    """Scopes of the instances, sorted. ``read``: only what stands behind these offsets is looked at, and they move on.

    Raises:
        BusUnavailable: the topic cannot be read.
    """
    found: set[str] = set()
    read = {} if read is None else read
    held = await history.extents(CONTROL.full_name(run))
    # A topic that ends before what was read of it was made anew, and is read from its beginning.
    behind = {tp: at for tp, at in read.items() if tp in held and at <= held[tp].end}
    unread = {tp: Extent(max(extent.first, behind.get(tp, 0)), extent.end) for tp, extent in held.items()}
    async with aclosing(history.within(unread)) as records:
        async for record in records:
            if isinstance(message := message_of(record), InstanceState):
                found.add(scope_of(run, message.policy))
    read |= {tp: extent.end for tp, extent in held.items()}
    return tuple(sorted(found))
