import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from streamrl.producers.lengths.learned.features import ROW_WIDTH
from streamrl.producers.lengths.learned.model import FOREST, KIND, Forest, LengthModel, load, load_newest, save
from streamrl.producers.lengths.learned.model_store import ModelStore, read_manifest
from streamrl.schemas.errors import MalformedFrame

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
    path = save(saved, LEVELS, tmp_path)
    loaded, levels = load(path, read_manifest(path))
    row = np.full(ROW_WIDTH, 2, np.float32)
    assert np.array_equal(loaded.forest.predict(row), saved.forest.predict(row))
    assert (loaded.version, loaded.policy_version, loaded.observations, levels) == (1, 7, 512, LEVELS)


@pytest.mark.parametrize("harm", ["loop", "type", "layout"])
def test_trees_of_another_shape_give_way_to_the_version_before(tmp_path: Path, harm: str) -> None:
    """Files that are as they were written, by somebody who writes something else."""
    save(_model(1), LEVELS, tmp_path)
    second = save(_model(2), LEVELS, tmp_path)
    arrays, manifest = load_file(second / FOREST), read_manifest(second)
    shutil.rmtree(second)
    if harm == "loop":
        arrays["children"][2] = 0
    if harm == "type":
        arrays["value"] = arrays["value"].astype(np.float32)
    if harm == "layout":
        manifest = manifest.model_copy(update={"details": manifest.details | {"layout": 99}})
    ModelStore(tmp_path, KIND).save(manifest, lambda folder: save_file(arrays, folder / FOREST))
    with pytest.raises(MalformedFrame):
        load(second, read_manifest(second))
    newest = load_newest(tmp_path)
    assert newest is not None
    assert newest[0].version == 1
