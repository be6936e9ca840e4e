"""Completions graded a second by 1, 2 and 4 members of the graders' group, and what becomes of those that wait.

The judge takes 200 ms a call and nothing else, as one behind a network does; a member has some calls out at a time.
Each member is a process of ``streamrl grader`` on an embedded broker, and the topic holds more than all can grade
meanwhile. What is counted is what came onto the trajectories topic in a stretch of time that begins once every member
has its share. Through that stretch workers deliver as much as one and a half members can grade, so that what waits in
each length bucket grows with one member, and falls the faster the more there are.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.algorithms.slow_judge import JUDGE_S
from benchmarks.completed import completed
from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.cluster import offsets_of_group
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.bus.port import Outgoing, Publisher, Subscription, TopicPartition
from streamrl.schemas.errors import StreamRLError
from streamrl.schemas.identifiers import graders_group
from streamrl.schemas.topics import TRAJECTORIES, UNGRADED
from streamrl.schemas.trajectories import Prompt, Trajectory, UngradedTrajectory

JUDGE = "benchmarks.algorithms.slow_judge:slow_judge"
CONCURRENCY = 4
"""Calls that a member has out at a time: few, so that the processors of one machine are not what is measured."""
SHARDS, BUCKETS = 4, 4
PARTITIONS = SHARDS * BUCKETS
MEMBERS = (1, 2, 4)
ARRIVING_PER_S = 1.5 * CONCURRENCY / JUDGE_S
DELIVER_EVERY_S = 0.1
PATIENCE_S = 120.0
SETTLE_S = 8.0
"""After the last member has joined: the group deals once more."""
DOES_NOT_SHOW = "a judge that slows down when more ask it; members on other machines; what a judge's own work costs"


def measured(seconds: float) -> dict[str, Any]:
    """``graders``: a row for each number of members (``row_of``); ``graders_ratio``: of the most members over one."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="streamrl-graders-") as scratch:
        folder = Path(scratch)
        with start_cluster(folder / "kafka") as cluster:
            for members in MEMBERS:
                begin, end = asyncio.run(_looks(folder, cluster.bootstrap_servers, members, seconds))
                rows.append(row := row_of(members, begin, end))
                print(f"{members} graders: {row['per_s']} a second, {row['lag_per_s']:+} wait", flush=True)
    return {
        "graders": rows,
        "graders_ratio": round(rows[-1]["per_s"] / rows[0]["per_s"], 3),
        "conditions": {
            "judge_s": JUDGE_S,
            "concurrency": CONCURRENCY,
            "partitions": PARTITIONS,
            "arriving_per_s": ARRIVING_PER_S,
            "counted_s": seconds,
            "does_not_show": DOES_NOT_SHOW,
        },
    }


class Look(NamedTuple):
    """At a moment of the monotonic clock: records of the trajectories topic, and those that wait, by bucket."""

    at: float
    graded: int
    waiting: tuple[int, ...]


