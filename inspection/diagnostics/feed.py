"""The feed of the run that a command is connected to: its length buckets and its trainer's offsets.

Here the broker of a command and the fold of a run's topics meet; ``RunFeed`` itself knows no settings.
"""

from collections.abc import Callable, Mapping

from bus.history import BusHistory
from bus.kafka.cluster import GroupOffsets
from bus.port import TopicPartition
from inspection.diagnostics.connect import RunConnection
from inspection.diagnostics.lag import last_metrics, shards_of
from observability.run_state.feed import RECENT, Past, RunFeed
from observability.run_state.state import RunState
from schemas.topics import TRAJECTORIES


async def feed_of(
    connection: RunConnection, state: RunState, client_id: str, pace_s: Callable[[], float], past: Past = RECENT
) -> RunFeed:
    """Of a connection that names its run. ``pace_s``, ``past``: see ``RunFeed``.

    Raises:
        BusUnavailable: no broker answers.
    """
    bus = connection.bus
    partitions = len(await BusHistory(bus, client_id).extents(connection.name_of(TRAJECTORIES)))
    metrics = {} if connection.settings is not None else await last_metrics(connection)
    return RunFeed(
        bus,
        state,
        shards=shards_of(connection, partitions, metrics),
        committed=_TrainersOffsets(connection),
        client_id=client_id,
        availability=bus.availability,
        without_prefetch=bus.without_prefetch(),
        pace_s=pace_s,
        past=past,
    )


class _TrainersOffsets:
    """Of the consumer group that trains the run: it is named after the run and its algorithm."""

    def __init__(self, connection: RunConnection) -> None:
        self._prefix = f"{connection.run}."
        self._offsets = GroupOffsets(connection.kafka, {connection.name_of(TRAJECTORIES)})

    async def ask(self) -> Mapping[TopicPartition, int]:
        groups = await self._offsets.ask()
        return next((offsets for group, offsets in groups.items() if group.startswith(self._prefix)), {})

    async def close(self) -> None:
        await self._offsets.close()
