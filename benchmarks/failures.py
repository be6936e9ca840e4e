"""``python -m benchmarks.failures``: what a run delivers while its workers, or its trainer, are killed again and again.

One `streamrl run` on a broker, with processes that emulate a GPU's pace: 8 workers whose tokens in flight are durable,
and a trainer that is faster than they are. Stretches without a kill, with one worker killed every so many seconds, and
with the trainer killed, take turns. What a stretch generated is what was sampled in it of the completions that were
delivered: what was half done when its worker died counts once, whoever sampled which half.
"""

import argparse
import asyncio
import itertools
import json
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import psutil

from benchmarks.algorithms.streams import Stream, running
from benchmarks.commands import audited
from benchmarks.conditions import conditions, rounded
from benchmarks.pipeline.cases import Case, configuration
from benchmarks.pipeline.recording import Recording, read_recording
from benchmarks.pipeline.workload import Workload
from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.history import BusHistory
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.schemas.profiles import DecodeSettings
from streamrl.settings.tree import Settings

RESULTS = Path(__file__).parent / "results" / "failures.json"
RUN = "failures"
WORK = Workload(
    name=RUN,
    samples=128,
    group=8,
    cap=5000,
    max_staleness=8,
    workers=8,
    slots=16,
    p99_over_median=5.0,
    train_ratio=0.2,
    decode=DecodeSettings(prefill_s_per_token=1e-4, adopt_s=1.0, chunk_tokens=64),
)
TIME_SCALE = 4.0
"""Emulated seconds in one of the clock: a median completion takes three, and two cores have time for all processes."""
PASS_STEPS = 800
"""Steps in one pass over the prompts: more than are taken, so that no prompt comes twice."""
START_S, LOOK_S = 180.0, 0.2
WARM_UP_STEPS = 10
"""Steps in which a run fills its queues."""
SETTLE_S = 20.0
"""Behind a stretch: what was killed last comes back, and what was begun in the stretch ends."""


@dataclass(frozen=True)
class Stretch:
    """Seconds since the epoch, and who was killed between them, when, and how often that was to be."""

    victims: str
    began: float
    ended: float
    kills: tuple[tuple[float, str], ...] = ()
    every_s: float = 0.0


def kill(stream: Stream, words: Sequence[str]) -> bool:
    """SIGKILL to the process of the run that has all these words in its command; whether it was there."""
    for child in psutil.Process(stream.process.pid).children():
        if set(words) <= set(child.cmdline()):
            child.send_signal(signal.SIGKILL)
            return True
    return False


def stretch(stream: Stream, victims: Sequence[tuple[str, ...]], seconds: float, every_s: float) -> Stretch:
    """So many seconds in which a victim is killed every so often, one after the other; nobody if there are none.

    ``victims``: role, and name where there are several, of processes of one role.
    """
    began, kills = time.time(), []
    turns = itertools.cycle(victims)
    ended, due = began + seconds, began
    while (now := time.time()) < ended:
        stream.check()
        if victims and now >= due:
            words = next(turns)
            if kill(stream, words):
                kills.append((now, words[-1]))
            due += every_s
        time.sleep(LOOK_S)
    return Stretch(victims[0][0] if victims else "nobody", began, ended, tuple(kills), every_s)


def settings_of(folder: Path, address: str, seed: int) -> Settings:
    """The run; its prompts are written beside it."""
    prompts = folder / "prompts.jsonl"
    WORK.write_prompts(prompts, PASS_STEPS * WORK.groups_per_step, seed)
    case = Case(WORK, "trajectory_async", "least_loaded", warm_up=0, steps=PASS_STEPS)
    plain = configuration(case, run=RUN, directory=folder, prompts=prompts, address=address, seed=seed)
    return plain.model_copy(
        update={
            "generation": plain.generation.model_copy(update={"partial_trajectories": "durable"}),
            "emulation": plain.emulation.model_copy(update={"time_scale": TIME_SCALE}),
            # A trainer that comes back goes on from the last one.
            "training": plain.training.model_copy(update={"checkpoint_every": 1}),
        }
    )


def play(folder: Path, settings: Settings, options: argparse.Namespace) -> list[Stretch]:
    """Start the run, and kill."""
    workers = [("worker", f"worker-{number}") for number in range(WORK.workers)]
    random.Random(options.seed).shuffle(workers)
    nobody: list[tuple[str, ...]] = []
    undisturbed = nobody, options.undisturbed_s, 0.0
    of_trainer = [("trainer",)], options.trainer_kills * options.trainer_every_s, options.trainer_every_s
    turns = undisturbed, (workers, options.seconds, options.every_s), undisturbed, of_trainer
    stretches = []
    with running(folder, RUN, settings) as stream:
        stream.until(lambda: stream.step() >= WARM_UP_STEPS, f"step {WARM_UP_STEPS}", START_S)
        # Each stretch with kills is between two without.
        for victims, seconds, every_s in (*turns * options.rounds, undisturbed):
            found = stretch(stream, victims, seconds, every_s)
            stretches.append(found)
            print(f"{found.victims}: {len(found.kills)} killed, step {stream.step()}", flush=True)
            time.sleep(SETTLE_S)
    return stretches


