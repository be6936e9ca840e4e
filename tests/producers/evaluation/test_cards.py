"""Held-out sets in settings, and their results on model cards."""

import json
from pathlib import Path

import pytest

from streamrl.deploy.wiring.model_card import model_card
from streamrl.schemas.evaluation import EVALUATED, PROMPTS
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.settings.layers import from_arguments
from tests.consumers.training.checkpoints.damaged_storage import manifest_of
from tests.deploy.wiring.test_model_card import settings_of

HELD_OUT = {"data": {"held_out": {"path": "openai/gsm8k", "split": "test"}}, "samples": 2}


@pytest.mark.parametrize("text", ["007", "1e5", "59e123456789", "inf", "true", "2026-11-30", "[1]", "{a = 1}"])
def test_the_path_of_a_held_out_set_is_kept_as_written(text: str) -> None:
    held_out = from_arguments([f"--evaluation.data.math.path={text}"])
    assert held_out == {"evaluation": {"data": {"math": {"path": text}}}}


def evaluate(directory: Path, results: dict[str, float]) -> None:
    """The lines of the evaluator, by version; a step's line stands between them."""
    (directory / "mine").mkdir()
    lines = [
        {
            "step": PolicyVersion.parse(version).number,
            "time": 1.0,
            EVALUATED: version,
            PROMPTS: 64,
            "eval/pass@1": value,
        }
        for version, value in results.items()
    ]
    text = "".join(json.dumps(line) + "\n" for line in [*lines, {"step": 1, "time": 1.0, "reward": 0.5}])
    (directory / "mine" / "metrics.jsonl").write_text(text + f'{{"{EVALUATED}": "1-')


def test_a_model_card_has_the_results_and_their_conditions(tmp_path: Path) -> None:
    evaluate(tmp_path, {"1-0": 0.25, "1-20": 0.5})
    card = model_card(settings_of(tmp_path, evaluation=HELD_OUT), manifest_of(1, 20))
    for line in (
        "| pass@1 at step 0 | 0.250 |",
        "| pass@1 at step 20 | 0.500 |",
        "Conditions: 64 prompts of held_out, 2 samples of each, temperature 1. "
        "Evaluated before this checkpoint (step 20) was written.",
    ):
        assert line in card.splitlines(), line


def test_a_card_has_no_result_of_weights_that_a_crash_undid(tmp_path: Path) -> None:
    evaluate(tmp_path, {"1-0": 0.25, "1-20": 0.5, "1-30": 0.9, "2-25": 0.6, "2-40": 0.7})
    text = model_card(settings_of(tmp_path, evaluation=HELD_OUT), manifest_of(2, 35, PolicyVersion(1, 22)))
    assert "| pass@1 at step 25 | 0.600 |" in text
    assert "0.900" not in text
    assert "0.700" not in text
