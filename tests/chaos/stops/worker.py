"""A worker that fetches and adopts one version after the other while it samples, and is stopped at it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from random import Random

from streamrl.producers.generation.pace import pace_of
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.producers.generation.worker import GenerationWorker, RunContext
from streamrl.schemas.identifiers import PolicyVersion, partition_of_worker
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import WORK_ORDERS
from streamrl.schemas.weights import MANIFEST, WeightManifest
from streamrl.weights.fetch import WeightsFetcher
from tests.chaos.stops.delivered import doubled
from tests.chaos.stops.moment import Subject
from tests.fakes.publisher import FailingBus
from tests.fakes.scorer import FakeScorer
from tests.fakes.topics import create_topics, send, send_control
from tests.producers.gateway.gateway_harness import CharacterTokenizer, ScriptedEngine
from tests.producers.generation.factories import WORKER, FakeRelay, running_relay, work_order

RUN = "r"
BYTES = 3 << 20
EVERY_S = 0.08


class SlowAdopter(ScriptedEngine):
    """Reads what it adopts, and takes a moment for it."""

    adopted: int = 0

    async def adopt(self, directory: Path, version: PolicyVersion) -> None:
        assert (directory / MANIFEST).is_file(), f"{directory} is not whole"
        await asyncio.sleep(0.02)
        await super().adopt(directory, version)
        self.adopted += 1


@asynccontextmanager
async def worker(root: Path, _random: Random) -> AsyncIterator[Subject]:
    bus, engine = create_topics(FailingBus(), RUN), SlowAdopter()
    cache = root / "weights"
    made = GenerationWorker(
        bus,
        RunContext(
            RUN,
            LoopSettings(max_prompt_length=64, max_completion_length=128),
            GenerationSettings(),
            pace=lambda loop: replace(pace_of(loop), heartbeat_interval_s=0.05, drain_grace_s=0.2),
        ),
        WORKER,
        engine,
        CharacterTokenizer(),
        FakeScorer(),
        WeightsFetcher(cache),
    )
    async with running_relay() as relay:

        async def load() -> None:
            number = 0
            while True:
                ready = relay.add(PolicyVersion(1, number), size=BYTES)
                await send_control(bus, RUN, ready)
                for index in range(4):
                    order = work_order(4 * number + index)
                    await send(bus, RUN, WORK_ORDERS, order, order.group_id, partition_of_worker(WORKER))
                number += 1
                await asyncio.sleep(EVERY_S)

        async def judge() -> list[str]:
            return _damaged(cache) + doubled(bus, RUN) + await _second_life(root, relay)

        yield Subject(made.run, load, lambda: engine.adopted > 1, judge)


def _damaged(cache: Path) -> list[str]:
    problems = []
    for manifest in cache.glob("[0-9]*/" + MANIFEST):
        for file in WeightManifest.model_validate_json(manifest.read_bytes()).files:
            path = manifest.parent / file.name
            if not path.exists() or sha256(path.read_bytes()).hexdigest() != file.sha256:
                problems.append(f"{manifest.parent.name} calls itself whole, and {file.name} is not what it should be")
    return problems


async def _second_life(root: Path, relay: FakeRelay) -> list[str]:
    """Another worker of the host takes the cache over with its half-fetched files; no lock on it is left."""
    number = max((int(version.partition("-")[2]) for version in relay.content), default=-1)
    if number < 0:
        return []
    raw = relay.content[f"1-{number}"][MANIFEST]
    fetcher = WeightsFetcher(root / "weights", timeout_s=30.0)
    try:
        async with asyncio.timeout(5):
            await fetcher.fetch(relay.announce(PolicyVersion(1, number), raw))
    except TimeoutError:
        return ["the next worker waits for a lock that nobody holds"]
    finally:
        for versions in fetcher._caches.values():
            versions.release()
    return _damaged(root / "weights")
