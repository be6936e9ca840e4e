"""``python -m benchmarks.protocol``: a demo's trajectories, trained again with the protocol on and off in turns."""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import audited
from benchmarks.conditions import conditions
from benchmarks.observation.trial import UNJUDGED
from benchmarks.paired import Pair, paired_cost
from benchmarks.protocol.beside import audits_beside_a_demo
from benchmarks.protocol.switched import BLOCK_STEPS
from benchmarks.protocol.trial import WARM_UP_BLOCKS, ProcessorTime, Recording, switch_pairs, train
from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.embedded.jars import KAFKA_VERSION
from streamrl.inspection.source import broker_of, open_run

RESULTS = Path(__file__).parents[1] / "results" / "protocol.json"
DEMO = "protocol-bench-demo"
AUDITS = 5
CHECKPOINT_EVERY = 40
"""As in the demo."""
FEWEST_STEPS = BLOCK_STEPS * (WARM_UP_BLOCKS + 4)
"""Two pairs of blocks after those that warm up."""


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.protocol", description=__doc__)
    parser.add_argument("--steps", type=int, default=280, help="optimizer steps of each trainer")
    parser.add_argument("--rounds", type=int, default=5, help="of two trainers, one after the other")
    parser.add_argument("--pairs", type=int, default=10, help="2 or more, of steps beside audits and beside none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.steps < FEWEST_STEPS:
        parser.error(f"expected --steps of {FEWEST_STEPS} or more, as the first are not counted, got {options.steps}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="streamrl-protocol-") as name:
        result = _measure(options, Path(name))
    result["conditions"] = conditions(
        began, options.seed, ("torch", "transformers", "aiokafka"), "make bench-protocol", Kafka=KAFKA_VERSION
    )
    options.results.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written: {options.results}")
    return result


def _measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    recording = _record(options, folder)
    print(f"{len(recording.records)} trajectories of a demo", flush=True)
    audit = _audited(folder, options)
    taken: list[tuple[Measured, Measured]] = []
    with start_cluster(folder / "kafka") as cluster:
        for turn in range(options.rounds):
            runs = [
                train(recording, phase, cluster.bootstrap_servers, folder, f"r{turn}-{phase}", options.steps)
                for phase in ((0, 1), (1, 0))[turn % 2]
            ]
            on_first, off_first = runs if turn % 2 == 0 else runs[::-1]
            taken.append((Measured.of(on_first[0], off_first[0]), Measured.of(on_first[1], off_first[1])))
            print(f"round {turn + 1}/{options.rounds}: by the clock {taken[-1][0]}", flush=True)
    clock, processor = (Measured.together(kind) for kind in zip(*taken, strict=True))
    return _summary(options, clock, processor, audit)


@dataclass(frozen=True)
class Measured:
    """Of one kind of time, in seconds: steps with and without the protocol, and each checkpoint, the plain ones apart.

    The switch turns so often that all checkpoints of a run are of one kind.
    """

    steps: list[Pair]
    checkpoints: list[float]
    plain: list[float]

    @classmethod
    def of(cls, on_first: ProcessorTime, off_first: ProcessorTime) -> "Measured":
        """From two runs."""
        return cls(switch_pairs(on_first, off_first), on_first.checkpoints, off_first.checkpoints)

    @classmethod
    def together(cls, several: Sequence["Measured"]) -> "Measured":
        """All of them in one."""
        return cls(
            [pair for one in several for pair in one.steps],
            [checkpoint for one in several for checkpoint in one.checkpoints],
            [checkpoint for one in several for checkpoint in one.plain],
        )

    @property
    def step_s(self) -> float:
        """A step without the protocol."""
        return statistics.median(pair.without for pair in self.steps)

    @property
    def checkpoint_share(self) -> float:
        """What a checkpoint every ``CHECKPOINT_EVERY`` steps adds to a step beyond what a plain one does."""
        beyond = statistics.median(self.checkpoints) - statistics.median(self.plain)
        return beyond / CHECKPOINT_EVERY / self.step_s

    def __str__(self) -> str:
        cost = statistics.median(pair.cost for pair in self.steps)
        return f"{self.step_s:.4f} s/step, protocol {cost:+.1%}, checkpoints {self.checkpoint_share:+.1%}"

    def seconds(self, seed: int) -> float:
        """What all of it adds to a step."""
        return (paired_cost(self.steps, seed).typical + self.checkpoint_share) * self.step_s

    def row(self, seed: int) -> dict[str, Any]:
        """For the file of results."""
        return {
            "step_s": round(self.step_s, 5),
            "protocol": paired_cost(self.steps, seed).row(),
            "checkpoint_s": round(statistics.median(self.checkpoints), 5),
            "plain_checkpoint_s": round(statistics.median(self.plain), 5),
            "checkpoints": round(self.checkpoint_share, 4),
        }


def _audited(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What an audit of the whole demo takes, and what one beside a demo under way takes of its trainer's time."""
    with broker_of(open_run(folder / DEMO), folder / "audited", lambda line: None) as address:
        alone = [float(audited(folder / DEMO, address)["seconds"]) for _ in range(AUDITS)]
    beside = audits_beside_a_demo(folder, options.seed, options.pairs)
    metrics = (folder / DEMO / "metrics.jsonl").read_text().splitlines()
    trained_s = json.loads(metrics[-1])["time"] - json.loads(metrics[0])["time"]
    slower = paired_cost(beside.steps, options.seed)
    share = slower.typical * beside.audit_s / trained_s
    print(f"audit of the demo, alone: {statistics.median(alone):.2f} s")
    print(f"demo's steps beside audits: {slower}; one takes {beside.audit_s:.1f} s there", flush=True)
    print(f"one audit: {share:.2%} of the trainer's {trained_s:.0f} s", flush=True)
    return {
        "share": round(share, 5),
        "steps_beside_audits": slower.row(),
        "beside_s": round(beside.audit_s, 2),
        "audits_beside": beside.audits,
        "alone_s": sorted(alone),
        "trained_s": round(trained_s, 1),
        "demo_step_s": round(trained_s / (len(metrics) - 1), 5),
    }


def _record(options: argparse.Namespace, folder: Path) -> Recording:
    """Run a demo for its trajectories."""
    streamrl = [sys.executable, "-m", "streamrl.cli.app"]
    where = (f"--run.name={DEMO}", f"--run.directory={folder}", f"--training.max_steps={options.steps + 10}")
    subprocess.run([*streamrl, "demo", "--seed", str(options.seed), *where, UNJUDGED], check=True)
    run = open_run(folder / DEMO)
    subprocess.run([*streamrl, "export", f"--run={folder / DEMO}", f"--out={folder / 'export'}"], check=True)
    partitions = run.settings.loop.trajectory_partitions
    return asyncio.run(Recording.of(run.name, run.directory.config, folder / "export", partitions))


def _summary(
    options: argparse.Namespace, clock: Measured, processor: Measured, audit: dict[str, Any]
) -> dict[str, Any]:
    for name, measured in (("by the clock", clock), ("processor time", processor)):
        cost = paired_cost(measured.steps, options.seed)
        print(f"{name}: transactions and digests {cost}, checkpoints {measured.checkpoint_share:+.1%}")
    of_demo = clock.seconds(options.seed) / audit["demo_step_s"]
    print(
        f"together {clock.seconds(options.seed):.4f} s a step, {of_demo:.1%} of the demo's {audit['demo_step_s']:.3f} s"
    )
    print(f"with an audit beside it {of_demo + audit['share']:.1%}")
    return {
        "share_of_demo_step": round(of_demo, 4),
        "share_with_audit": round(of_demo + audit["share"], 4),
        "audit": audit,
        "on": "announcements in transactions, digests of every tensor, verified checkpoints, as in every run",
        "off": "plain announcements without offsets, no digests, checkpoints of model and optimizer alone",
        "checkpoint_every": CHECKPOINT_EVERY,
        "clock": clock.row(options.seed),
        "processor_time": processor.row(options.seed),
        "block_steps": BLOCK_STEPS,
        "steps": options.steps,
        "rounds": options.rounds,
        "does_not_show": "brokers with cores of their own; runs in which generation shares the trainer's cores; models "
        "other than the demo's 0.94 M parameters",
    }


if __name__ == "__main__":
    main()
