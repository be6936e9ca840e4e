"""``python -m benchmarks.lengths``: compares the predictors and writes the results and the README's tables."""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conditions import conditions
from benchmarks.lengths.language import fine_tuned
from benchmarks.lengths.report import facts_of, write_readme
from benchmarks.lengths.trial import BASELINES, Judged, ask, judge, mean_of, predictors, teach
from benchmarks.lengths.workload import Policy, Split, Task, split_by_content, split_by_dataset
from streamrl.producers.lengths.learned.predictor import LearnedLengths
from streamrl.producers.lengths.predictor import LengthPredictor

HERE = Path(__file__).parent
WORKLOADS = ("synthetic", "answers", "lognormal", "real")
WITH_LANGUAGE_MODEL = (("synthetic", "seen"), ("real", "real"), ("real", "unseen_data_sets"))
"""Workload and split: its fits take longer than everything else."""
FEW = 100
GROWTH = 2.0
LIBRARIES = ("lightgbm", "numpy", "reasoning-gym", "torch", "transformers")
LARGE = "language_model_smollm2"
Make = Callable[[Split, Path], LengthPredictor]
"""A predictor that was taught one half of a split; in a folder that it may write into."""


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lengths", description=__doc__)
    parser.add_argument("--prompts", type=int, default=3000, help="prompts drawn; equal ones count once")
    parser.add_argument("--epochs", type=float, default=4.0, help="passes of the small language model")
    parser.add_argument("--seed", type=int, default=700_000)
    parser.add_argument("--results", type=Path, default=HERE.parent / "results" / "lengths.json")
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument(
        "--smollm2-epochs",
        type=float,
        default=0.0,
        help="also fine-tune SmolLM2 to the real lengths: a pass takes long",
    )
    options = parser.parse_args(arguments)
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    for policy in map(Policy, options.workloads):
        tasks, seed = policy.tasks(options.prompts, options.seed), options.seed
        seen = split_by_content(tasks, seed)
        rows += _compared(policy, "real" if policy.name == "real" else "seen", [seen], options)
        if len({task.prompt.dataset for task in tasks}) > 1:
            rows += _compared(policy, "unseen_data_sets", split_by_dataset(tasks, seed), options)
        if policy.name == "synthetic":
            few = Split(seen.taught[:FEW], seen.asked)
            rows += _compared(policy, f"seen, {FEW} prompts taught", [few], options)
            rows += _repeats(policy, seen.taught, seed)
            rows += _drift(seen, seed)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    where = conditions(began, options.seed, LIBRARIES, "make bench-lengths")
    options.results.write_text(json.dumps({"conditions": where, "rows": rows}, indent=1) + "\n")
    write_readme(options.readme, rows, facts_of(options, where))
    return rows


