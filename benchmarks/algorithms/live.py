"""GRPO, PPO, RLOO and online DPO learn the demo's task on one live stream, each an arm with a quarter of the groups.

Twice, from the same model and seed. Once they are left alone. The other time the trainer of one is killed with SIGKILL,
a fifth algorithm is attached from the beginning of the topic, a trainer is stalled for a minute, and another policy is
promoted and gives way again. Everything is real: models, broker, processes. Every trainer trains all of the stream, and
its arm's trajectories say what its policy is worth: the mean reward of them, in the order in which they were begun.

What is served and what is attached have a processor each, as they would have devices of their own: the run with its
workers, the served trainer and the broker the first, attached trainers the second, and a promotion changes them over.
"""

import itertools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.algorithms.streams import (
    CLI,
    NEVER,
    PATIENCE_S,
    UNFILTERED,
    Counts,
    Stream,
    read_counts,
    running,
    tokens_per_s,
)
from streamrl.api import Run
from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.embedded.runtime import cache_root
from streamrl.demo.evaluation import NUM_HELD_OUT, share_correct, solve
from streamrl.demo.recipe import defaults
from streamrl.demo.task import held_out_questions
from streamrl.demo.warm_start import PROMPTS, ensure_warm_started_model
from streamrl.schemas.errors import StreamRLError
from streamrl.schemas.identifiers import INSTANCES
from streamrl.settings.loading import validated

SERVED = "grpo"
"""The algorithm of the run's own trainer."""
ALIKE = (
    'algorithm.loss_type="dapo"',
    'algorithm.scale_rewards="none"',
    "algorithm.epsilon_high=0.28",
    UNFILTERED,
)
"""What the demo sets for GRPO."""
ATTACHED: dict[str, tuple[str, ...]] = {
    # The model is so small, and the completions so short, that the preset's critic would learn nothing meanwhile.
    "ppo": (UNFILTERED, "algorithm.critic.learning_rate=1e-3", "algorithm.critic.lam=1.0"),
    "rloo": ALIKE,
    # Pairs of a dozen groups a step are a noisy gradient: with the demo's 1e-4 the reward falls again.
    "dpo": (UNFILTERED, "training.learning_rate=3e-5", "algorithm.preference.beta=0.3"),
}
"""By algorithm, which is the instance's name as well: settings that are not the preset's."""
TO_THE_END = f"training.max_steps={NEVER}"
"""Each attached trainer trains all of the stream, until the run is over and it has read the rest."""
LATE = "reinforce_plus_plus"
WORKERS, SLOTS = 4, 32
"""One worker of each arm."""
KILLED, STALLED, PROMOTED = "dpo", "rloo", "ppo"
STALL_S = 60.0
KILL_AT, ATTACH_AT, STALL_AT, PROMOTE_AT, RETURN_AT = 0.15, 0.3, 0.4, 0.7, 0.85
"""Shares of the served trainer's steps at which things are done."""
SHOWN = ("reward_first", "reward_last", "held_out_after", "steps", "trained", "skipped")
SECONDS_A_STEP = 15.0
"""Patience: ten times what a step takes."""
POINTS = 12
"""Of a curve: each the mean of a twelfth of the arm's trajectories."""
OWN = "policy"
"""What the run's own trainer is called where instances are named."""
DOES_NOT_SHOW = (
    "several machines; devices of their own for each trainer: attached ones share one processor, fall behind the "
    "stream and read the rest when the run is over, so their arms' weights are older than if they kept up; "
    "which algorithm is best: three have settings with which they learn this task at all, none was tuned further"
)


@dataclass
class Event:
    """Something that was done to the run, ``at`` seconds since the epoch.

    ``served``: who is served since then; empty: who was before.
    """

    what: str
    at: float
    step: int
    served: str = ""


@dataclass
class Course:
    """What was seen of one run: when the served trainer's steps came, and what was done."""

    steps: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def at(self, step: int) -> float:
        """When the step was there."""
        return self.steps[step - 1]


