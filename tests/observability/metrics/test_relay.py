import asyncio
from pathlib import Path

import aiohttp
import pytest

from streamrl.bus.embedded.node import free_ports
from streamrl.observability.metrics.exporting import Metering
from streamrl.observability.metrics.families import Meters
from streamrl.observability.metrics.metering import MeteringObserver
from streamrl.weights.relay.server import Relay
from streamrl.weights.settings import RelaySettings
from streamrl.weights.store import WeightStore


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    folder = tmp_path / "1-2"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    return WeightStore(tmp_path)


async def test_a_relay_counts_requests_and_the_bytes_of_weights(store: WeightStore) -> None:
    (port,) = free_ports(1)
    meters, stop = Meters("r"), asyncio.Event()
    metering = Metering(meters, MeteringObserver(meters), [])
    serving = asyncio.create_task(Relay(store, RelaySettings(port=port), metering.count_response).run(stop))
    address = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{address}/health"):
                    break
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.02)
        for headers in ({}, {"Range": "bytes=900-"}):
            async with session.get(f"{address}/weights/1-2/model.safetensors", headers=headers) as answer:
                await answer.read()
        async with session.get(f"{address}/weights/9-9/model.safetensors") as answer:
            assert answer.status == 404
    stop.set()
    await serving
    found = meters.registry.get_sample_value
    assert found("streamrl_weight_transfer_bytes_total", {"run": "r"}) == 1100
    statuses = {
        status: found("streamrl_relay_requests_total", {"run": "r", "status": status})
        for status in ("200", "206", "404")
    }
    assert statuses == {"200": 2, "206": 1, "404": 1}
