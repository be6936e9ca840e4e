import re
from pathlib import Path

import pytest

from streamrl.producers.grading.settings import GradedRewards
from streamrl.settings.features import ChildProcess, features
from streamrl.settings.loading import validated
from streamrl.settings.tree import Settings
from tests.deploy.wiring.roles import role_settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return role_settings(tmp_path)


def test_graders_are_started_where_rewards_are_graded_and_kept_alive_as_workers_are(settings: Settings) -> None:
    tree = settings.model_dump(mode="json", exclude_none=True)
    rewards = {"functions": ["format"], "graded": ["format"], "graders": 2}
    graders = [
        one for feature in features() for one in feature.processes.started(validated(tree | {"rewards": rewards}))
    ]
    assert graders == [ChildProcess(name, "grader", ("--id", name)) for name in ("grader-0", "grader-1")]


def test_graded_functions_are_some_of_the_functions() -> None:
    settings = GradedRewards(functions=("format", "my:judge", "exact_match"), graded=("my:judge",))
    assert (settings.graded_names, settings.worker_names) == (("judge",), ("format", "exact_match"))
    with pytest.raises(ValueError, match=re.escape("rewards.graded to name some of rewards.functions, got ['nobody']")):
        GradedRewards(functions=("format",), graded=("nobody",))
