"""Completions graded a second by 1, 2 and 4 members of the graders' group.

The judge takes 200 ms a call and nothing else, as one behind a network does; a member has some calls out at a time.
Each member is a process of ``streamrl grader`` on an embedded broker, and the topic holds more than all can grade
meanwhile. What is counted is what came onto the trajectories topic in a stretch of time that begins once every member
has its share.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.algorithms.slow_judge import JUDGE_S
from bus.embedded.cluster import start_cluster
from bus.kafka.bus import KafkaBus
from bus.kafka.settings import KafkaSettings
from bus.kafka.topic_admin import apply_topics
from bus.port import Outgoing
from schemas.errors import StreamRLError
from schemas.identifiers import PolicyVersion
from schemas.topics import TRAJECTORIES, UNGRADED
from schemas.trajectories import FinishReason, Prompt, Trajectory, UngradedTrajectory, VersionSpan

JUDGE = "benchmarks.algorithms.slow_judge:slow_judge"
CONCURRENCY = 4
"""Calls that a member has out at a time: few, so that the processors of one machine are not what is measured."""
PARTITIONS = 16
MEMBERS = (1, 2, 4)
PATIENCE_S = 120.0
SETTLE_S = 8.0
"""After the last member has joined: the group deals once more."""
DOES_NOT_SHOW = "a judge that slows down when more ask it; members on other machines; what a judge's own work costs"


def measured(seconds: float) -> dict[str, Any]:
    """``graders``: rows ``members``, ``per_s``; ``graders_ratio``: of the most members over one."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="streamrl-graders-") as scratch:
        folder = Path(scratch)
        with start_cluster(folder / "kafka") as cluster:
            for members in MEMBERS:
                rate = asyncio.run(_rate(folder, cluster.bootstrap_servers, members, seconds))
                rows.append({"members": members, "per_s": round(rate, 2)})
                print(f"{members} graders: {rate:.1f} completions a second", flush=True)
    return {
        "graders": rows,
        "graders_ratio": round(rows[-1]["per_s"] / rows[0]["per_s"], 3),
        "conditions": {
            "judge_s": JUDGE_S,
            "concurrency": CONCURRENCY,
            "partitions": PARTITIONS,
            "counted_s": seconds,
            "does_not_show": DOES_NOT_SHOW,
        },
    }


async def _rate(folder: Path, servers: str, members: int, seconds: float) -> float:
    """Graded a second by so many members."""
    run = f"graders-{members}"
    # More than they can grade until the counting ends, the start of the processes included.
    await _sample(servers, run, int(members * CONCURRENCY / JUDGE_S * (seconds + 30)))
    with _graders(folder, servers, run, members) as processes:
        await _until_all_grade(folder, run, processes)
        # One connection, made before: a broker that is busy may take its time over a new one.
        subscription = await _bus(servers).subscribe([TRAJECTORIES.full_name(run)], client_id="bench", start="latest")
        subscription.pause(subscription.partitions())
        try:
            begin, at = sum((await subscription.end_offsets()).values()), time.monotonic()
            await asyncio.sleep(seconds)
            end, until = sum((await subscription.end_offsets()).values()), time.monotonic()
        finally:
            await subscription.close()
    return (end - begin) / (until - at)


async def _sample(servers: str, run: str, count: int) -> None:
    """What workers would have written."""
    await apply_topics(servers, run, PARTITIONS)
    publisher = await _bus(servers).publisher("worker")
    topic = UNGRADED.full_name(run)
    for number in range(count):
        one = _ungraded(number)
        await publisher.submit(Outgoing.of(topic, one, key=one.group_id, partition=number % PARTITIONS))
    await publisher.flush()
    await publisher.close()


def _ungraded(number: int, tokens: int = 64) -> UngradedTrajectory:
    group, version = f"bench/{number}/0", PolicyVersion(1, 0)
    trajectory = Trajectory(
        trajectory_id=f"{group}/0",
        group_id=group,
        prompt_id=f"bench/{number}",
        dataset="bench",
        sample_index=0,
        num_generations=1,
        prompt_token_ids=np.arange(16, dtype="<i4"),
        token_ids=np.arange(tokens, dtype="<i4"),
        logprobs=np.full(tokens, -1.0, dtype="<f4"),
        loss_mask=np.ones(tokens, dtype="<u1"),
        version_spans=(VersionSpan(version=version, start=0, end=tokens),),
        finish_reason=FinishReason.STOP,
        prompt_text="a question",
        completion_text="an answer " * (tokens // 4),
        rewards={},
        temperature=1.0,
        bucket=0,
        predicted_length=tokens,
        worker_id="worker-0",
        attempt=0,
        admitted_version=version,
        created_at=0.0,
        started_at=0.0,
        finished_at=0.0,
    )
    return UngradedTrajectory.of(
        trajectory, Prompt(prompt_id=f"bench/{number}", dataset="bench", content="a question", columns={"answer": "4"})
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
