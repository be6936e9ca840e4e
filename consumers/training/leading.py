"""Heartbeats of the leading trainer, on the run's topic."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from streamrl.bus.port import Outgoing
from streamrl.bus.waiting import wait_for_tasks
from streamrl.consumers.training.session import TrainerContext
from streamrl.consumers.training.trainer import Trainer
from streamrl.schemas.errors import BusError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import TrainerBeat
from streamrl.schemas.topics import HEARTBEATS

log = structlog.get_logger()

BEAT_S = 1.0
"""Seconds between two heartbeats."""


@dataclass
class LeadingTrainer:
    """A trainer that sends heartbeats. ``beat_s``: seconds between two of them."""

    trainer: Trainer
    beat_s: float = BEAT_S

    async def run(self, stop: asyncio.Event) -> None:
        """Train, and send heartbeats during training.

        Consumes: trajectories, as the trainer does.
        Produces: what the trainer does; heartbeats, once it holds a lineage.
        Waits for: what the trainer does.
        On failure: raises what the trainer raises; a failed heartbeat is only logged.
        On stop: ends as the trainer does.
        """
        async with beating(self.trainer.context, lambda: self.trainer.version, self.beat_s):
            await self.trainer.run(stop)


@asynccontextmanager
async def beating(
    context: TrainerContext, newest: Callable[[], PolicyVersion | None], beat_s: float
) -> AsyncIterator[None]:
    """Send heartbeats during the block, from the trainer's first lineage on, even while it opens the next one or rests.

    ``newest``: the version of the trainer's weights; None: it holds no lineage.
    """
    beats = asyncio.create_task(_beat(context, newest, beat_s))
    try:
        yield
    finally:
        beats.cancel()
        await wait_for_tasks([beats])


async def _beat(context: TrainerContext, newest: Callable[[], PolicyVersion | None], beat_s: float) -> None:
    """Send heartbeats until cancelled."""
    run, incarnation, sequence, version = context.run, uuid.uuid4().hex[:8], 0, None
    name, topic = context.settings.algorithm.name, HEARTBEATS.full_name(run.scope)
    while True:
        try:
            publisher = await run.bus.publisher(f"{name}-beats")
            try:
                while True:
                    version = newest() or version
                    if version is not None:
                        beat = TrainerBeat(
                            algorithm=name,
                            incarnation=incarnation,
                            version=version,
                            sequence=sequence,
                            policy=run.named_policy,
                            sent_at=context.clock(),
                        )
                        sequence += 1
                        await publisher.publish(Outgoing.of(topic, beat, key=name))
                    await asyncio.sleep(beat_s)
            finally:
                await publisher.close()
        except BusError as error:
            log.warning("heartbeat not sent, trying again", error=str(error))
            await asyncio.sleep(beat_s)