def _compared(
    policy: Policy, split: str, folds: Sequence[Split], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Every predictor, taught and asked fold by fold."""
    makers: dict[str, Make] = {name: _taught(policy, name, options.seed) for name in predictors(policy, folds[0].asked)}
    if (policy.name, split) in WITH_LANGUAGE_MODEL:
        makers["language_model"] = _fitted(policy, options.seed, options.epochs, None)
    if split == "real" and options.smollm2_epochs:
        from streamrl.init.smollm2 import ensure_smollm2

        makers[LARGE] = _fitted(policy, options.seed, options.smollm2_epochs, ensure_smollm2(print))
    for name, make in makers.items():
        judged: list[dict[str, Judged]] = []
        microseconds: list[float] = []
        began = time.thread_time()
        for fold in folds:
            with tempfile.TemporaryDirectory(prefix="streamrl-lengths-") as scratch:
                predictor = make(fold, Path(scratch))
            estimates, took = ask(predictor, fold.asked)
            judged.append(judge(estimates, policy, fold.asked, options.seed, covers=name != "perfect"))
            microseconds += took
        cost = {**_cost(microseconds), "seconds": round(time.thread_time() - began, 1)}
        about = {
            **_row(policy, split, name),
            "taught": round(sum(len(fold.taught) for fold in folds) / len(folds)),
            "overlap": sum(fold.overlap for fold in folds),
            "content_overlap": sum(fold.content_overlap for fold in folds),
        }
        yield about | {"dataset": "all"} | mean_of([one["all"] for one in judged]).row() | cost
        for dataset in sorted({dataset for one in judged for dataset in one} - {"all"}):
            (found,) = (one[dataset] for one in judged if dataset in one)
            yield about | {"dataset": dataset} | found.row()
        _say(policy, split, name)


def _taught(policy: Policy, name: str, seed: int) -> Make:
    def make(fold: Split, scratch: Path) -> LengthPredictor:
        predictor = predictors(policy, fold.asked)[name]
        teach(predictor, policy, fold.taught, seed)
        return predictor

    return make


def _fitted(policy: Policy, seed: int, epochs: float, base: Path | None) -> Make:
    """As `streamrl lengths fit` does it, and once."""
    return lambda fold, scratch: fine_tuned(policy, fold.taught, seed, epochs, scratch, base)


def _repeats(policy: Policy, taught: Sequence[Task], seed: int) -> Iterator[dict[str, Any]]:
    """The prompts come again: with the history of the first pass, and with it taken away by other names.

    Half of them came a second time before, so that it is known how much a history says.
    """
    learned = predictors(policy, taught)["learned"]
    half, second = taught[: len(taught) // 2], taught[len(taught) // 2 :]
    teach(learned, policy, taught, seed)
    teach(learned, policy, half, seed, version=1)
    renamed = [
        Task(task.prompt.model_copy(update={"prompt_id": f"again/{task.prompt.prompt_id}"}), task.typical, task.content)
        for task in second
    ]
    again = Split([*taught], [*second])
    for split, name, predictor, tasks in (
        ("repeated", "perfect", predictors(policy, second)["perfect"], second),
        ("repeated", "learned", learned, second),
        ("repeated, history withheld", "learned", learned, renamed),
    ):
        estimates, took = ask(predictor, tasks)
        judged = judge(estimates, policy, tasks, seed, covers=name != "perfect")["all"]
        counts = {"taught": len(taught), "overlap": again.overlap, "content_overlap": again.content_overlap}
        yield _row(policy, split, name) | counts | {"dataset": "all"} | judged.row() | _cost(took)
        _say(policy, split, name)


def _drift(seen: Split, seed: int) -> Iterator[dict[str, Any]]:
    """Lengths double: before, at once, and after some prompts of the new policy."""
    before, after = Policy("synthetic"), Policy("synthetic", GROWTH)
    learned = predictors(before, seen.asked)["learned"]
    assert isinstance(learned, LearnedLengths)
    teach(learned, before, seen.taught, seed)
    position = 0
    for number, further in enumerate((0, 0, 100, 400, 1000)):
        teach(learned, after, seen.taught[position : position + further], seed, version=number)
        position += further
        moment = "before" if number == 0 else "at once" if number == 1 else f"after {position:,} prompts"
        estimates, took = ask(learned, seen.asked)
        judged = judge(estimates, after if number else before, seen.asked, seed)["all"]
        counts = {"taught": len(seen.taught), "overlap": seen.overlap, "content_overlap": seen.content_overlap}
        row = _row(after, f"seen, lengths doubled: {moment}", "learned")
        yield row | counts | {"dataset": "all"} | judged.row() | _cost(took)
        _say(after, moment, "learned")


def _row(policy: Policy, split: str, predictor: str) -> dict[str, Any]:
    return {
        "workload": policy.name,
        "lengths": "measured" if policy.name in ("real", "answers") else "made up",
        "split": split,
        "predictor": predictor,
        "baseline": predictor in BASELINES,
    }


def _cost(microseconds: Sequence[float]) -> dict[str, float]:
    return {f"us_per_prompt_p{share}": round(float(np.percentile(microseconds, share)), 1) for share in (50, 99)}


def _say(policy: Policy, split: str, predictor: str) -> None:
    print(f"{policy.name}, {split}, {predictor}: done", flush=True)


if __name__ == "__main__":
    main()
