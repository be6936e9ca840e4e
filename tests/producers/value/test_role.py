from typing import Any

import pytest

from streamrl.producers.dispatch.choosing import EveryPrompt
from streamrl.producers.value.chooser import ValuedPrompts
from streamrl.producers.value.settings import ValuedDispatch
from streamrl.schemas.errors import SettingsError
from streamrl.settings.features import prompt_chooser
from streamrl.settings.loading import load_settings, validated
from streamrl.settings.tree import Settings

TREE = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"path": "p.jsonl"}}


def of(algorithm: dict[str, Any], dispatch: dict[str, Any]) -> Settings:
    return validated(TREE | {"algorithm": algorithm, "dispatch": dispatch})


@pytest.mark.parametrize(
    ("algorithm", "dispatch", "is_on"),
    [
        ({}, {}, False),
        ({"name": "dapo"}, {}, True),
        ({"dynamic_sampling": True}, {"repack": False}, True),
        ({"name": "dapo", "dynamic_sampling": False}, {}, False),
        ({"name": "dapo"}, {"value": False}, False),
        ({}, {"value": True}, True),
    ],
)
def test_prompts_are_valued_where_groups_without_advantage_are_discarded_unless_it_is_set(
    algorithm: dict[str, Any], dispatch: dict[str, Any], is_on: bool
) -> None:
    settings = of(algorithm, dispatch)
    assert settings.section(ValuedDispatch).value == is_on
    assert isinstance(prompt_chooser(settings)(), ValuedPrompts if is_on else EveryPrompt)


def test_history_without_values_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"dispatch\.value_history"):
        load_settings(None, ['--dispatch.value_history=["earlier"]'], TREE)


def test_history_is_of_names_of_runs() -> None:
    with pytest.raises(SettingsError, match=r"expected names of runs .* got 'a/b'"):
        of({}, {"value": True, "value_history": ["a/b"]})
