from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from producers.lengths.learned.features import ROW_WIDTH
from producers.lengths.learned.model import KEPT_FILES, Forest, LengthModel, load, load_newest, save
from schemas.errors import MalformedFrame

LEVELS = {"a": (3.5, 200)}


def _model(version: int = 1) -> LengthModel:
    """Two stumps: feature 3 at most 1.5, or above."""
    forest = Forest(
        feature=np.array([3, 0, 0, 3, 0, 0], np.int32),
        threshold=np.array([1.5, 0, 0, 1.5, 0, 0]),
        children=np.array([1, 2, 1, 1, 2, 2, 4, 5, 4, 4, 5, 5], np.int32),
        value=np.array([0, -1.0, 1.0, 0, -0.5, float(version)]),
        roots=np.array([[0], [3]], np.int32),
        depth=1,
    )
    return LengthModel(forest, version, policy_version=7, observations=512)


def test_a_saved_model_predicts_the_same_when_loaded(tmp_path: Path) -> None:
    saved = _model()
    loaded, levels = load(save(saved, LEVELS, tmp_path))
    row = np.full(ROW_WIDTH, 2, np.float32)
    assert np.array_equal(loaded.forest.predict(row), saved.forest.predict(row))
    assert (loaded.version, loaded.policy_version, loaded.observations, levels) == (1, 7, 512, LEVELS)


def test_the_newest_is_loaded_and_only_the_last_few_are_kept(tmp_path: Path) -> None:
    for version in range(1, 8):
        save(_model(version), LEVELS, tmp_path)
    assert len(list(tmp_path.iterdir())) == KEPT_FILES
    newest = load_newest(tmp_path)
    assert newest is not None
    assert newest[0].version == 7


def test_a_file_that_cannot_be_used_gives_way_to_the_one_before(tmp_path: Path) -> None:
    save(_model(1), LEVELS, tmp_path)
    whole = save(_model(2), LEVELS, tmp_path).read_bytes()
    (tmp_path / "lengths-00000003.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "lengths-00000004.safetensors").write_bytes(b"")
    newest = load_newest(tmp_path)
    assert newest is not None
    assert newest[0].version == 2


def test_a_folder_that_is_not_there_has_no_model(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("harm", ["loop", "type", "about"])
def test_a_file_with_other_content_is_refused(tmp_path: Path, harm: str) -> None:
    path = save(_model(), LEVELS, tmp_path)
    arrays = load_file(path)
    about = '{"layout":1,"depth":1,"version":1,"policy_version":0,"observations":1,"levels":{}}'
    if harm == "loop":
        arrays["children"][2] = 0
    if harm == "type":
        arrays["value"] = arrays["value"].astype(np.float32)
    save_file(arrays, path, {"about": about if harm != "about" else about.replace('"layout":1', '"layout":99')})
    with pytest.raises(MalformedFrame):
        load(path)
