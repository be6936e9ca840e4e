"""``python -m benchmarks.peers``: StreamRL and TRL, each in several ways, train one policy; curves, ratios, README."""

import argparse
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from benchmarks.peers.contenders import streamrl, trl
from benchmarks.peers.contenders.plan import Hyperparameters, Plan, Trained
from benchmarks.peers.judging.judge import HeldOut, Judged, judge
from benchmarks.peers.judging.report import SHARES, figures, hardware, parts_of_the_ratio, plot, runs, write_readme
from benchmarks.peers.task import write_entries
from benchmarks.peers.tasks import TASKS, Task, training_entries
from streamrl.bus.embedded.jars import KAFKA_VERSION
from streamrl.schemas.fingerprints import text_fingerprint

RESULTS = Path(__file__).parents[1] / "results"
CORES = 2
JUDGED = TypeAdapter(Judged)
CONTENDERS: dict[str, Callable[[Plan], Trained]] = {
    **{f"streamrl {name}": partial(streamrl.train, name) for name in streamrl.TUNED},
    **{f"TRL GRPOTrainer, {name}": partial(trl.train, name) for name in trl.VARIANTS},
}
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"streamrl {name}": settings for name, settings in streamrl.TUNED.items()},
    **{f"TRL GRPOTrainer, {name}": trl.TUNED | settings for name, settings in trl.VARIANTS.items()},
}
"""Of each contender, beside those of the plan."""


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say."""
    options = _options(arguments)
    began = time.monotonic()
    trl.ensure_environment()
    task: Task = options.task
    policies = [task.policy(seed) for seed in range(options.rounds)]
    with tempfile.TemporaryDirectory(prefix="streamrl-peers-") as name:
        folder = Path(options.keep or name)
        folder.mkdir(parents=True, exist_ok=True)
        _warm_up(options, policies[0], folder / "warm-up")
        rounds = [_round(options, policy, folder / f"seed{seed}", seed) for seed, policy in enumerate(policies)]
    result = _written(options, rounds, time.monotonic() - began)
    for row in result["rows"]:
        if row["task"] == task.name:
            print(row)
    return result


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--task", default="demo", choices=list(TASKS))
    parser.add_argument("--rounds", type=int, default=5, help="each round is a seed, trained by every contender")
    parser.add_argument("--steps", type=int, help="optimizer steps at most")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of every contender")
    parser.add_argument("--limit-s", type=float, help="wall-clock after which a contender is stopped")
    parser.add_argument("--held-out", type=int, help="prompts of the evaluation")
    parser.add_argument("--save-every", type=int, help="optimizer steps between evaluated weights")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--keep", type=Path, help="keep runs and logs here, and train only what is missing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where peers.json and the picture go")
    parser.add_argument("--quick", action="store_true", help="a few steps of each, to see that it works; no README")
    options = parser.parse_args(arguments)
    options.task = TASKS[options.task]
    if options.quick:
        options.rounds, options.steps, options.held_out, options.save_every = 1, 6, 64, 2
        options.results = Path(tempfile.mkdtemp(prefix="streamrl-peers-quick-"))
    for name in ("limit_s", "held_out", "save_every"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(options.task, name))
    steps = options.steps or options.task.hyperparameters.max_steps
    options.same = replace(options.task.hyperparameters, max_steps=steps, dtype=options.dtype)
    return options


def _warm_up(options: argparse.Namespace, policy: Path, folder: Path) -> None:
    """One step of each that does not count: the first to start would pay for a disk that was just written to."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prompts, same = folder / "prompts.jsonl", replace(options.same, max_steps=1)
    write_entries(prompts, options.task.training(0, 2 * same.groups_per_step))
    for name in options.contenders:
        CONTENDERS[name](_plan(options, policy, prompts, _place(folder, name), 0, 1, same))
    print("every contender has taken a step that does not count", flush=True)


def _plan(
    options: argparse.Namespace,
    policy: Path,
    prompts: Path,
    output: Path,
    seed: int,
    save_every: int,
    same: Hyperparameters,
) -> Plan:
    task: Task = options.task
    return Plan(
        policy,
        prompts,
        output,
        seed,
        _cores(),
        options.limit_s,
        save_every,
        same,
        reward=task.reward,
        answer_pattern=task.answer_pattern,
        settings=task.settings,
    )


def _place(folder: Path, contender: str) -> Path:
    """Its own, under a name without blanks and commas: Kafka takes what is behind a comma for another directory."""
    return folder / re.sub(r"\W+", "-", contender)


