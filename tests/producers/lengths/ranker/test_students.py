from pathlib import Path

import pytest

from producers.lengths.estimators import Completion
from producers.lengths.learned.model import load_newest
from producers.lengths.learned.predictor import LearnedLengths
from producers.lengths.model_store import newest_whole
from producers.lengths.ranker import LanguageStudent, Student, TreeStudent, build_student
from producers.lengths.settings import LengthSettings
from schemas.errors import SettingsError
from schemas.settings import LoopSettings
from tests.producers.lengths.language_model.tiny import save_tiny
from tests.producers.lengths.policy import prompt_of, typical

LOOP = LoopSettings(max_completion_length=2000)


def _settings(folder: Path, predictor: str, **more: object) -> LengthSettings:
    return LengthSettings.model_validate(
        {"predictor": predictor, "refit": "process", "model_dir": folder, "learn_after": 64, "refit_every": 64}
        | {"memory": 256, "refit_seconds": 0.3}
        | more
    )


def _teach(student: Student, count: int, start: int = 0) -> None:
    for index in range(start, start + count):
        prompt = prompt_of(index)
        student.observe(Completion(prompt, f"g/{index}", round(typical(prompt)), version=index))
        student.wait()


def test_trees_are_written_in_versions_that_a_predictor_takes(tmp_path: Path) -> None:
    settings = _settings(tmp_path, "learned")
    student = build_student(settings, LOOP)
    assert isinstance(student, TreeStudent)
    _teach(student, 130)
    newest = load_newest(tmp_path)
    assert newest is not None
    assert (newest[0].version, newest[0].policy_version) == (2, 127)
    assert LearnedLengths(settings, LOOP).predict(prompt_of(999)).predictor == "learned/v2"


def test_a_language_model_is_refreshed_in_versions_that_a_predictor_takes(tmp_path: Path) -> None:
    settings = _settings(tmp_path / "models", "language_model", base_model=save_tiny(tmp_path / "base"))
    student = build_student(settings, LOOP)
    assert isinstance(student, LanguageStudent)
    _teach(student, 64)
    first = newest_whole(tmp_path / "models")
    _teach(student, 64, start=64)
    second = newest_whole(tmp_path / "models")
    assert first is not None
    assert second is not None
    assert (first[1].version, second[1].version, second[1].policy_version) == (1, 2, 127)
    assert second[1].scale == first[1].scale
    assert LearnedLengths(settings, LOOP).predict(prompt_of(999)).predictor == "language_model/v2"


@pytest.mark.parametrize("predictor", ["learned", "language_model"])
def test_while_held_no_version_is_made(tmp_path: Path, predictor: str) -> None:
    student = build_student(_settings(tmp_path / "m", predictor, base_model=save_tiny(tmp_path / "base")), LOOP)
    student.hold(True)
    _teach(student, 200)
    assert not (tmp_path / "m").exists()
    student.hold(False)
    _teach(student, 1, start=200)
    assert len(list((tmp_path / "m").iterdir())) == 1


def test_a_failing_student_goes_on_and_leaves_the_newest_version(tmp_path: Path) -> None:
    base, folder = save_tiny(tmp_path / "base"), tmp_path / "models"
    student = build_student(_settings(folder, "language_model", base_model=base), LOOP)
    _teach(student, 64)
    (folder / "language-00000001" / "config.json").write_text("{}")
    for path in base.iterdir():
        path.unlink()
    _teach(student, 128, start=64)
    assert [path.name for path in folder.iterdir()] == ["language-00000001"]


def test_a_closed_student_gives_up_the_version_under_way(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    student = build_student(_settings(tmp_path / "m", "language_model", base_model=base, refit_seconds=60), LOOP)
    student.close()
    _teach(student, 64)
    assert not (tmp_path / "m").exists()


def test_without_a_model_to_start_from_the_ranker_says_so(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="base_model"):
        build_student(_settings(tmp_path, "language_model"), LOOP)
    with pytest.raises(SettingsError, match="constant"):
        build_student(LengthSettings(predictor="constant"), LOOP)
