"""A process that produces or consumes one round after the other: a round per line in, its times per line out.

Run as ``python -m benchmarks.transport.child produce`` (or ``consume``). After a round's line it opens its
connections, says ready, and waits for one more line before it begins.
"""

import asyncio
import json
import sys
from typing import Any

import uvloop

from benchmarks.transport import files_path, kafka_path, redis_path
from benchmarks.transport.round import Ends, MicroBatches, Round
from streamrl.inspection.process import tune_garbage_collector

READY = "ready"


def main(role: str) -> None:
    """Serve until the input ends."""
    tune_garbage_collector()
    while line := sys.stdin.readline():
        _say(_run(role, Round(**json.loads(line))))


def _run(role: str, asked: Round) -> dict[str, Any]:
    if asked.path == "kafka":
        if role == "produce":
            return _times(uvloop.run(kafka_path.produce(asked, _wait_on_the_loop)))
        return _times(uvloop.run(kafka_path.consume(asked, _wait_on_the_loop)))
    if asked.path == "redis":
        return _times(redis_path.produce(asked, _wait) if role == "produce" else redis_path.consume(asked, _wait))
    return _times(files_path.produce(asked, _wait) if role == "produce" else files_path.consume(asked, _wait))


def _say(what: Any) -> None:
    # Not through sys.stdout: unbuffered, as some environments set it, it loses what one write does not take.
    with open(sys.stdout.fileno(), "w", closefd=False) as out:
        print(json.dumps(what), file=out)


def _wait() -> None:
    _say(READY)
    sys.stdin.readline()


async def _wait_on_the_loop() -> None:
    await asyncio.to_thread(_wait)


def _times(result: Ends | MicroBatches) -> dict[str, Any]:
    if isinstance(result, Ends):
        return {"began": result.began, "at": result.at}
    return {"entered": [result.entered[index] for index in range(len(result.entered))]}


if __name__ == "__main__":
    main(sys.argv[1])