def delivered(recording: Recording, began: float, ended: float) -> float:
    """Tokens that were sampled between two moments: of a completion so much as of its time was between them."""
    starts, ends = recording.started_at, recording.finished_at
    inside = np.clip(np.minimum(ends, ended) - np.maximum(starts, began), 0.0, None)
    return float((recording.lengths * inside / np.maximum(ends - starts, 1e-9)).sum())


def steps_between(recording: Recording, began: float, ended: float) -> float:
    """Optimizer steps between two moments: of one that was under way, so much as of its time was between them."""
    at, steps = ([getattr(report, key) for report in recording.reports] for key in ("sent_at", "step"))
    return float(np.diff(np.interp([began, ended], at, steps))[0])


def rows_of(stretches: Sequence[Stretch], recording: Recording) -> list[dict[str, Any]]:
    """A row for each kind of stretch, of all stretches of the kind; ratios to those in which nobody was killed."""
    rows: list[dict[str, Any]] = []
    for victims in dict.fromkeys(one.victims for one in stretches):
        own = [one for one in stretches if one.victims == victims]
        seconds = [one.ended - one.began for one in own]
        tokens = [delivered(recording, one.began, one.ended) / (one.ended - one.began) for one in own]
        steps = [60 * steps_between(recording, one.began, one.ended) / (one.ended - one.began) for one in own]
        rows.append(
            {
                "killed": victims,
                "kills": sum(len(one.kills) for one in own),
                "every_s": own[0].every_s,
                "stretches": len(own),
                "seconds": round(sum(seconds), 1),
                "generated_tokens_per_s": fmean(tokens),
                "generated_of_each_stretch": [round(rate) for rate in tokens],
                "steps_per_minute": fmean(steps),
                "steps_of_each_stretch": [round(rate, 2) for rate in steps],
            }
        )
    rest = next(row for row in rows if row["killed"] == "nobody")
    for row in rows:
        row["generated_ratio"] = row["generated_tokens_per_s"] / rest["generated_tokens_per_s"]
        row["trained_ratio"] = row["steps_per_minute"] / rest["steps_per_minute"]
    return rows


def noise_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How far the stretches in which nobody was killed are apart, as a share of their mean: what ratios may be off."""
    rest = next(row for row in rows if row["killed"] == "nobody")
    of_each = {"generated": rest["generated_of_each_stretch"], "trained": rest["steps_of_each_stretch"]}
    return {name: (max(rates) - min(rates)) / fmean(rates) for name, rates in of_each.items()}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failures", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="nobody, workers, nobody, trainer")
    parser.add_argument("--seconds", type=float, default=180.0, help="in which workers are killed")
    parser.add_argument("--undisturbed-s", type=float, default=90.0, help="of each stretch in which nobody is killed")
    parser.add_argument("--every-s", type=float, default=10.0, help="between two kills of workers")
    parser.add_argument("--trainer-kills", type=int, default=6)
    # After a minute of health the next death counts as the first, so each restart is as soon as a single one would be.
    parser.add_argument("--trainer-every-s", type=float, default=65.0, help="between two kills of the trainer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options, began = parser.parse_args(arguments), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-failures-") as name:
        folder = Path(name)
        with start_cluster(folder / "kafka") as cluster:
            settings = settings_of(folder, cluster.bootstrap_servers, options.seed)
            stretches = play(folder, settings, options)
            history = BusHistory(
                KafkaBus(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)), client_id="bench"
            )
            recording = asyncio.run(read_recording(history, RUN))
            books = audited(folder / RUN, cluster.bootstrap_servers)
    rows = rows_of(stretches, recording)
    result = {
        "rows": rounded(rows),
        "noise": rounded(noise_of(rows)),
        "audit": books,
        "workload": f"{WORK.workers} workers of {WORK.slots} slots, {WORK.samples} completions a step in groups of "
        f"{WORK.group}, lengths of median {WORK.median:.0f} and p99 {WORK.p99_over_median:.0f} times that, at most "
        f"{WORK.max_staleness} steps stale; emulated decode {TIME_SCALE:.0f} times as fast as told",
        "conditions": conditions(began, options.seed, ("aiokafka", "numpy"), _command(options)),
    }
    for row in result["rows"]:
        print(row, flush=True)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {options.results}")
    return result


def _command(options: argparse.Namespace) -> str:
    """What repeats it."""
    said = {"undisturbed-s": options.undisturbed_s, "trainer-kills": options.trainer_kills}
    return f"make bench-failures ARGS='{' '.join(f'--{name} {value:g}' for name, value in said.items())}'"


if __name__ == "__main__":
    main()
