"""``python -m benchmarks.transport``: measures all paths in one run and writes the result and the plot."""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions
from benchmarks.transport import servers
from benchmarks.transport.measure import Outcome, Pair, Result, pair, play
from benchmarks.transport.report import write_plot
from benchmarks.transport.round import BATCH_BYTES, CONTENDERS, DEFAULTS, LINGER_S, OURS, Round
from benchmarks.transport.servers import redis_version
from streamrl.bus.embedded.jars import KAFKA_VERSION
from streamrl.schemas.topics import TRAJECTORIES

HERE = Path(__file__).parents[1]
WARM_UP = 3
"""So many times a round's trajectories go through each path first, unreported: the servers are warm in real life."""
ROUND_TOKENS = 8_000_000
PACED_TOKENS_PER_S = 1_600_000
ACKNOWLEDGED_SHARE = 10
"""Bound what a round takes, which the slowest path would draw out to minutes: of large trajectories there are fewer,
and a tenth where each waits for the broker's answer."""
LIBRARIES = ("aiokafka", "uvloop", "msgpack", "pydantic", "numpy", "redis", "orjson")


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport", description=__doc__)
    parser.add_argument("--count", type=int, default=5000, help="most trajectories in a round of full speed")
    parser.add_argument("--paced-s", type=float, default=2.0, help="seconds of a round at the given rate")
    parser.add_argument("--rate", type=float, default=500.0, help="most trajectories per second of the paced rounds")
    parser.add_argument("--tokens", type=int, nargs="+", default=[200, 2_000, 16_000])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=240.0, help="no repetition begins that would end later")
    parser.add_argument("--paths", nargs="+", choices=["kafka", "redis", "files"], default=["kafka", "redis", "files"])
    parser.add_argument(
        "--busy", type=int, default=2, help="processes that keep a core each busy beside the busy rounds"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "transport.json")
    options, began = parser.parse_args(arguments), time.monotonic()
    results = _measure(options)
    ours = {(result.tokens, result.is_busy): result for result in results if result.contender == OURS}
    rows = [result.row(ours.get((result.tokens, result.is_busy))) for result in results]
    asked = {"batch_bytes": BATCH_BYTES, "linger_ms": 1000 * LINGER_S, "busy_processes": options.busy}
    where = conditions(began, options.seed, LIBRARIES, "make bench-transport") | asked
    where["versions"] += f", Apache Kafka {KAFKA_VERSION} (one node), {redis_version()}"
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps({"conditions": where, "rows": rows}, indent=1) + "\n")
    write_plot(options.results.with_suffix(".png"), [row for row in rows if not row["busy"]])
    return rows


def _measure(options: argparse.Namespace) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as name, contextlib.ExitStack() as open_servers:
        folder = Path(name)
        addresses: dict[str, str] = {"files": str(folder)}
        if "kafka" in options.paths:
            addresses["kafka"] = open_servers.enter_context(servers.kafka(folder / "kafka"))
        if "redis" in options.paths:
            addresses["redis"] = open_servers.enter_context(servers.redis_at(folder / "redis"))
        return asyncio.run(_play_all(options, addresses))


async def _play_all(options: argparse.Namespace, addresses: dict[str, str]) -> list[Result]:
    """All rounds, interleaved, so that a slow minute of the machine hits every path."""
    contenders = [contender for contender in CONTENDERS if contender.path in options.paths]
    results = {tokens: [Result(contender, tokens) for contender in contenders] for tokens in options.tokens}
    smallest = min(options.tokens)
    busy = [Result(contender, smallest, True) for contender in contenders if contender in DEFAULTS and options.busy]
    began = time.monotonic()
    took: dict[int, float] = {}
    async with pair() as processes:
        for unreported in results[smallest]:
            await _play(processes, options, addresses, unreported, WARM_UP)
        for repetition in range(options.repetitions):
            for tokens, of_a_size in results.items():
                started = time.monotonic()
                if repetition and started - began + took[tokens] > options.budget_s:
                    continue
                with _busy_processes(0):
                    await _repetition(processes, options, addresses, of_a_size, repetition)
                if tokens == smallest:
                    with _busy_processes(options.busy):
                        await _repetition(processes, options, addresses, busy, repetition)
                took[tokens] = time.monotonic() - started
    return [*(result for of_a_size in results.values() for result in of_a_size), *busy]


async def _repetition(
    processes: Pair, options: argparse.Namespace, addresses: dict[str, str], results: list[Result], repetition: int
) -> None:
    # Whoever comes first has the caches of whatever ran before; so each repetition begins with another one.
    first = repetition % max(1, len(results))
    for result in [*results[first:], *results[:first]]:
        result.add(
            await _play(processes, options, addresses, result, 1),
            await _play(processes, options, addresses, result, None),
        )
        print(f"{repetition + 1}/{options.repetitions} {result.newest()}", flush=True)


@contextlib.contextmanager
def _busy_processes(number: int) -> Iterator[None]:
    """Processes that want a core each, as neighbours on a shared machine do."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def _play(
    processes: Pair, options: argparse.Namespace, addresses: dict[str, str], result: Result, times: int | None
) -> Outcome:
    """A round at full speed of so many times the usual trajectories, or (None) a paced one."""
    path, batching = result.contender
    stream = TRAJECTORIES.full_name(servers.RUN)
    rate, count = None, (times or 1) * min(options.count, max(1, ROUND_TOKENS // result.tokens))
    if result.contender == ("kafka", "single"):
        count = max(1, count // ACKNOWLEDGED_SHARE)
    if times is None:
        rate = min(options.rate, PACED_TOKENS_PER_S / result.tokens)
        count = round(rate * options.paced_s)
    asked = Round(path, batching, addresses[path], stream, result.tokens, count, rate, options.seed)
    outcome = await play(processes, asked)
    servers.forget(path, addresses[path], stream)
    return outcome


if __name__ == "__main__":
    main()