def _cores() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0))[:CORES])


def _round(options: argparse.Namespace, policy: Path, folder: Path, seed: int) -> list[Judged]:
    """Every contender once, in an order that changes with the seed."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts, held_out = folder / "prompts.jsonl", folder / "held_out.jsonl"
    task, same = options.task, options.same
    write_entries(prompts, training_entries(task, same, seed))
    write_entries(held_out, task.held_out_entries(seed, options.held_out))
    examiner = HeldOut(
        policy, held_out, task.answer_pattern, same.temperature, same.max_completion_length, len(_cores())
    )
    judged = []
    names = options.contenders
    for name in names[seed % len(names) :] + names[: seed % len(names)]:
        plan = _plan(options, policy, prompts, _place(folder, name), seed, options.save_every, same)
        judged.append(_once(name, plan, examiner))
        last = judged[-1].curve[-1]
        print(
            f"seed {seed}, {name}: {last.step} steps in {last.seconds:.0f} s, held-out reward "
            f"{judged[-1].curve[0].reward:.3f} → {last.reward:.3f}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    return judged


def _once(name: str, plan: Plan, examiner: HeldOut) -> Judged:
    """A contender's run with its curve, which is kept: equal plan, settings and questions are not trained again."""
    known = json.dumps([plan.as_json(), SETTINGS[name], plan.prompts.read_text(), examiner.prompts.read_text()])
    kept = plan.output / f"judged-{text_fingerprint(known)}.json"
    if kept.exists():
        return JUDGED.validate_json(kept.read_bytes())
    shutil.rmtree(plan.output, ignore_errors=True)  # of a run that was interrupted, or of other settings
    trained = CONTENDERS[name](plan)
    judged = judge(trained, examiner, plan.output)
    for saved in trained.saved:  # of a larger model, all of them would fill a disk
        shutil.rmtree(saved.weights)
    kept.write_bytes(JUDGED.dump_json(judged, indent=2))
    return judged


def _written(options: argparse.Namespace, rounds: list[list[Judged]], seconds: float) -> dict[str, Any]:
    """Write the task's rows and facts; those of other tasks stay as they are."""
    file, task = options.results / "peers.json", options.task.name
    before = json.loads(file.read_text()) if file.exists() else {"rows": [], "tasks": {}}
    rows = figures(task, rounds)
    facts = {
        "parts_of_the_ratio": parts_of_the_ratio(rows),
        "target": f"{SHARES[-1]:.0%} of the gain that every contender reaches; curves smoothed over three evaluations",
        "runs": runs(rounds),
        "hyperparameters": vars(options.same),
        "settings": options.task.settings,
        "tuned": {"streamrl": streamrl.TUNED, "trl": trl.TUNED, "trl_variants": trl.VARIANTS},
        "hardware": f"{hardware()}; every contender has the same {CORES} cores, its broker included",
        "load_at_end": round(os.getloadavg()[0], 1),
        "versions": f"Python {platform.python_version()}; StreamRL: torch {version('torch')}, transformers "
        f"{version('transformers')}, Apache Kafka {KAFKA_VERSION}; TRL: "
        + ", ".join(f"{name} {number}" for name, number in trl.versions().items()),
        "seeds": list(range(options.rounds)),
        "seconds_in_all": round(seconds),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    result = {
        "rows": [row for row in before["rows"] if row["task"] != task] + rows,
        "tasks": before["tasks"] | {task: facts},
    }
    file.write_text(json.dumps(result, indent=2) + "\n")
    picture = f"peers-{task}.png"
    plot(rounds, options.results / picture)
    print(f"written: {file} and {picture}")
    if options.results == RESULTS:
        write_readme(Path(__file__).with_name("README.md"), task, rows, _sentences(facts))
    return result


def _sentences(facts: dict[str, Any]) -> list[str]:
    parts = {name: value for name, value in facts["parts_of_the_ratio"].items() if value is not None}
    means = {
        "engine": "`synchronous` to TRL's fastest",
        "asynchrony": "`trajectory_async` to `synchronous`",
        "zero_advantage": "leaving samples without advantage out to computing them",
    }
    return [
        *(f"Time to 90 %, {means[name]}: {value}." for name, value in parts.items()),
        f"Hardware: {facts['hardware']}; load average over the last minute at the end {facts['load_at_end']}.",
        f"Versions: {facts['versions']}.",
        f"Seeds {facts['seeds']}; {facts['seconds_in_all']} s in all, {facts['date']}.",
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
