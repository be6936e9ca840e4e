"""``python -m benchmarks.audit``: writes a run onto an embedded broker, audits it as a user would, and times it.

Then the same run in memory, revealed bit by bit as if it went on: what each look takes of a processor, of a follower
and of an audit of everything that is there.
"""

import argparse
import asyncio
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.audit.followed import following
from benchmarks.audit.made_up import MadeUpRun
from benchmarks.commands import audited
from benchmarks.conditions import conditions
from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.embedded.jars import KAFKA_VERSION
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.consumers.training.checkpoints.manifest import MANIFEST, STATE, encode_manifest
from streamrl.settings.run_directory import RunDirectory

RUN = "made-up"
CONFIG = f'[run]\nname = "{RUN}"\n[model]\npath = "absent"\n[data]\npath = "absent"\n'
PARTITIONS = 8
RESULT = Path(__file__).parents[1] / "results" / "audit.json"


def main() -> None:
    """Write, audit, report; fails if the books do not balance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=100_000, help="trajectories")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--looks", type=int, default=50, help="of a follower, until it has seen everything")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, start_cluster(Path(scratch) / "kafka", progress=print) as cluster:
        directory = RunDirectory(Path(scratch) / RUN)
        began = time.monotonic()
        asyncio.run(_write(directory, cluster.bootstrap_servers, arguments.records, arguments.tokens))
        print(f"wrote {arguments.records} trajectories in {time.monotonic() - began:.1f} s")
        rounds = [_audit(directory, cluster.bootstrap_servers) for _ in range(arguments.rounds)]
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # the broker still runs, and is not in it
    result: dict[str, Any] = {
        "records": arguments.records,
        "tokens": arguments.tokens,
        "seconds": sorted(each.seconds for each in rounds),
        "cpu_seconds": sorted(each.cpu_seconds for each in rounds),
        "peak_memory_mib": peak // 1024,
        "total": rounds[0].total,
    }
    result["following"] = following(arguments.records, arguments.looks)
    # What is made up follows from its numbers: nothing is drawn.
    result["conditions"] = conditions(
        started, (), ("aiokafka", "msgpack", "pydantic"), "make bench-audit", Kafka=KAFKA_VERSION
    )
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


async def _write(directory: RunDirectory, servers: str, records: int, tokens: int) -> None:
    await apply_topics(servers, RUN, PARTITIONS)
    bus = KafkaBus(KafkaSettings(bootstrap_servers=servers))
    manifest = await MadeUpRun(bus, RUN, records, PARTITIONS, tokens).write()
    state = directory.checkpoints / f"step_{manifest.step}" / STATE
    state.mkdir(parents=True)
    (state / MANIFEST).write_bytes(encode_manifest(manifest))
    directory.config.write_text(CONFIG)


class Round(NamedTuple):
    """Seconds from the start of the command to its end, those that it computed, and what it found."""

    seconds: float
    cpu_seconds: float
    total: dict[str, int]


def _audit(directory: RunDirectory, servers: str) -> Round:
    began, computed = time.monotonic(), _computed()
    verdict = audited(directory.path, servers)
    seconds = time.monotonic() - began
    print(f"audited in {seconds:.1f} s, of which {verdict['seconds']:.1f} s reading and judging")
    return Round(round(seconds, 2), round(_computed() - computed, 2), verdict["total"])


def _computed() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
