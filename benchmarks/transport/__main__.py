"""``python -m benchmarks.transport``: measures all paths in one run and writes the result, the table and the plot."""

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from pathlib import Path

from benchmarks.transport import servers
from benchmarks.transport.measure import Outcome, Pair, Result, pair, play
from benchmarks.transport.report import environment, write_plot, write_table
from benchmarks.transport.round import PATHS, Round
from schemas.topics import TRAJECTORIES

HERE = Path(__file__).parents[1]
WARM_UP = 3
"""So many times a round's trajectories go through each path first, unreported: the servers are warm in real life."""


def main(arguments: list[str] | None = None) -> list[Result]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport", description=__doc__)
    parser.add_argument("--count", type=int, default=5000, help="trajectories per round of full speed")
    parser.add_argument("--paced-count", type=int, default=1000, help="trajectories per round at the given rate")
    parser.add_argument("--rate", type=float, default=500.0, help="trajectories per second of the paced rounds")
    parser.add_argument("--tokens", type=int, nargs="+", default=[200, 2_000, 16_000])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=300.0, help="no repetition begins that would end later")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "transport.json")
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    results = _measure(options)
    rows = [result.row() for result in results]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(rows, indent=2) + "\n")
    facts = environment(options, time.monotonic() - began)
    plot = options.results.with_suffix(".png")
    write_plot(plot, rows)
    write_table(options.readme, rows, facts, plot)
    return results


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
    results = {tokens: [Result(path, tokens) for path in options.paths] for tokens in options.tokens}
    began = time.monotonic()
    took: dict[int, float] = {}
    async with pair() as processes:
        for unreported in results[min(options.tokens)]:
            await _play(processes, options, addresses, unreported, WARM_UP * options.count, None)
            await _play(processes, options, addresses, unreported, options.paced_count, options.rate)
        for repetition in range(options.repetitions):
            for tokens, of_a_size in results.items():
                started = time.monotonic()
                if repetition and started - began + took[tokens] > options.budget_s:
                    continue
                for result in of_a_size:
                    full_speed = await _play(processes, options, addresses, result, options.count, None)
                    paced = await _play(processes, options, addresses, result, options.paced_count, options.rate)
                    result.add(full_speed, paced)
                    print(f"{repetition + 1}/{options.repetitions} {result.newest()}", flush=True)
                took[tokens] = time.monotonic() - started
    return [result for of_a_size in results.values() for result in of_a_size]


async def _play(
    processes: Pair,
    options: argparse.Namespace,
    addresses: dict[str, str],
    result: Result,
    count: int,
    rate: float | None,
) -> Outcome:
    address = addresses[result.path]
    stream = TRAJECTORIES.full_name(servers.RUN)
    outcome = await play(processes, Round(result.path, address, stream, result.tokens, count, rate, options.seed))
    servers.forget(result.path, address, stream)
    return outcome


if __name__ == "__main__":
    main()
