from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from streamrl.producers.lengths.learned.model import load_newest
from streamrl.producers.lengths.learned.model_store import ModelStore
from streamrl.producers.lengths.learned.model_updates import FitRules
from streamrl.producers.lengths.learned.predictor import LearnedLengths
from streamrl.producers.lengths.learned.ranker import (
    LanguageModelTrainer,
    ModelTrainer,
    TreeTrainer,
    build_model_trainer,
)
from streamrl.producers.lengths.predictor import ObservedCompletion
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.schemas.errors import SettingsError
from streamrl.schemas.settings import LoopSettings
from tests.producers.lengths.learned.policy import prompt_of, typical
from tests.producers.lengths.learned.tiny import save_tiny

LOOP = LoopSettings(max_completion_length=2000)


RULES = FitRules(min_samples=64, refit_every=64, reservoir_size=256, refit_s=0.3)


def _settings(folder: Path, predictor: str, **more: object) -> LengthSettings:
    return LengthSettings.model_validate({"predictor": predictor, "refit": "process", "model_dir": folder} | more)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"predictor": "language_model"}, "expected lengths.model_dir .* language_model and refit .*, got none"),
        ({"predictor": "learned", "refit": "process"}, "expected lengths.model_dir .* learned and refit process"),
        ({"refit": "process", "model_dir": "m"}, "learned or language_model .*refit process, got observed_quantiles"),
    ],
)
def test_a_model_that_is_fitted_elsewhere_needs_a_place(values: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LengthSettings.model_validate(values)


def _teach(trainer: ModelTrainer, count: int, start: int = 0) -> None:
    for index in range(start, start + count):
        prompt = prompt_of(index)
        trainer.observe(ObservedCompletion(prompt, f"g/{index}", round(typical(prompt)), version=index))
        trainer.wait()


def test_trees_are_written_in_versions_that_a_predictor_takes(tmp_path: Path) -> None:
    settings = _settings(tmp_path, "learned")
    trainer = build_model_trainer(settings, LOOP, RULES)
    assert isinstance(trainer, TreeTrainer)
    _teach(trainer, 130)
    newest = load_newest(tmp_path)
    assert newest is not None
    assert (newest[0].version, newest[0].policy_version) == (2, 127)
    assert LearnedLengths(settings, LOOP, rules=RULES).predict(prompt_of(999)).predictor == "learned/v2"


def test_a_language_model_is_refreshed_in_versions_that_a_predictor_takes(tmp_path: Path) -> None:
    settings = _settings(tmp_path / "models", "language_model", base_model=save_tiny(tmp_path / "base"))
    trainer = build_model_trainer(settings, LOOP, RULES)
    assert isinstance(trainer, LanguageModelTrainer)
    _teach(trainer, 64)
    first = ModelStore(tmp_path / "models", "language").newest()
    _teach(trainer, 64, start=64)
    second = ModelStore(tmp_path / "models", "language").newest()
    assert first is not None
    assert second is not None
    assert (first[1].version, second[1].version, second[1].policy_version) == (1, 2, 127)
    assert second[1].details == first[1].details
    assert LearnedLengths(settings, LOOP, rules=RULES).predict(prompt_of(999)).predictor == "language_model/v2"


@pytest.mark.parametrize("predictor", ["learned", "language_model"])
def test_while_held_no_version_is_made(tmp_path: Path, predictor: str) -> None:
    trainer = build_model_trainer(
        _settings(tmp_path / "m", predictor, base_model=save_tiny(tmp_path / "base")), LOOP, RULES
    )
    trainer.hold(True)
    _teach(trainer, 200)
    assert not (tmp_path / "m").exists()
    trainer.hold(False)
    _teach(trainer, 1, start=200)
    assert len(list((tmp_path / "m").iterdir())) == 1


def test_a_failing_trainer_goes_on_and_leaves_the_newest_version(tmp_path: Path) -> None:
    base, folder = save_tiny(tmp_path / "base"), tmp_path / "models"
    trainer = build_model_trainer(_settings(folder, "language_model", base_model=base), LOOP, RULES)
    _teach(trainer, 64)
    (folder / "language-00000001" / "config.json").write_text("{}")
    for path in base.iterdir():
        path.unlink()
    _teach(trainer, 128, start=64)
    assert [path.name for path in folder.iterdir()] == ["language-00000001"]


def test_a_closed_trainer_gives_up_the_version_under_way(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    settings = _settings(tmp_path / "m", "language_model", base_model=base)
    trainer = build_model_trainer(settings, LOOP, replace(RULES, refit_s=60))
    trainer.close()
    _teach(trainer, 64)
    assert not (tmp_path / "m").exists()


def test_without_a_model_to_start_from_the_ranker_says_so(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="base_model"):
        build_model_trainer(_settings(tmp_path, "language_model"), LOOP)
    with pytest.raises(SettingsError, match="constant"):
        build_model_trainer(LengthSettings(predictor="constant"), LOOP)
