"""Every loss of the shelf against independent ones, and what each algorithm teaches a model of some 3,000 parameters.

The references are naive loops over tokens and what TRL recorded, as the tests have them; the largest difference over
some seeded batches stands in the result. The curves are the mean reward, step by step, of a model that is paid for one
token.
"""

import tempfile
from pathlib import Path
from typing import Any

from streamrl.consumers.algorithms.settings import PRESETS
from tests.consumers.algorithms import test_trl as trl
from tests.consumers.algorithms.naive import make_case
from tests.consumers.algorithms.references import REFERENCES
from tests.consumers.training import test_learning as learning


def measured(cases: int) -> dict[str, Any]:
    """``losses``, ``curves``, and the worst errors of all."""
    rows, learnt = losses(cases), curves()
    for row in rows:
        print(f"{row['name']:<32} {row['against']:<12} {row['value_error']:.1e} {row['gradient_error']:.1e}")
    for curve in learnt:
        print(f"{curve['name']:<32} reward {curve['rewards'][0]:.2f} -> {curve['rewards'][-1]:.2f}")
    return {
        "losses": rows,
        "curves": learnt,
        "worst_value_error": max(row["value_error"] for row in rows),
        "worst_gradient_error": max(row["gradient_error"] for row in rows),
    }


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
