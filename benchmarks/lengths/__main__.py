"""``python -m benchmarks.lengths``: compares the predictors and writes the results and the README's table."""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lengths.language import fine_tuned
from benchmarks.lengths.report import WORKLOADS, environment, write_readme
from benchmarks.lengths.trial import ask, judge, predictors, teach
from benchmarks.lengths.workload import Policy, Task
from producers.lengths.learned.predictor import LearnedLengths

HERE = Path(__file__).parent
FEW = 100
GROWTH = 2.0


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lengths", description=__doc__)
    parser.add_argument("--taught", type=int, default=2000, help="prompts seen, eight completions each")
    parser.add_argument("--held-out", type=int, default=1500, help="prompts never seen that are predicted")
    parser.add_argument("--epochs", type=float, default=8.0, help="passes of the language model over what was taught")
    parser.add_argument("--seed", type=int, default=700_000)
    parser.add_argument("--results", type=Path, default=HERE.parent / "results" / "lengths.json")
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    for policy in map(Policy, WORKLOADS):
        tasks = policy.tasks(options.taught + options.held_out, options.seed)
        taught, held_out = tasks[: options.taught], tasks[options.taught :]
        rows += _held_out(policy, taught, held_out, options.seed)
        rows += _language_model(policy, taught, held_out, options)
        if policy.name in ("synthetic", "answers"):
            rows += _repeats(policy, taught, options.seed)
        if policy.name == "synthetic":
            rows += _drift(taught, held_out, options.seed)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(rows, indent=1) + "\n")
    write_readme(options.readme, rows, environment(options, time.monotonic() - began))
    return rows


def _held_out(policy: Policy, taught: Sequence[Task], held_out: Sequence[Task], seed: int) -> Iterator[dict[str, Any]]:
    """Every predictor, taught on all and on few prompts; the prompts it is asked about are new to it."""
    for situation, lesson in (("held out", taught), (f"held out, {FEW} prompts seen", taught[:FEW])):
        for name, predictor in predictors(policy, held_out).items():
            teach(predictor, policy, lesson, seed)
            estimates, took = ask(predictor, held_out)
            for dataset, judged in judge(estimates, policy, held_out, seed, covers=name != "perfect").items():
                cost = _cost(took) if dataset == "all" else {}
                yield _row(policy, situation, dataset, name) | judged.row() | cost
            _say(policy, situation, name)


def _language_model(
    policy: Policy, taught: Sequence[Task], held_out: Sequence[Task], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Fine-tuned once to the same completions that the others were taught, as `streamrl lengths fit` does it."""
    began = time.thread_time()
    with tempfile.TemporaryDirectory(prefix="streamrl-lengths-") as scratch:
        predictor = fine_tuned(policy, taught, options.seed, options.epochs, Path(scratch))
    seconds = time.thread_time() - began
    estimates, took = ask(predictor, held_out)
    for dataset, judged in judge(estimates, policy, held_out, options.seed).items():
        cost = {**_cost(took), "fit_s": round(seconds, 1)} if dataset == "all" else {}
        yield _row(policy, "held out", dataset, "language_model") | judged.row() | cost
    _say(policy, "held out", "language_model")


def _repeats(policy: Policy, taught: Sequence[Task], seed: int) -> Iterator[dict[str, Any]]:
    """The prompts come again: with the history of the first pass, and with it taken away by other names.

    Half of them came a second time before, so that it is known how much a history says.
    """
    learned = predictors(policy, taught)["learned"]
    half = taught[: len(taught) // 2]
    teach(learned, policy, taught, seed)
    teach(learned, policy, half, seed, version=1)
    second = taught[len(taught) // 2 :]
    perfect, took = ask(predictors(policy, second)["perfect"], second)
    for dataset, judged in judge(perfect, policy, second, seed, covers=False).items():
        cost = _cost(took) if dataset == "all" else {}
        yield _row(policy, "seen before", dataset, "perfect") | judged.row() | cost
    renamed = [
        Task(t.prompt.model_copy(update={"prompt_id": f"again/{t.prompt.prompt_id}"}), t.typical) for t in second
    ]
    for situation, tasks in (("seen before", second), ("seen before, history withheld", renamed)):
        estimates, took = ask(learned, tasks)
        for dataset, judged in judge(estimates, policy, tasks, seed).items():
            yield _row(policy, situation, dataset, "learned") | judged.row() | (_cost(took) if dataset == "all" else {})
        _say(policy, situation, "learned")


def _drift(taught: Sequence[Task], held_out: Sequence[Task], seed: int) -> Iterator[dict[str, Any]]:
    """Lengths double: before, at once, and after some prompts of the new policy."""
    before, after = Policy("synthetic"), Policy("synthetic", GROWTH)
    learned = predictors(before, held_out)["learned"]
    assert isinstance(learned, LearnedLengths)
    teach(learned, before, taught, seed)
    parts = {"before": 0, "at once": 0, "after 100 prompts": 100, "after 500 prompts": 400, "after 1,500 prompts": 1000}
    position = 0
    for number, (moment, further) in enumerate(parts.items()):
        teach(learned, after, taught[position : position + further], seed, version=number)
        position += further
        estimates, took = ask(learned, held_out)
        judged = judge(estimates, before if moment == "before" else after, held_out, seed)["all"]
        yield _row(after, f"lengths doubled: {moment}", "all", "learned") | judged.row() | _cost(took)
        _say(after, moment, "learned")


def _row(policy: Policy, situation: str, dataset: str, predictor: str) -> dict[str, Any]:
    return {"workload": policy.name, "situation": situation, "dataset": dataset, "predictor": predictor}


def _cost(microseconds: Sequence[float]) -> dict[str, float]:
    return {f"us_per_prompt_p{share}": round(float(np.percentile(microseconds, share)), 1) for share in (50, 99)}


def _say(policy: Policy, situation: str, predictor: str) -> None:
    print(f"{policy.name}, {situation}, {predictor}: done", flush=True)


if __name__ == "__main__":
    main()
