"""``python -m benchmarks.step``: of a demo step and a SmolLM2 step, processor time by process and phase.

Each model trains for some steps as a user would have it train, with a broker that the run starts. Meanwhile py-spy
samples the stacks of all threads, and each stack belongs to a phase. The processor time of a thread is the system's
count. So shares within a thread are sampled, and its sum is exact. Next to the phases of the model stands what their
matmuls take alone.
"""

import argparse
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import STREAMRL
from benchmarks.conditions import RESULTS, conditions, rounded, write_results
from benchmarks.step.limits import StepTokens, measured_limits
from benchmarks.step.phases import OTHER
from benchmarks.step.recording import Recorded, Window, record, step_means
from streamrl.api import Run
from streamrl.settings.tree import Settings

LIBRARIES = ("torch", "transformers", "aiokafka", "py-spy")
NAME, MACHINE = "step", "machine"
SMALLEST_S = 0.0005
"""Phases of less than this many seconds a step are added up as others: they were seen once or not at all."""
LIMITED = ("prefill", "decode matmuls", "decode overhead", "forward", "backward")
"""Phases of the model's own computing."""


@dataclass(frozen=True)
class Case:
    """``shape``: of ``benchmarks.engine.decode.SHAPES``. ``command``: starts the run in a directory of its own."""

    shape: str
    warm_up: int
    steps: int
    command: Callable[[Path], list[str]]


def _demo(_directory: Path) -> list[str]:
    return ["demo", "--engine", "transformers", "--evaluation.function=none"]


def _smollm2(directory: Path) -> list[str]:
    subprocess.run([*STREAMRL, "init", "--example", "smollm2", str(directory)], check=True, stdout=subprocess.DEVNULL)
    return ["run", "--no-top", "streamrl.toml", "--evaluation.function=none"]


