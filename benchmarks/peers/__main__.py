"""``python -m benchmarks.peers``: StreamRL in two modes and TRL train the same policy; curves, ratios, README."""

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.contenders import streamrl, trl
from benchmarks.peers.contenders.plan import Hyperparameters, Plan, Trained
from benchmarks.peers.judging.judge import HeldOut, Judged, judge
from benchmarks.peers.judging.report import SHARES, figures, hardware, parts_of_the_ratio, plot, runs, write_readme
from benchmarks.peers.task import write_held_out, write_training
from streamrl.bus.embedded.jars import KAFKA_VERSION
from streamrl.bus.embedded.runtime import cache_root
from streamrl.demo.warm_start import ensure_warm_started_model

RESULTS = Path(__file__).parents[1] / "results"
CORES = 2
CONTENDERS: dict[str, Callable[[Plan], Trained]] = {
    **{f"streamrl {name}": partial(streamrl.train, name) for name in streamrl.TUNED},
    **{f"TRL GRPOTrainer, {name}": partial(trl.train, name) for name in trl.VARIANTS},
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say."""
    options = _options(arguments)
    began = time.monotonic()
    trl.ensure_environment()
    policies = [ensure_warm_started_model(cache_root(), seed, print) for seed in range(options.rounds)]
    with tempfile.TemporaryDirectory(prefix="streamrl-peers-") as name:
        folder = Path(options.keep or name)
        folder.mkdir(parents=True, exist_ok=True)
        _warm_up(options, policies[0], folder / "warm-up")
        rounds = [_round(options, policy, folder / f"seed{seed}", seed) for seed, policy in enumerate(policies)]
    result = _written(options, rounds, time.monotonic() - began)
    for row in result["rows"]:
        print(row)
    return result


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="each round is a seed, trained by every contender")
    parser.add_argument("--steps", type=int, default=Hyperparameters.max_steps, help="optimizer steps at most")
    parser.add_argument("--limit-s", type=float, default=400.0, help="wall-clock after which a contender is stopped")
    parser.add_argument("--held-out", type=int, default=512, help="prompts of the evaluation")
    parser.add_argument("--save-every", type=int, default=5, help="optimizer steps between evaluated weights")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--keep", type=Path, help="keep runs, weights and logs in this directory")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where peers.json and peers.png go")
    parser.add_argument("--quick", action="store_true", help="a few steps of each, to see that it works; no README")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.steps, options.held_out, options.save_every = 1, 6, 64, 2
        options.results = Path(tempfile.mkdtemp(prefix="streamrl-peers-quick-"))
    return options


def _warm_up(options: argparse.Namespace, policy: Path, folder: Path) -> None:
    """One step of each that does not count: the first to start would pay for a disk that was just written to."""
    folder.mkdir(parents=True)
    prompts, same = folder / "prompts.jsonl", Hyperparameters(max_steps=1)
    write_training(prompts, 2 * same.groups_per_step, 0)
    for name in options.contenders:
        CONTENDERS[name](Plan(policy, prompts, _place(folder, name), 0, _cores(), options.limit_s, 1, same))
    print("every contender has taken a step that does not count", flush=True)


def _place(folder: Path, contender: str) -> Path:
    """Its own, under a name without blanks and commas: Kafka takes what is behind a comma for another directory."""
    return folder / re.sub(r"\W+", "-", contender)


def _cores() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0))[:CORES])


def _round(options: argparse.Namespace, policy: Path, folder: Path, seed: int) -> list[Judged]:
    """Every contender once, in an order that changes with the seed."""
    folder.mkdir(parents=True)
    prompts, held_out = folder / "prompts.jsonl", folder / "held_out.jsonl"
    same = Hyperparameters(max_steps=options.steps)
    write_training(prompts, 2 * same.groups_per_step * same.max_steps, seed)
    write_held_out(held_out, options.held_out, seed)
    cores = _cores()
    examiner = HeldOut(policy, held_out, same.temperature, same.max_completion_length, len(cores))
    judged = []
    names = options.contenders
    for name in names[seed % len(names) :] + names[: seed % len(names)]:
        plan = Plan(policy, prompts, _place(folder, name), seed, cores, options.limit_s, options.save_every, same)
        trained = CONTENDERS[name](plan)
        judged.append(judge(trained, examiner, _place(folder, name)))
        last = judged[-1].curve[-1]
        print(
            f"seed {seed}, {trained.contender}: {last.step} steps in {last.seconds:.0f} s, held-out reward "
            f"{judged[-1].curve[0].reward:.3f} → {last.reward:.3f}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    return judged


def _written(options: argparse.Namespace, rounds: list[list[Judged]], seconds: float) -> dict[str, Any]:
    facts = {
        "hardware": f"{hardware()}; every contender has the same {CORES} cores, its broker included",
        "load_at_end": round(os.getloadavg()[0], 1),
        "versions": f"Python {platform.python_version()}; StreamRL: torch {version('torch')}, transformers "
        f"{version('transformers')}, Apache Kafka {KAFKA_VERSION}; TRL: "
        + ", ".join(f"{name} {number}" for name, number in trl.versions().items()),
        "seeds": list(range(options.rounds)),
        "seconds_in_all": round(seconds),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    rows = figures(rounds)
    result = {
        "rows": rows,
        "parts_of_the_ratio": parts_of_the_ratio(rows),
        "target": f"{SHARES[-1]:.0%} of the gain that every contender reaches; curves smoothed over three evaluations",
        "runs": runs(rounds),
        "hyperparameters": vars(Hyperparameters(max_steps=options.steps)),
        "tuned": {"streamrl": streamrl.TUNED, "trl": trl.TUNED, "trl_variants": trl.VARIANTS},
        **facts,
    }
    (options.results / "peers.json").write_text(json.dumps(result, indent=2) + "\n")
    plot(rounds, options.results / "peers.png")
    print(f"written: {options.results}/peers.json and peers.png")
    if options.results == RESULTS and set(options.contenders) == set(CONTENDERS):
        write_readme(Path(__file__).with_name("README.md"), rows, _sentences(result))
    return result


def _sentences(facts: dict[str, Any]) -> list[str]:
    parts = facts["parts_of_the_ratio"]
    return [
        f"Parts of the ratio of `trajectory_async` to 90 %: engine (`synchronous` to TRL's fastest) {parts['engine']}; "
        f"asynchrony (`trajectory_async` to `synchronous`) {parts['asynchrony']}. Both leave samples without advantage "
        f"out, which takes {parts['zero_advantage']} of the time of computing them (`trajectory_async`).",
        f"Hardware: {facts['hardware']}; load average over the last minute at the end {facts['load_at_end']}.",
        f"Versions: {facts['versions']}.",
        f"Seeds {facts['seeds']}; {facts['seconds_in_all']} s in all, {facts['date']}.",
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
