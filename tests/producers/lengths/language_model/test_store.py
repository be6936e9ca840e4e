import os
from pathlib import Path

import pytest

from producers.lengths.language_model import open_regressor
from producers.lengths.model_store import KEPT, MANIFEST, Manifest, load, load_newest, newest_whole, next_version, save
from schemas.errors import MalformedFrame
from schemas.trajectories import Prompt
from tests.producers.lengths.language_model.tiny import save_tiny

PROMPT = Prompt(prompt_id="p", dataset="a", content="Sort these 7 numbers.")


def _about(version: int) -> Manifest:
    return Manifest(version=version, policy_version=4, observations=9, scale=0.5, levels={"a": (3.0, 40)})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base"))


def test_a_saved_model_predicts_the_same_when_loaded(base: Path, tmp_path: Path) -> None:
    regressor = open_regressor(base)
    model, levels = load(save(regressor, _about(1), tmp_path))
    ((median, upper),) = regressor.score([PROMPT.text])
    assert model.quantiles(PROMPT) == pytest.approx((median * 0.5, upper * 0.5))
    assert (model.name, model.policy_version, model.observations) == ("language_model/v1", 4, 9)
    assert levels == {"a": (3.0, 40)}


def test_the_newest_is_loaded_and_only_the_last_few_are_kept(base: Path, tmp_path: Path) -> None:
    for version in range(1, KEPT + 3):
        save(open_regressor(base), _about(version), tmp_path)
    assert len(list(tmp_path.iterdir())) == KEPT
    newest = load_newest(tmp_path)
    assert newest is not None
    assert newest[0].version == KEPT + 2
    assert load_newest(tmp_path, newer_than=KEPT + 2) is None


@pytest.mark.parametrize("harm", [MANIFEST, "head.safetensors", "model.safetensors"])
def test_a_version_is_whole_or_not_there(base: Path, tmp_path: Path, harm: str) -> None:
    """One that was harmed gives way to the one before, and its number is not used again."""
    save(open_regressor(base), _about(1), tmp_path)
    second = save(open_regressor(base), _about(2), tmp_path)
    os.truncate(second / harm, 10)
    with pytest.raises(MalformedFrame):
        load(second)
    newest, whole = load_newest(tmp_path), newest_whole(tmp_path)
    assert newest is not None
    assert whole is not None
    assert (newest[0].version, whole[1].version, next_version(tmp_path)) == (1, 1, 3)


def test_a_version_that_was_not_finished_is_not_seen(base: Path, tmp_path: Path) -> None:
    class _Full(type(open_regressor(base))):  # type: ignore[misc]
        def save(self, folder: Path) -> None:
            (folder / "model.safetensors").write_bytes(b"half")
            raise OSError("no space left")

    regressor = open_regressor(base)
    regressor.__class__ = _Full
    with pytest.raises(OSError, match="space"):
        save(regressor, _about(1), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert next_version(tmp_path / "nowhere") == 1