def measured(steps: int, seed: int) -> dict[str, Any]:
    """``live``: both runs; ``live_throughput_ratio``: tokens a second of the disturbed one over those of the other."""
    model = ensure_warm_started_model(cache_root(), seed, partial(print, flush=True))
    before = held_out_accuracy(model, seed)
    with tempfile.TemporaryDirectory(prefix="streamrl-live-") as scratch:
        folder = Path(scratch)
        with start_cluster(folder / "kafka") as cluster:
            _pin(psutil.Process(*cluster.pids), 0)
            rows, found = [], []
            for name in ("alone", "disturbed"):
                row, course, counts = _run(folder, cluster.bootstrap_servers, model, name, steps, seed)
                for one in row["instances"]:
                    one["held_out_before"] = before
                    print(f"{name}: {line(one)}", flush=True)
                rows.append(row)
                found.append((course, counts))
    rows[1]["events"] = told_events(*found[0], *found[1], steps)
    return compared(*rows) | {
        "conditions": {"workload": _workload(steps), "does_not_show": DOES_NOT_SHOW},
    }


def compared(alone: dict[str, Any], disturbed: dict[str, Any]) -> dict[str, Any]:
    """``live``: both runs; ``live_rows``: what each policy made of them, side by side.

    Over all: ``live_throughput_ratio``, tokens a second, and ``live_largest_difference`` of a policy's last rewards.
    """
    others = {one["name"]: one for one in disturbed["instances"]}
    rows = [
        {
            "algorithm": one["algorithm"],
            "held_out_before": one["held_out_before"],
            "alone": {key: one[key] for key in SHOWN},
            "disturbed": {key: others[one["name"]][key] for key in SHOWN},
        }
        for one in alone["instances"]
    ]
    worst = max(abs(row["alone"]["reward_last"] - row["disturbed"]["reward_last"]) for row in rows)
    return {
        "live": [alone, disturbed],
        "live_rows": rows,
        "live_throughput_ratio": round(disturbed["tokens_per_s"] / alone["tokens_per_s"], 3),
        "live_largest_difference": round(worst, 4),
    }


def line(one: dict[str, Any]) -> str:
    """An instance as people read it."""
    sampled = f"reward {one['reward_first']:.2f} -> {one['reward_last']:.2f}, " if "curve" in one else ""
    held_out = f"held out {one['held_out_before']:.2f} -> {one['held_out_after']:.2f}"
    return (
        f"{one['name']}: {sampled}{held_out}, {one['steps']} steps, {one['trained']} trained, {one['skipped']} skipped"
    )


def held_out_accuracy(model: Path, seed: int) -> float:
    """Share of the demo's held-out questions that a model answers rightly, greedily."""
    greedily = [(question, None) for question in held_out_questions(seed, NUM_HELD_OUT)]
    return round(share_correct(solve(model, greedily)), 4)


def curve_of(rewards: Sequence[float], points: int = POINTS) -> list[float]:
    """Means of equal parts, in order; fewer where there are not as many rewards.

    Raises:
        StreamRLError: there are none.
    """
    if not rewards:
        raise StreamRLError("expected trajectories of every arm, got none of one")
    parts = np.array_split(np.asarray(rewards), min(points, len(rewards)))
    return [round(float(part.mean()), 4) for part in parts]


def _workload(steps: int) -> str:
    return (
        f"the demo's task and model, {steps} steps of 16 groups of 8; {SERVED} served, {', '.join(ATTACHED)} attached, "
        f"a quarter of the groups each; {WORKERS} workers of {SLOTS} slots; run and broker on one processor, attached "
        f"trainers on another; disturbed: {KILLED} killed at {KILL_AT:.0%} of the steps, {LATE} attached from the "
        f"beginning at {ATTACH_AT:.0%}, {STALLED} stalled for {STALL_S:.0f} s at {STALL_AT:.0%}, {PROMOTED} served "
        f"from {PROMOTE_AT:.0%} to {RETURN_AT:.0%}"
    )


