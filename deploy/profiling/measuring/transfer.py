"""Seconds from weights in the store to an engine that samples with them, through the real relay and fetcher."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.relay.server import Relay
from coordinator.relay.store import WeightsStore
from coordinator.settings import RelaySettings
from deploy.broker.probe import free_ports
from producers.generation.engines.decoder import Decoder
from producers.generation.weights.fetcher import WeightsFetcher
from schemas.errors import WeightsError
from schemas.messages.control import WeightsReady

STARTING_S = 10.0


@dataclass(frozen=True, slots=True)
class TransferPoint:
    """Fetching, checking and reading in seconds; ``adopt_s``: what stalls the decoder."""

    fetch_s: float
    read_s: float
    adopt_s: float

    @property
    def total_s(self) -> float:
        """From store to sampling."""
        return self.fetch_s + self.read_s + self.adopt_s


async def transferred(ready: WeightsReady, cache: Path, decoder: Decoder[Any]) -> TransferPoint:
    """Bring one announced version into a decoder that runs nothing."""
    began = time.perf_counter()
    directory = await WeightsFetcher(cache).fetch(ready)
    fetched = time.perf_counter()
    weights = decoder.read_weights(directory)
    read = time.perf_counter()
    decoder.adopt(weights)
    return TransferPoint(fetched - began, read - fetched, time.perf_counter() - read)


@asynccontextmanager
async def relay_of(store: Path) -> AsyncIterator[str]:
    """The address of a relay over a weights store, on the loopback interface."""
    (port,) = free_ports(1)
    settings, stop = RelaySettings(port=port), asyncio.Event()
    serving = asyncio.create_task(Relay(WeightsStore(store), settings).run(stop))
    try:
        await _answers(settings.host, port)
        yield f"http://{settings.host}:{port}"
    finally:
        stop.set()
        await serving


async def _answers(host: str, port: int) -> None:
    deadline = time.monotonic() + STARTING_S
    while time.monotonic() < deadline:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return
    raise WeightsError(f"expected a relay on {host}:{port}, got no answer within {STARTING_S} s")
