"""``python -m benchmarks.record_index``: how long a record of a long run is looked for, and what knowing it costs.

A made-up run of real messages on an embedded broker: orders, trajectories, steps, skips, one crash. Its index is built
from nothing, once; then trajectories and groups are looked up as the dashboard does it, while nothing is written and
while a process beside writes on.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from benchmarks.audit.made_up import ALGORITHM, GROUP, MadeUpRun
from benchmarks.conditions import conditions
from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.history import BusHistory, ConnectedHistory
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.bus.port import Outgoing
from streamrl.inspection.process import tune_garbage_collector
from streamrl.inspection.replay.history import HistoryReader, TrajectoryHistory
from streamrl.observability.record_index.entries import Fold
from streamrl.observability.record_index.following import IndexFollower
from streamrl.observability.record_index.store import RecordIndex
from streamrl.schemas.codec import peek_trajectory_id
from streamrl.schemas.identifiers import make_group_id, make_trajectory_id
from streamrl.schemas.topics import TRAJECTORIES, WORK_ORDERS

RUN, PARTITIONS, TOKENS = "made-up", 8, 16
RESULTS = Path(__file__).parent / "results" / "index.json"
TURNS = 20
"""Catching up with a run that goes on, each time after ``--every`` seconds of its records."""


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record_index", description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000, help="trajectories")
    parser.add_argument("--lookups", type=int, default=200, help="of each kind")
    parser.add_argument("--pace", type=int, default=500, help="trajectories a second of the run that goes on")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two looks for what is new")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="streamrl-index-") as scratch:
        folder = Path(scratch)
        with start_cluster(folder / "kafka", progress=print) as cluster:
            result = asyncio.run(_measure(options, cluster.bootstrap_servers, folder / "records.sqlite"))
    command = f"make bench-index ARGS='--records {options.records} --seed {options.seed}'"
    result["conditions"] = conditions(began, options.seed, ["aiokafka", "msgpack"], command)
    options.results.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return result


async def _measure(options: argparse.Namespace, servers: str, path: Path) -> dict[str, Any]:
    bus = KafkaBus(KafkaSettings(bootstrap_servers=servers))
    await apply_topics(servers, RUN, PARTITIONS)
    began = time.monotonic()
    await MadeUpRun(bus, RUN, options.records, PARTITIONS, TOKENS).write()
    print(f"wrote {options.records:,} trajectories in {time.monotonic() - began:.0f} s", flush=True)
    tune_garbage_collector()
    result: dict[str, Any] = {"records": options.records, "tokens": TOKENS, "scan": await _scan(bus)}
    with RecordIndex(path) as index:
        follower = IndexFollower(_kept(bus), RUN, index, progress=_tell)
        result["build"] = await _timed_once(follower.catch_up(), options.records)
        size = sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*"))
        result["size"] = {"bytes": size, "bytes_a_record": round(size / options.records, 1)}
        result["finished"] = await _lookups(follower, options)
        print(json.dumps(result), flush=True)
        result["live"] = await _beside_a_writer(follower, options, servers)
        await follower.history.close()
    return result


def _kept(bus: KafkaBus) -> ConnectedHistory:
    """As the dashboard reads."""
    return ConnectedHistory(bus.for_single_records(), Fold(RUN).topics, "bench", bulk=bus)


def _tell(done: int, total: int) -> None:
    if done % 100_000 < 4000 < total:
        print(f"indexed {done:,} of {total:,}", flush=True)


async def _scan(bus: KafkaBus) -> dict[str, float]:
    """What finding one id takes without an index: the whole trajectories topic, ids only."""
    began, computed, found = time.monotonic(), time.process_time(), 0
    async for record in BusHistory(bus, "bench").records(TRAJECTORIES.full_name(RUN)):
        found += peek_trajectory_id(record.value, record.headers) == "nobody"
    return {"seconds": round(time.monotonic() - began, 2), "cpu_seconds": round(time.process_time() - computed, 2)}


async def _timed_once(task: Awaitable[None], records: int) -> dict[str, float]:
    began, computed = time.monotonic(), time.process_time()
    await task
    seconds, spent = time.monotonic() - began, time.process_time() - computed
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(spent, 2),
        "cpu_us_a_record": round(1e6 * spent / max(1, records), 1),
    }


async def _lookups(follower: IndexFollower, options: argparse.Namespace) -> dict[str, Any]:
    reader, dice = HistoryReader(follower, ALGORITHM), random.Random(options.seed)
    groups = options.records // GROUP

    def anybody() -> str:
        return make_trajectory_id(_group(dice.randrange(groups)), dice.randrange(GROUP))

    async def by_id() -> None:
        name = anybody()
        found = await reader.look_up(name)
        assert isinstance(found, TrajectoryHistory)
        assert found.trajectory.trajectory_id == name

    async def by_position() -> None:
        position = f"{dice.randrange(PARTITIONS)}@{dice.randrange(options.records // PARTITIONS)}"
        found = await reader.look_up(position)
        assert isinstance(found, TrajectoryHistory)

    async def of_a_group() -> None:
        await reader.look_up(_group(dice.randrange(groups)))

    # A kind after the other; the first of each is warm already, as in a viewer that has begun.
    return {
        name: await _times(look, options.lookups)
        for name, look in {"by_id": by_id, "by_position": by_position, "of_a_group": of_a_group}.items()
    }


def _group(number: int) -> str:
    return make_group_id(f"made-up/{number}", 0)


async def _times(look: Callable[[], Awaitable[None]], count: int) -> dict[str, float]:
    await look()
    times, computed = [], time.process_time()
    for _ in range(count):
        began = time.perf_counter()
        await look()
        times.append(1000 * (time.perf_counter() - began))
    spent = time.process_time() - computed
    return {**_percentiles(times), "cpu_ms": round(1000 * spent / count, 1)}


def _percentiles(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "p50_ms": round(statistics.median(ordered), 1),
        "p99_ms": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 1),
        "most_ms": round(ordered[-1], 1),
    }


async def _beside_a_writer(follower: IndexFollower, options: argparse.Namespace, servers: str) -> dict[str, Any]:
    """Lookups of old and of the newest trajectories, and what it costs to keep up."""
    first = options.records // GROUP
    context = multiprocessing.get_context("spawn")
    stop, written = context.Event(), context.Value("q", first)
    writer = context.Process(target=_write_on, args=(servers, first, options.pace, stop, written), daemon=True)
    writer.start()
    # Another process begins, which no event of this loop can tell.
    while written.value == first:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    try:
        reader, spent, seen = HistoryReader(follower, ALGORITHM), 0.0, written.value
        for _ in range(TURNS):
            await asyncio.sleep(options.every)
            computed = time.process_time()
            await follower.catch_up()
            spent += time.process_time() - computed
        kept = GROUP * max(1, written.value - seen)

        async def newest() -> None:
            found = await reader.look_up(make_trajectory_id(_group(written.value - 1), 0))
            assert isinstance(found, TrajectoryHistory)

        times = await _times(newest, options.lookups)
        old = await _lookups(follower, options)
    finally:
        stop.set()
        writer.join(30)
    return {
        "trajectories_per_s": options.pace,
        **old,
        "newest_by_id": times,
        "keeping_current": {
            "every_s": options.every,
            "records": kept,
            "cpu_us_a_record": round(1e6 * spent / kept, 1),
            "share_of_a_core": round(spent / (TURNS * options.every), 5),
        },
    }


def _write_on(servers: str, first: int, pace: int, stop: Event, written: Any) -> None:
    asyncio.run(_write_groups(servers, first, pace, stop, written))


async def _write_groups(servers: str, first: int, pace: int, stop: Event, written: Any) -> None:
    bus = KafkaBus(KafkaSettings(bootstrap_servers=servers))
    maker, publisher = MadeUpRun(bus, RUN, 0, PARTITIONS, TOKENS), await bus.publisher("beside")
    began, number = time.monotonic(), first
    while not stop.is_set():
        for _ in range(max(1, int((time.monotonic() - began) * pace / GROUP) - (number - first))):
            prompt = f"made-up/{number}"
            group, partition = make_group_id(prompt, 0), number % PARTITIONS
            order = maker.order(prompt, group, number, partition)
            await publisher.submit(Outgoing.of(WORK_ORDERS.full_name(RUN), order, key=group, partition=number % 64))
            for index in range(GROUP):
                made = maker.trajectory(prompt, group, index)
                await publisher.submit(Outgoing.of(TRAJECTORIES.full_name(RUN), made, key=group, partition=partition))
            number += 1
        await publisher.flush()
        written.value = number
        await asyncio.sleep(0.05)
    await publisher.close()


if __name__ == "__main__":
    main()
