import os
from pathlib import Path

import pytest

from streamrl.producers.lengths.learned.language_model import load, load_newest, open_regressor, save
from streamrl.producers.lengths.learned.model_store import Manifest, read_manifest
from streamrl.schemas.errors import MalformedFrame
from streamrl.schemas.trajectories import Prompt
from tests.producers.lengths.learned.tiny import save_tiny

PROMPT = Prompt(prompt_id="p", dataset="a", content="Sort these 7 numbers.")


def _manifest(version: int) -> Manifest:
    return Manifest(version=version, policy_version=4, observations=9, levels={"a": (3.0, 40)}, details={"scale": 0.5})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base"))


def test_a_saved_model_predicts_the_same_when_loaded(base: Path, tmp_path: Path) -> None:
    regressor = open_regressor(base)
    path = save(regressor, _manifest(1), tmp_path)
    model, levels = load(path, read_manifest(path))
    ((median, upper),) = regressor.score([PROMPT.text])
    assert model.quantiles(PROMPT) == pytest.approx((median * 0.5, upper * 0.5))
    assert (model.name, model.policy_version, model.observations) == ("language_model/v1", 4, 9)
    assert levels == {"a": (3.0, 40)}


@pytest.mark.parametrize("harm", ["head.safetensors", "model.safetensors"])
def test_a_damaged_model_gives_way_to_the_version_before(base: Path, tmp_path: Path, harm: str) -> None:
    save(open_regressor(base), _manifest(1), tmp_path)
    second = save(open_regressor(base), _manifest(2), tmp_path)
    os.truncate(second / harm, 10)
    newest = load_newest(tmp_path)
    assert newest is not None
    assert newest[0].version == 1


def test_a_manifest_without_a_scale_is_refused(base: Path, tmp_path: Path) -> None:
    path = save(open_regressor(base), _manifest(1).model_copy(update={"details": {}}), tmp_path)
    with pytest.raises(MalformedFrame, match="delete it"):
        load(path, read_manifest(path))
