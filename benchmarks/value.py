"""``python -m benchmarks.value``: tokens to the same held-out reward, with prompts ordered by value and without.

The task is the demo's, made harder to choose from: half of the prompts are the demo's own questions, and half are
beyond its model (products of two two-digit numbers, sums of five numbers), as in data sets that nobody has filtered for
the model. Groups without advantage are discarded (``algorithm.dynamic_sampling``), as in DAPO. There are so few prompts
that they come back several times. Held-out questions are the demo's; they have nothing of the other half.

Four runs for each seed, all real: ``off``, ``on``, ``killed`` (on, the dispatcher killed at half of the steps) and
``history`` (on, with the first run's history from the start).
"""

import argparse
import asyncio
import json
import math
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.algorithms.streams import Stream, running
from benchmarks.conditions import RESULTS, conditions, rounded, write_results
from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.embedded.runtime import cache_root
from streamrl.bus.history import BusHistory
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.demo.recipe import defaults
from streamrl.demo.task import Question, held_out_questions, training_questions
from streamrl.demo.warm_start import ensure_warm_started_model
from streamrl.inspection.report.record import ValueFacts, read_rows
from streamrl.inspection.report.values import value_facts
from streamrl.observability.run_state.evaluations import OVERALL
from streamrl.observability.run_state.trajectory_summary import TrajectorySummary, summary_of
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.settings.loading import validated

CASES = ("off", "on", "killed", "history")
QUESTIONS = 192
"""Prompts of each half; at 16 groups a step with advantage, a pass takes about a dozen steps."""
STEPS, EVERY = 80, 8
"""Optimizer steps of a run, and between two evaluations."""
HELD_OUT, SAMPLES = 192, 2
"""Held-out questions and their samples: the standard error of a share is at most 0.026."""
SMOOTHED = 2
"""Evaluations in a row whose mean must reach the target."""
AFTER = 200
"""Groups that show whether a restarted or a new run is as good at once: some 12 steps."""
PATIENCE_S = 3600.0
WEIGHTS = {"exact_match": 1.0, "worked_out": 0.0}


class Read(NamedTuple):
    """A run as its topic and its metrics tell it. ``evaluations``: (step, share of held-out questions passed)."""

    summaries: list[TrajectorySummary]
    evaluations: list[tuple[int, float]]
    killed_at: float | None


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure the seeds and cases that are asked for, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.value", description=__doc__)
    parser.add_argument("--seeds", default="0,1,2,3", help="divided by commas")
    parser.add_argument("--cases", default=",".join(CASES), help="divided by commas; off and on are always run")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--results", type=Path, default=RESULTS / "value.json")
    options, began = parser.parse_args(arguments), time.monotonic()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    cases = [case for case in CASES if case in ("off", "on", *options.cases.split(","))]
    rows = [row for seed in seeds for row in rows_of_seed(seed, cases, options.steps)]
    found = {"rows": rounded(rows), "ratios": rounded(ratios_of(rows))} | {
        "conditions": conditions(began, seeds, ("torch", "transformers"), "make bench-value")
    }
    write_results(options.results, found)
    print(json.dumps(found["ratios"]))
    return found