def _tree(name: str, folder: Path, address: str, model: Path, steps: int, seed: int) -> dict[str, Any]:
    tree = defaults("transformers", seed)
    tree["run"] |= {"name": name, "directory": str(folder), "workers": WORKERS}
    tree["kafka"] = {"bootstrap_servers": address}
    tree["model"], tree["data"] = {"path": str(model)}, {"path": str(model / PROMPTS)}
    tree["generation"]["max_num_seqs"] = SLOTS
    tree["training"]["max_steps"] = steps
    del tree["evaluation"]  # every instance's policy is judged at the end, in the same way
    return tree


def _run(
    folder: Path, address: str, model: Path, name: str, steps: int, seed: int
) -> tuple[dict[str, Any], Course, Counts]:
    """One run to the end of all its instances, its course, and what its workers counted."""
    course = Course()
    with running(folder, name, validated(_tree(name, folder, address, model, steps, seed))) as served:
        _follow(served, course, 1)
        # All begin with the same weights: nothing more is sampled before the others are there.
        _tell(served, "pause")
        for algorithm, changes in ATTACHED.items():
            served.attach(algorithm, algorithm, "beginning", (*changes, TO_THE_END))
        served.until(lambda: all(served.step(one) for one in ATTACHED), "a step of each instance", 3 * PATIENCE_S)
        _pin(psutil.Process(served.process.pid), 0)
        for algorithm in ATTACHED:
            _pin(psutil.Process(served.attached[algorithm].pid), 1)
        _catch_up(served, course)
        run = Run(served.directory)
        run.split({one: 1 / (len(ATTACHED) + 1) for one in ATTACHED})
        _do(course, "begun", lambda: _tell(served, "resume"))
        if name == "disturbed":
            _disturb(served, run, course, steps)
        _follow(served, course, steps)
        served.finished(PATIENCE_S)
        for instance in list(served.attached):
            served.ended(instance, steps * SECONDS_A_STEP)
    began, ended = course.events[0].at, course.at(steps)
    counts = read_counts(address, name)
    row = {
        "name": name,
        "tokens_per_s": round(tokens_per_s(counts, began, ended), 1),
        "seconds": round(ended - began, 1),
        "instances": _told(run, course, seed),
    }
    print(f"{name}: {row['tokens_per_s']} tokens/s over {row['seconds']} s", flush=True)
    return row, course, counts


def told_events(
    alone: Course, counts_alone: Counts, disturbed: Course, counts: Counts, steps: int
) -> list[dict[str, Any]]:
    """What was done, and ``throughput_ratio``: tokens a second until the next event over those of the other run.

    Between the same steps of the served trainer: what is generated grows longer from step to step.
    """
    rows = []
    for one, last in itertools.zip_longest(disturbed.events, [each.step for each in disturbed.events[1:]]):
        began, until = one.step, last or steps
        rate, other = (
            tokens_per_s(counted, course.at(began), course.at(until))
            for course, counted in ((disturbed, counts), (alone, counts_alone))
        )
        rows.append(
            {
                "what": one.what,
                "step": began,
                "until": until,
                "tokens_per_s": round(rate, 1),
                "throughput_ratio": round(rate / other, 3),
            }
        )
    return rows


def _disturb(served: Stream, run: Run, course: Course, steps: int) -> None:
    def after(share: float) -> None:
        _follow(served, course, round(share * steps))

    def trainer_of(instance: str) -> psutil.Process:
        process = served.attached[instance].pid if instance != OWN else served.process.pid
        (found,) = (each for each in psutil.Process(process).children(recursive=True) if "trainer" in each.cmdline())
        return found

    def serve(instance: str, other: str) -> None:
        def is_served() -> bool:
            return any(one["served"] and one["name"] == instance for one in run.instances())

        def promote() -> None:
            run.promote(instance)
            served.until(is_served, "a promotion")
            _pin(trainer_of(instance), 0)
            _pin(trainer_of(other), 1)

        _do(course, f"{instance} promoted", promote, instance)

    after(KILL_AT)
    _do(course, f"{KILLED} killed", trainer_of(KILLED).kill)
    after(ATTACH_AT)
    _do(course, f"{LATE} attached", lambda: _attach_late(served))
    after(STALL_AT)
    stalled = trainer_of(STALLED)
    _do(course, f"{STALLED} stalled", lambda: stalled.send_signal(signal.SIGSTOP))
    go_on_at = time.monotonic() + STALL_S
    _follow(served, course, steps, until=lambda: time.monotonic() > go_on_at)
    _do(course, f"{STALLED} goes on", lambda: stalled.send_signal(signal.SIGCONT))
    after(PROMOTE_AT)
    serve(PROMOTED, OWN)
    after(RETURN_AT)
    serve(OWN, PROMOTED)


