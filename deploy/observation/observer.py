"""Follows a run's topics and folds them into its state; reads only, and may be attached and detached at will."""

import asyncio
from dataclasses import dataclass, field

from deploy.observation.state import RunState
from schemas.errors import WireError
from schemas.ports.bus import Bus
from schemas.wire.topics import HEARTBEATS, SKIPS, STEPS

POLL_S = 0.5


@dataclass
class Observer:
    """``state`` is complete up to the last poll."""

    bus: Bus
    run_name: str
    state: RunState = field(default_factory=RunState)

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the state up to date.

        Consumes: steps, heartbeats and skips, from the beginning. Produces: nothing.
        Waits for: new records.
        On failure: raises; the run itself is not touched.
        On stop: returns within one poll, having read what was there.
        """
        topics = [topic.full_name(self.run_name) for topic in (STEPS, HEARTBEATS, SKIPS)]
        subscription = await self.bus.subscribe(topics, client_id="observer", start="earliest")
        try:
            while True:
                ending = stop.is_set()
                records = await subscription.poll(timeout_s=POLL_S)
                for record in records:
                    try:
                        self.state.observe(record.message())
                    except WireError:
                        continue
                if ending and not records:
                    return
        finally:
            await subscription.close()
