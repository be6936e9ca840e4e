"""Environments as inputs of a run."""

from pathlib import Path
from typing import Any

import pytest

from streamrl.deploy.local.inputs import inputs_of, task_of
from streamrl.settings.loading import validated


def task(**environments: Any) -> dict[str, str]:
    settings = validated(
        {
            "data": {"requests_only": True},
            "model": {"path": "m"},
            "gateway": {"enabled": True},
            "environments": {"names": ["house_games:Chess", "guess"]} | environments,
        }
    )
    return task_of(settings, inputs_of(settings))


def test_the_code_and_the_options_of_environments_say_what_their_episodes_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    code = tmp_path / "house_games.py"
    code.write_text("class Chess: ...\n")
    before = task()
    own, shipped = "environment house_games:Chess", "environment guess"
    assert {own, shipped} <= before.keys()
    code.write_text("class Chess:\n    board = 8\n")
    after = task()
    assert {name for name in after if after[name] != before[name]} == {own}
    assert task(options={"guess": {"most": 3}})[shipped] != after[shipped]
    assert task(max_concurrent=3) == after
