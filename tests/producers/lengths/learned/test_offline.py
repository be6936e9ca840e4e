import math
import random
from pathlib import Path

import pytest

from streamrl.producers.lengths.learned.language_model import FineTuning
from streamrl.producers.lengths.learned.offline import fit_language_model, fit_trees, split
from streamrl.producers.lengths.learned.predictor import LearnedLengths
from streamrl.producers.lengths.predictor import ObservedCompletion
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.schemas.errors import DataError
from streamrl.schemas.settings import LoopSettings
from tests.producers.lengths.learned.policy import prompt_of, typical
from tests.producers.lengths.learned.tiny import save_tiny


def _completions(count: int) -> list[ObservedCompletion]:
    rng = random.Random(0)
    return [
        ObservedCompletion(
            prompt, f"{index}/0", max(1, round(typical(prompt) * math.exp(rng.gauss(0, 0.2)))), version=3
        )
        for index in range(count)
        for prompt in [prompt_of(index)]
        for _ in range(4)
    ]


def test_a_prompt_is_fitted_or_held_out() -> None:
    train, test = split(_completions(500), 0.3)
    assert not {one.prompt.prompt_id for one in train} & {one.prompt.prompt_id for one in test}
    assert len(test) / 2000 == pytest.approx(0.3, abs=0.05)
    assert split(_completions(500), 0.0)[1] == []


def test_trees_are_scored_on_held_out_prompts_and_a_run_starts_warm_with_them(tmp_path: Path) -> None:
    fitted = fit_trees(_completions(500), tmp_path, 0.9, 0.2)
    ours, constant = fitted.scores["learned"]["all"], fitted.scores["constant"]["all"]
    assert ours.recall[0] is not None
    assert ours.recall[0] > 0.8
    assert constant.recall[0] == pytest.approx(0.2, abs=0.01)
    assert 0.8 < ours.coverage < 0.98
    assert set(fitted.scores["learned"]) == {"all", "sort", "spell"}
    settings = LengthSettings(predictor="learned", model_dir=tmp_path, refit="off")
    assert LearnedLengths(settings, LoopSettings()).predict(prompt_of(9999)).predictor == "learned/v1"
    assert fit_trees(_completions(500), tmp_path, 0.9, 0.2).version == 2


def test_a_language_model_is_fine_tuned_and_scored_on_held_out_prompts(tmp_path: Path) -> None:
    tuning = FineTuning(epochs=4)
    fitted = fit_language_model(_completions(120), save_tiny(tmp_path / "base"), tmp_path / "m", 0.9, 0.2, tuning)
    recall, baseline = (fitted.scores[who]["all"].recall[0] for who in ("language_model", "constant"))
    assert recall is not None
    assert baseline is not None
    assert recall > baseline + 0.3
    settings = LengthSettings(predictor="language_model", model_dir=tmp_path / "m", refit="off")
    predictor = LearnedLengths(settings, LoopSettings())
    assert predictor.predict(prompt_of(9999)).predictor == "language_model/v1"


def test_too_little_to_fit_to_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="completions"):
        fit_trees(_completions(10), tmp_path, 0.9, 0.2)