CASES = {
    "demo": Case("demo", 8, 24, _demo),
    "SmolLM2-135M": Case("SmolLM2-135M", 3, 6, _smollm2),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--steps", type=int, help="optimizer steps that count; without: 24 of the demo, 6 of SmolLM2")
    parser.add_argument("--rate", type=int, default=50, help="samples a second of each process")
    parser.add_argument("--limit-s", type=float, default=20.0, help="seconds to time matmuls, for each precision")
    parser.add_argument("--results", type=Path, default=RESULTS / "step.json")
    parser.add_argument("settings", nargs="*", help="for the runs: --section.key=value, after a --")
    options = parser.parse_args(arguments)
    began, rows, tokens = time.monotonic(), [], {}
    for model in options.models:
        recorded, counted = _measure(CASES[model], options)
        limits = measured_limits(CASES[model].shape, counted, options.limit_s)
        mine = list(rows_of(model, recorded, limits))
        rows += mine
        tokens[model] = counted.as_row() | {"steps": recorded.steady.steps, "step_s": _step_s(recorded.steady)}
        print("\n".join(table_of(model, mine)), flush=True)
    how = conditions(began, 0, LIBRARIES, "make bench-step")
    found = {"rows": rounded(rows, 3), "phases": rounded(list(phases_of(rows)), 3), "tokens": tokens}
    write_results(options.results, found | how, ("rows", "phases"))


def _measure(case: Case, options: argparse.Namespace) -> tuple[Recorded, StepTokens]:
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-step-") as scratch:
        directory = Path(scratch)
        steps = options.steps or case.steps
        own = (f"--run.directory={directory / 'runs'}", f"--run.name={NAME}", "--run.seed=0")
        more = (f"--training.max_steps={1000 + steps}", "--training.checkpoint_every=1000000")
        command = [*case.command(directory), *own, *more, *options.settings]
        run = directory / "runs" / NAME
        recorded = record(command, directory, run / "metrics.jsonl", case.warm_up, steps, options.rate)
        means = step_means(run / "metrics.jsonl", recorded.first, recorded.first + recorded.steady.steps)
        return recorded, tokens_of(means, Run(run).settings)


def tokens_of(means: Mapping[str, float], settings: Settings) -> StepTokens:
    """What a step computed, by the means of the steps' figures."""
    groups, size = settings.loop.groups_per_step, settings.loop.num_generations
    samples = means["ledger/trained"]
    prompt = (means["training_tok/s"] * means["time/step"] - means["tokens/trained"]) / samples
    completion = means["completions/mean_length"]
    # Prompts of samples that have a gradient: those of a group that all earned the same are not computed.
    prompts = prompt * samples * (1 - means["frac_reward_zero_std"])
    under_way = groups * size * (1 + settings.loop.staleness_bound)
    return StepTokens(
        prefilled=groups * prompt,
        decoded=groups * size * completion,
        computed=means["tokens/computed"] + prompts / (size if settings.training.packing == "shared" else 1),
        scored=means["tokens/computed"],
        sequences=min(settings.generation.max_num_seqs, math.ceil(under_way / settings.run.workers)),
        context=round(prompt + completion / 2),
    )


def rows_of(model: str, recorded: Recorded, limits: dict[str, float]) -> Iterator[dict[str, Any]]:
    """A row for each process and phase: seconds of a steady step, then of the start.

    ``limit_s``: of a phase of the model, the seconds of its matmuls alone, over all processes; else none.
    """
    for part, window in (("step", recorded.steady), ("start", recorded.start)):
        cpu_s: dict[tuple[str, str], float] = {}
        for (process, phase), seconds in window.cpu_s.items():
            share = seconds / window.steps
            key = process, phase if share >= SMALLEST_S else OTHER
            cpu_s[key] = cpu_s.get(key, 0.0) + share
        cpu_s[MACHINE, "idle"] = window.idle_s / window.steps
        for (process, phase), seconds in sorted(cpu_s.items(), key=lambda item: (item[0][0], -item[1])):
            limit = limits.get(phase) if part == "step" else None
            yield {
                "model": model, "part": part, "process": process, "phase": phase, "cpu_s": seconds, "limit_s": limit
            }  # fmt: skip


def phases_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A steady step's phases over all processes, in milliseconds, largest first; those under a hundredth are joined."""
    steady = [row for row in rows if row["part"] == "step" and row["process"] != MACHINE]
    for model in dict.fromkeys(row["model"] for row in steady):
        mine = [row for row in steady if row["model"] == model]
        least = 0.01 * sum(row["cpu_s"] for row in mine)
        limits = {row["phase"]: row["limit_s"] for row in mine}
        spent = {phase: sum(row["cpu_s"] for row in mine if row["phase"] == phase) for phase in limits}
        named = {phase: seconds for phase, seconds in spent.items() if phase != OTHER and seconds >= least}
        rest = sum(spent.values()) - sum(named.values())
        for phase, seconds in [*sorted(named.items(), key=lambda item: -item[1]), (OTHER, rest)]:
            limit = limits.get(phase)
            limit_ms = None if limit is None else 1e3 * limit
            yield {"model": model, "phase": phase, "cpu_ms": 1e3 * seconds, "limit_ms": limit_ms}


def _step_s(window: Window) -> float:
    return round(window.seconds / window.steps, 3)


def table_of(model: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines for people: of a step, each process with its phases; then how far the model's phases are from the limit."""
    yield f"{model}: processor milliseconds of a step"
    steady = [row for row in rows if row["part"] == "step"]
    for row in steady:
        limit = "" if row["limit_s"] is None else f"   matmuls alone {1e3 * row['limit_s']:.1f}"
        yield f"  {row['process']:<14} {row['phase']:<18} {1e3 * row['cpu_s']:9.1f}{limit}"
    for name, phases in (("generation", LIMITED[:3]), ("training", LIMITED[3:])):
        spent = sum(row["cpu_s"] for row in steady if row["phase"] in phases)
        limit = sum(
            {row["phase"]: row["limit_s"] for row in steady if row["phase"] in phases and row["limit_s"]}.values()
        )
        if limit:
            yield f"  {name}: {1e3 * spent:.1f}, {spent / limit:.2f} x its matmuls"


if __name__ == "__main__":
    main()
