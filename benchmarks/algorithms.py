"""``python -m benchmarks.algorithms``: every loss of the shelf against independent ones, and what each teaches.

The references are naive loops over tokens and what TRL recorded, as the tests have them; the largest difference over
``--cases`` seeded batches stands in the result. The curves are the mean reward, step by step, of a model of some
thousand parameters that is paid for one token. Then graders are measured (``benchmarks.graders``).
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import graders
from benchmarks.conditions import conditions
from consumers.algorithms.settings import PRESETS
from tests.consumers.algorithms import test_trl as trl
from tests.consumers.algorithms.naive import make_case
from tests.consumers.algorithms.references import REFERENCES
from tests.consumers.training import test_learning as learning

RESULTS = Path(__file__).parent / "results" / "algorithms.json"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms", description=__doc__)
    parser.add_argument("--cases", type=int, default=20, help="seeded batches for each loss")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--graders-seconds", type=float, default=15.0, help="for each number of members; 0: none")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"losses": losses(options.cases), "curves": curves()}
    if options.graders_seconds:
        result |= graders.measured(options.graders_seconds)
    result["worst_value_error"] = max(row["value_error"] for row in result["losses"])
    result["worst_gradient_error"] = max(row["gradient_error"] for row in result["losses"])
    command = "make bench-algorithms"
    result["conditions"] = conditions(began, list(range(options.cases)), ["torch", "transformers"], command)
    # What is measured elsewhere, and what was left out now, stays.
    kept = json.loads(options.results.read_text()) if options.results.is_file() else {}
    options.results.write_text(json.dumps(kept | result, indent=2) + "\n")
    _print(result)
    return result


def losses(cases: int) -> list[dict[str, Any]]:
    """``name``, ``value_error``, ``gradient_error``: the largest over all cases."""
    rows = []
    for reference in REFERENCES:
        errors = [reference.errors(make_case(seed)) for seed in range(cases)]
        rows.append(_row(reference.name, "naive code", errors))
    recorded = [row for row in trl.RECORDED["rows"] if row["settings"]["name"] in PRESETS]
    return rows + [_row(row["name"], "TRL 1.16", [trl.errors(row)]) for row in recorded]


def _row(name: str, against: str, errors: list[tuple[float, float]]) -> dict[str, Any]:
    value, gradient = (max(each) for each in zip(*errors, strict=True))
    return {"name": name, "against": against, "value_error": value, "gradient_error": gradient, "cases": len(errors)}


def curves() -> list[dict[str, Any]]:
    """``name``, ``rewards``: the mean before each step."""
    with tempfile.TemporaryDirectory(prefix="streamrl-algorithms-") as scratch:
        policy = learning.save_bandit(Path(scratch) / "policy")
        first, learner = learning.rewards_while_learning(policy, learning.settings_of("grpo", policy))
        teacher = Path(scratch) / "teacher"
        learner.model.save_pretrained(teacher)
        rest = {
            name: learning.rewards_while_learning(policy, learning.settings_of(name, teacher))[0]
            for name in PRESETS
            if name != "grpo"
        }
        return [
            {"name": name, "rewards": [round(reward, 4) for reward in rewards]}
            for name, rewards in ({"grpo": first} | rest).items()
        ]


def _print(result: dict[str, Any]) -> None:
    for row in result["losses"]:
        print(f"{row['name']:<32} {row['against']:<12} {row['value_error']:.1e} {row['gradient_error']:.1e}")
    for curve in result["curves"]:
        print(f"{curve['name']:<32} reward {curve['rewards'][0]:.2f} -> {curve['rewards'][-1]:.2f}")
    for row in result.get("graders", ()):
        print(f"{row['members']} graders {row['per_s']:>22.1f} completions a second")


if __name__ == "__main__":
    main()