def _attach_late(served: Stream) -> None:
    served.attach(LATE, LATE, "beginning", (UNFILTERED, TO_THE_END))
    _pin(psutil.Process(served.attached[LATE].pid), 1)


def _tell(served: Stream, command: str) -> None:
    subprocess.run([*CLI, command, "--run", str(served.directory)], check=True, capture_output=True)


def _do(course: Course, what: str, action: Callable[[], object], served: str = "") -> None:
    action()
    course.events.append(Event(what, time.time(), len(course.steps), served))
    print(f"step {len(course.steps)}: {what}", flush=True)


def _follow(served: Stream, course: Course, step: int, until: Callable[[], bool] = lambda: False) -> None:
    """Note when the run's own trainer takes its steps, up to one of them, or until something is so."""

    def there() -> bool:
        _catch_up(served, course)
        return len(course.steps) >= step or until()

    served.until(there, f"step {step}", PATIENCE_S + step * SECONDS_A_STEP)


def _catch_up(served: Stream, course: Course) -> None:
    now = time.time()
    course.steps += [now] * (served.step() - len(course.steps))


def _pin(process: psutil.Process, processor: int) -> None:
    """Let a process, with what it has started and will start, run on one processor of the machine's."""
    if processor not in os.sched_getaffinity(0):
        return
    for each in (process, *process.children(recursive=True)):
        for thread in each.threads():
            os.sched_setaffinity(thread.id, {processor})


def _told(run: Run, course: Course, seed: int) -> list[dict[str, Any]]:
    """Rows of the run's own trainer and the instances: curve, accuracy, and what the audit says of each.

    Raises:
        StreamRLError: an account does not balance.
    """
    report = run.audit()
    if not report.is_balanced:
        raise StreamRLError(f"expected the account of every instance to balance, got {report.violations}")
    of_name = {own.algorithm: own for own in report.algorithms}
    curves = {name: curve_of(rewards) for name, rewards in _rewards_by_policy(run, course).items()}
    rows = []
    for name in (OWN, *ATTACHED, *({LATE} & set(of_name))):
        own = of_name[SERVED if name == OWN else name]
        of_instance = run if name == OWN else Run(run.directory / INSTANCES / name)
        model = of_instance.model
        assert model is not None, "every instance that took a step has a checkpoint"
        row = {
            "name": name,
            "algorithm": of_instance.settings.algorithm.name,
            "steps": of_instance.steps().num_rows,
            "trained": own.trained,
            "skipped": own.skipped_in_all,
            "lineages": list(own.lineages),
            "held_out_after": held_out_accuracy(model, seed),
        }
        if curve := curves.get(name):
            row |= {"curve": curve, "reward_first": curve[0], "reward_last": curve[-1]}
        rows.append(row)
    return rows


def _rewards_by_policy(run: Run, course: Course) -> dict[str, list[float]]:
    """Rewards of what each policy sampled, in the order in which it was begun; from the first event on."""
    table = run.trajectories().select(["policy", "rewards", "started_at"]).sort_by("started_at")
    found: dict[str, list[float]] = {name: [] for name in (OWN, *ATTACHED)}
    for row in table.to_pylist():
        if row["started_at"] >= course.events[0].at:
            name = row["policy"] or served_at(row["started_at"], course.events)
            found[name].append(dict(row["rewards"])["exact_match"])
    return found


def served_at(moment: float, events: Sequence[Event]) -> str:
    """Who was served then, by what was done; a worker that has not taken the new weights yet is counted with them."""
    return next((one.served for one in reversed(events) if one.served and one.at <= moment), OWN)