def rows_of_seed(seed: int, cases: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """The runs of a seed on one broker, one after the other, compared at the level that all of them reached."""
    model = ensure_warm_started_model(cache_root(), seed, partial(print, flush=True))
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-value-") as scratch:
        folder = Path(scratch)
        write_questions(folder, seed)
        with start_cluster(folder / "kafka") as cluster:
            runs = {case: run(folder, cluster.bootstrap_servers, model, case, steps, seed) for case in cases}
    level = min(max(value for _, value in smoothed(one.evaluations)) for one in runs.values())
    rows = [row_of(seed, case, one, level) for case, one in runs.items()]
    for row in rows:
        print({name: value for name, value in row.items() if name != "calibration"}, flush=True)
    return rows


def write_questions(folder: Path, seed: int) -> None:
    """The prompts and the held-out questions."""
    draw = random.Random(f"value/{seed}")
    own = training_questions(f"value/{seed}")
    questions = [next(own) for _ in range(QUESTIONS)] + [_beyond(draw) for _ in range(QUESTIONS)]
    for name, these in (("prompts", questions), ("held_out", held_out_questions(seed, HELD_OUT))):
        rows = [json.dumps({"prompt": one.text, "answer": one.answer}) + "\n" for one in these]
        (folder / f"{name}.jsonl").write_text("".join(rows))


def _beyond(draw: random.Random) -> Question:
    """A question of a kind that the model was never shown. Both fit its prompts' length."""
    if draw.random() < 0.5:
        return Question("*", (draw.randint(12, 99), draw.randint(12, 99)))
    return Question("+", tuple(draw.randint(11, 99) for _ in range(5)))


def run(folder: Path, address: str, model: Path, case: str, steps: int, seed: int) -> Read:
    """One run to its end."""
    tree = defaults("transformers", seed)
    name = f"{case}-{seed}"
    tree["run"] |= {"name": name, "directory": str(folder)}
    tree["kafka"], tree["model"] = {"bootstrap_servers": address}, {"path": str(model)}
    tree["data"] = {"path": str(folder / "prompts.jsonl")}
    tree["algorithm"]["dynamic_sampling"] = True
    tree["training"]["max_steps"] = steps
    tree["evaluation"] = {
        "every": EVERY,
        "prompts": HELD_OUT,
        "samples": SAMPLES,
        "data": {"held_out": {"path": str(folder / "held_out.jsonl")}},
    }
    tree["dispatch"] = {"value": case != "off"}
    if case == "history":
        tree["dispatch"]["value_history"] = [f"off-{seed}"]
    with running(folder, name, validated(tree)) as stream:
        killed_at = _kill_dispatcher(stream, steps // 2) if case == "killed" else None
        stream.finished(PATIENCE_S)
    evaluations = read_rows(folder / name / "metrics.jsonl").evaluations
    shares = [(step, metrics[OVERALL]) for step, metrics in evaluations if OVERALL in metrics]
    return Read(asyncio.run(_summaries(address, name)), shares, killed_at)


def _kill_dispatcher(stream: Stream, step: int) -> float:
    stream.until(lambda: stream.step() >= step, f"step {step}", PATIENCE_S)
    for child in psutil.Process(stream.process.pid).children():
        if "dispatcher" in child.cmdline():
            child.send_signal(signal.SIGKILL)
            return time.time()
    raise LookupError("expected a dispatcher among the run's processes, found none")


async def _summaries(address: str, name: str) -> list[TrajectorySummary]:
    history = BusHistory(KafkaBus(KafkaSettings(bootstrap_servers=address)), client_id="benchmark")
    try:
        records = history.records(TRAJECTORIES.full_name(name))
        found = [summary async for record in records if (summary := summary_of(record, WEIGHTS))]
    finally:
        await history.close()
    return sorted(found, key=lambda summary: summary.finished_at)


def smoothed(evaluations: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Means of ``SMOOTHED`` evaluations in a row, each at the step of the last."""
    return [
        (step, math.fsum(value for _, value in evaluations[end - SMOOTHED : end]) / SMOOTHED)
        for end in range(SMOOTHED, len(evaluations) + 1)
        for step in [evaluations[end - 1][0]]
    ]


def row_of(seed: int, case: str, one: Read, level: float) -> dict[str, Any]:
    """A row of the results. Tokens are those sampled by weights older than the ones that reached the level."""
    reached = next(step for step, value in smoothed(one.evaluations) if value >= level - 1e-9)
    groups = list(_groups(one.summaries))
    facts = value_facts(one.summaries, {})
    row: dict[str, Any] = {
        "seed": seed,
        "case": case,
        "on": case != "off",
        "level": level,
        "steps_to_reward": reached,
        "tokens_to_reward": sum(one.length for one in one.summaries if one.oldest.number < reached),
        "zero_advantage_share": _share(groups),
        "zero_advantage_first": _share(groups[:AFTER]),
        "zero_advantage_last": _share(groups[-AFTER:]),
        "calibration": _calibration(facts),
    }
    if one.killed_at is not None:
        before = [group for group in groups if group[0] < one.killed_at]
        row["zero_advantage_before_kill"] = _share(before[-AFTER:])
        row["zero_advantage_after_kill"] = _share(groups[len(before) :][:AFTER])
    return row


def _groups(summaries: Sequence[TrajectorySummary]) -> Iterator[tuple[float, bool]]:
    """The end of each whole group, and whether all its samples earned the same; in the order of their ends."""
    rewards: dict[str, list[float]] = {}
    for summary in summaries:
        found = rewards.setdefault(summary.group_id, [])
        found.append(summary.reward or 0.0)
        if len(found) == GENERATIONS:
            yield summary.finished_at, min(found) == max(found)


GENERATIONS = int(defaults("transformers", 0)["loop"]["num_generations"])


def _share(groups: Sequence[tuple[float, bool]]) -> float | None:
    return sum(is_equal for _, is_equal in groups) / len(groups) if groups else None


def _calibration(facts: ValueFacts | None) -> dict[str, Any] | None:
    if facts is None:
        return None
    return {"error": facts.error, "predicted": facts.predicted, "observed": facts.observed, "cells": facts.cells}


def ratios_of(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """By case: tokens to the same held-out reward over those of the run without values, one for each seed."""
    without = {row["seed"]: row["tokens_to_reward"] for row in rows if not row["on"]}
    return {
        case: [row["tokens_to_reward"] / without[row["seed"]] for row in rows if row["case"] == case]
        for case in CASES
        if case != "off" and any(row["case"] == case for row in rows)
    }


if __name__ == "__main__":
    main()