def waiting_by_bucket(ends: Mapping[int, int], next_offsets: Mapping[int, int]) -> tuple[int, ...]:
    """Records that no member has finished. ``ends``: of the ungraded topic, by partition; ``next_offsets``: of the
    group, which says nothing of a partition of which it has finished nothing.
    """
    waiting = [0] * BUCKETS
    for partition, end in ends.items():
        waiting[partition // SHARDS] += max(0, end - next_offsets.get(partition, 0))
    return tuple(waiting)


def row_of(members: int, begin: Look, end: Look) -> dict[str, Any]:
    """What two looks say: ``per_s`` graded, ``lag_begin`` and ``lag_end`` by bucket, and ``lag_per_s``, by how much all
    of it grew a second.
    """
    seconds = end.at - begin.at
    return {
        "members": members,
        "per_s": round((end.graded - begin.graded) / seconds, 2),
        "lag_begin": list(begin.waiting),
        "lag_end": list(end.waiting),
        "lag_per_s": round((sum(end.waiting) - sum(begin.waiting)) / seconds, 2),
    }


async def _looks(folder: Path, servers: str, members: int, seconds: float) -> tuple[Look, Look]:
    """With so many members at work: at the begin and at the end of so many seconds."""
    run = f"graders-{members}"
    await apply_topics(servers, run, PARTITIONS)
    publisher = await _bus(servers).publisher("worker")
    # More than they can grade until the counting ends, the start of the processes included.
    backlog = int(members * CONCURRENCY / JUDGE_S * (seconds + 30))
    await _sample(publisher, run, range(backlog))
    with _graders(folder, servers, run, members) as processes:
        await _until_all_grade(folder, run, processes)
        # One connection, made before: a broker that is busy may take its time over a new one.
        topics = [topic.full_name(run) for topic in (TRAJECTORIES, UNGRADED)]
        subscription = await _bus(servers).subscribe(topics, client_id="bench", start="latest")
        subscription.pause(subscription.partitions())
        arriving = asyncio.create_task(_arrive(publisher, run, backlog))
        try:
            begin = await _look(subscription, servers, run)
            await asyncio.sleep(seconds)
            return begin, await _look(subscription, servers, run)
        finally:
            arriving.cancel()
            await asyncio.wait({arriving})
            await subscription.close()
            await publisher.close()


async def _look(subscription: Subscription, servers: str, run: str) -> Look:
    topic = UNGRADED.full_name(run)
    finished = await offsets_of_group(KafkaSettings(bootstrap_servers=servers), topic, graders_group(run))
    ends, at = await subscription.end_offsets(), time.monotonic()
    graded = sum(end for tp, end in ends.items() if tp.topic != topic)
    return Look(at, graded, waiting_by_bucket(_of(ends, topic), _of(finished, topic)))


def _of(offsets: Mapping[TopicPartition, int], topic: str) -> dict[int, int]:
    return {tp.partition: offset for tp, offset in offsets.items() if tp.topic == topic}


async def _sample(publisher: Publisher, run: str, numbers: range) -> None:
    """What workers would have written."""
    topic = UNGRADED.full_name(run)
    for number in numbers:
        one = _ungraded(number)
        await publisher.submit(Outgoing.of(topic, one, key=one.group_id, partition=number % PARTITIONS))
    await publisher.flush()


async def _arrive(publisher: Publisher, run: str, begin: int) -> None:
    """Deliver at an even rate until cancelled."""
    began, there = time.monotonic(), 0
    while True:
        await asyncio.sleep(DELIVER_EVERY_S)
        due = int(ARRIVING_PER_S * (time.monotonic() - began))
        await _sample(publisher, run, range(begin + there, begin + due))
        there = due


def _ungraded(number: int, tokens: int = 64) -> UngradedTrajectory:
    prompt, ids = np.arange(16, dtype="<i4"), np.arange(tokens, dtype="<i4")
    told = {"prompt_text": "a question", "completion_text": "an answer " * (tokens // 4), "worker_id": "worker-0"}
    logprobs = np.full(tokens, -1.0, dtype="<f4")
    made = Trajectory(**completed(f"bench/{number}/0", 0, prompt, ids, logprobs, **told))
    return UngradedTrajectory.of(
        made, Prompt(prompt_id=f"bench/{number}", dataset="bench", content="a question", columns={"answer": "4"})
    )


@contextmanager
def _graders(folder: Path, servers: str, run: str, members: int) -> "Iterator[list[subprocess.Popen[bytes]]]":
    """Their processes, as long as the block lasts."""
    config = folder / f"{run}.toml"
    config.write_text(
        f'[run]\nname = "{run}"\ndirectory = "{folder}"\n[model]\npath = "none"\n[data]\npath = "none.jsonl"\n'
        f'[kafka]\nbootstrap_servers = "{servers}"\n'
        f'[rewards]\nfunctions = ["{JUDGE}"]\ngraded = ["{JUDGE}"]\n'
        f"concurrency = {CONCURRENCY}\n"
    )
    command = [sys.executable, "-m", "streamrl.cli.app", "grader", str(config), "--id"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(members):
            with (folder / f"{run}-{number}.log").open("wb") as output:
                processes.append(
                    subprocess.Popen([*command, f"grader-{number}"], stdout=output, stderr=output, env=environment)
                )
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


async def _until_all_grade(folder: Path, run: str, processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    """Until each has a share, as its log says."""
    deadline = time.monotonic() + PATIENCE_S
    logs = [folder / f"{run}-{number}.log" for number in range(len(processes))]
    while not all("grader's share" in log.read_text() for log in logs):
        if any(process.poll() is not None for process in processes):
            raise StreamRLError(f"expected the graders of {run} to go on, one ended")
        if time.monotonic() > deadline:
            raise StreamRLError(f"expected the graders of {run} to have begun within {PATIENCE_S:.0f} s")
        await asyncio.sleep(0.5)
    await asyncio.sleep(SETTLE_S)


def _bus(servers: str) -> KafkaBus:
    return KafkaBus(KafkaSettings(bootstrap_servers=servers))
