"""``python -m benchmarks.graders``: completions graded a second by 1, 2 and 4 members of the group, and by who is left.

The judge takes 200 ms a call and nothing else, as one behind a network does; a member has some calls out at a time.
Each member is a process of ``streamrl grader`` on an embedded broker, and the topic holds more than all can grade
meanwhile. What is counted is what came onto the trajectories topic in a stretch of time that begins once every member
has its share. Then one of four is killed (SIGKILL), and all that was sampled is looked for among what was graded.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conditions import conditions
from bus.embedded.cluster import start_cluster
from bus.kafka.bus import KafkaBus
from bus.kafka.settings import KafkaSettings
from bus.kafka.topic_admin import apply_topics
from bus.port import Outgoing
from observability.record_index.entries import trajectory_id_of
from schemas.errors import StreamRLError
from schemas.identifiers import PolicyVersion, graders_group
from schemas.topics import TRAJECTORIES, UNGRADED
from schemas.trajectories import FinishReason, Prompt, Trajectory, UngradedTrajectory, VersionSpan

RESULTS = Path(__file__).parent / "results" / "graders.json"
JUDGE_S = 0.2
CONCURRENCY = 4
"""Calls that a member has out at a time: few, so that the processors of one machine are not what is measured."""
PARTITIONS = 16
MEMBERS = (1, 2, 4)
PATIENCE_S = 120.0


async def slow_judge(completions: Sequence[str], **_columns: object) -> list[float]:
    """The reward: something, after a while."""
    await asyncio.sleep(JUDGE_S)
    return [float(len(text) % 7) for text in completions]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graders", description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="of counting, for each number of members")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    result = measured(options.seconds)
    result["conditions"] = conditions(began, 0, ["aiokafka"], "python -m benchmarks.graders")
    options.results.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return result


def measured(seconds: float) -> dict[str, Any]:
    """``graders``: rows ``members``, ``per_s``; ``graders_killed``: what became of everything once one was killed."""
    with tempfile.TemporaryDirectory(prefix="streamrl-graders-") as scratch:
        folder = Path(scratch)
        with start_cluster(folder / "kafka") as cluster:
            rows = [
                {
                    "members": members,
                    "per_s": round(asyncio.run(_rate(folder, cluster.bootstrap_servers, members, seconds)), 1),
                }
                for members in MEMBERS
            ]
            killed = asyncio.run(_killed(folder, cluster.bootstrap_servers, seconds))
    first, last = rows[0]["per_s"], rows[-1]["per_s"]
    return {
        "graders": rows,
        "graders_ratio": round(last / first, 2),
        "graders_judge_s": JUDGE_S,
        "graders_concurrency": CONCURRENCY,
        "graders_killed": killed,
    }


async def _rate(folder: Path, servers: str, members: int, seconds: float) -> float:
    """Graded a second by so many members."""
    run = f"graders-{members}"
    # More than they can grade until the counting ends, the start of the processes included.
    await _sample(servers, run, int(members * CONCURRENCY / JUDGE_S * (seconds + 30)))
    with _graders(folder, servers, run, members) as processes:
        await _until_all_grade(folder, run, processes)
        begin, at = await _graded(servers, run), time.monotonic()
        await asyncio.sleep(seconds)
        end, until = await _graded(servers, run), time.monotonic()
    return (end - begin) / (until - at)


async def _killed(folder: Path, servers: str, seconds: float) -> dict[str, Any]:
    """One of the members is killed in the middle of its work; ``lost`` and ``repeats`` once the others are through."""
    run, members = "graders-killed", MEMBERS[-1]
    sampled = await _sample(servers, run, int(members * CONCURRENCY / JUDGE_S * 2 * seconds))
    with _graders(folder, servers, run, members) as processes:
        await _until_all_grade(folder, run, processes)
        processes[0].kill()
        at = time.monotonic()
        deadline = at + PATIENCE_S
        while await _committed(servers, run) < len(sampled):
            if time.monotonic() > deadline:
                raise StreamRLError(f"expected all of {len(sampled)} samples to be graded within {PATIENCE_S:.0f} s")
            await asyncio.sleep(0.5)
        took_s = time.monotonic() - at
    graded = Counter(await _names(servers, run))
    return {
        "members": members,
        "sampled": len(sampled),
        "lost": len(sampled - graded.keys()),
        # Of the same name: the trainer takes the first and skips the others.
        "repeats": graded.total() - len(graded),
        "seconds": round(took_s, 1),
    }


async def _sample(servers: str, run: str, count: int) -> set[str]:
    """What workers would have written; the names of it."""
    await apply_topics(servers, run, PARTITIONS)
    publisher = await _bus(servers).publisher("worker")
    made = [_ungraded(number) for number in range(count)]
    topic = UNGRADED.full_name(run)
    for number, one in enumerate(made):
        await publisher.submit(Outgoing.of(topic, one, key=one.group_id, partition=number % PARTITIONS))
    await publisher.flush()
    await publisher.close()
    return {one.trajectory_id for one in made}


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
        f'[rewards]\nfunctions = ["benchmarks.graders:slow_judge"]\ngraded = ["benchmarks.graders:slow_judge"]\n'
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
    # Whoever came last has joined: the group has dealt once more and settled.
    await asyncio.sleep(8.0)


async def _graded(servers: str, run: str) -> int:
    """Records on the trajectories topic."""
    topic = TRAJECTORIES.full_name(run)
    subscription = await _bus(servers).subscribe([topic], client_id="bench", start="latest")
    try:
        return sum((await subscription.end_offsets()).values())
    finally:
        await subscription.close()


async def _committed(servers: str, run: str) -> int:
    return sum((await _bus(servers).group_offsets(UNGRADED.full_name(run), group_id=graders_group(run))).values())


async def _names(servers: str, run: str) -> list[str]:
    subscription = await _bus(servers).subscribe([TRAJECTORIES.full_name(run)], client_id="bench")
    names: list[str] = []
    try:
        left = sum((await subscription.end_offsets()).values())
        while left > 0:
            records = await subscription.poll(timeout_s=5.0)
            names += [name for record in records if (name := trajectory_id_of(record)) is not None]
            left -= len(records)
    finally:
        await subscription.close()
    return names


def _bus(servers: str) -> KafkaBus:
    return KafkaBus(KafkaSettings(bootstrap_servers=servers))


if __name__ == "__main__":
    main()
