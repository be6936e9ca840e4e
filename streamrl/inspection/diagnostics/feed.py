"""Builds the feed of the run that a command is connected to.

``RunFeed`` knows no settings, so this module gives it the run's length buckets and planned steps.
"""

from collections.abc import Callable

from streamrl.bus.history import BusHistory
from streamrl.inspection.diagnostics.connect import RunConnection
from streamrl.inspection.diagnostics.lag import newest_steps, shards_of
from streamrl.observability.run_state.feed import RECENT, Past, RunFeed, with_evaluations
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.settings.features import awaited


async def feed_of(
    connection: RunConnection, state: RunState, client_id: str, pace_s: Callable[[], float], past: Past = RECENT
) -> RunFeed:
    """The feed of a connection that names its run. ``pace_s``, ``past``: see ``RunFeed``.

    Raises:
        BusUnavailable: no broker answers.
    """
    bus, settings = connection.bus, connection.settings
    state.progress.planned_steps = None if settings is None else settings.training.max_steps
    partitions = len(await BusHistory(bus, client_id).extents(connection.name_of(TRAJECTORIES)))
    if settings is not None and awaited(settings) is not None:
        past = with_evaluations(past)
    metrics = {} if settings is not None else (await newest_steps(connection)).metrics
    return RunFeed(
        bus,
        state,
        shards=shards_of(connection, partitions, metrics),
        client_id=client_id,
        availability=bus.availability,
        without_prefetch=bus.without_prefetch(),
        pace_s=pace_s,
        past=past,
    )
