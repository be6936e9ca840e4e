from pathlib import Path

from streamrl.settings.features import ChildProcess, features
from streamrl.settings.loading import validated
from tests.deploy.wiring.roles import role_settings


def test_a_ranker_is_started_only_when_wanted_and_the_run_goes_on_without_it(tmp_path: Path) -> None:
    tree = role_settings(tmp_path).model_dump(mode="json", exclude_none=True)
    wanted = {"predictor": "learned", "refit": "process", "model_dir": str(tmp_path / "models")}
    for lengths, expected in (({}, []), (wanted, [ChildProcess("ranker", "ranker", optional=True)])):
        settings = validated(tree | {"lengths": lengths})
        assert [one for feature in features() for one in feature.processes.started(settings)] == expected
