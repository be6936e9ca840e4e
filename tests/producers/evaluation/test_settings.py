from pathlib import Path

import pytest

from streamrl.deploy.wiring.model_card import model_card
from streamrl.settings.layers import from_arguments
from tests.consumers.training.checkpoints.damaged_storage import manifest_of
from tests.deploy.wiring.test_model_card import evaluate, settings_of


@pytest.mark.parametrize("text", ["007", "1e5", "inf", "true", "2026-11-30", "[1]"])
def test_the_path_of_a_held_out_set_is_kept_as_written(text: str) -> None:
    held_out = from_arguments([f"--evaluation.data.math.path={text}"])
    assert held_out == {"evaluation": {"data": {"math": {"path": text}}}}


def test_a_model_card_names_the_conditions_of_an_evaluation(tmp_path: Path) -> None:
    evaluate(tmp_path, {"1-0": 0.25, "1-20": 0.5})
    held_out = {"data": {"held_out": {"path": "openai/gsm8k", "split": "test"}}, "samples": 2}
    card = model_card(settings_of(tmp_path, evaluation=held_out), manifest_of(1, 20))
    assert (
        "Conditions: 64 prompts of held_out, 2 samples of each, temperature 1. "
        "Evaluated before this checkpoint (step 20) was written."
    ) in card.splitlines()
