from typing import Any

import pytest
from pydantic import ValidationError

from streamrl.producers.prompts.settings import DataSettings


def test_a_bare_number_in_a_mixture_is_a_weight() -> None:
    settings = DataSettings.model_validate({"mixture": {"chain_sum": 2, "gcd": {"weight": 1, "options": {"x": 1}}}})
    assert settings.parts["chain_sum"].weight == 2.0
    assert settings.parts["gcd"].options == {"x": 1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "expected exactly one of data.path .*, got none"),
        ({"dataset": "gcd", "mixture": {"lcm": 1}}, "got data.dataset and data.mixture"),
        ({"dataset": "gcd", "path": "a.jsonl"}, "got data.path and data.dataset"),
        ({"path": "a.jsonl", "options": {"a": 1}}, "no data.options with data.path"),
        ({"path": "a.jsonl", "format": "ver"}, "format"),
        ({"dataset": "gcd", "options": {"seed": 1}}, "directly in \\[data\\]"),
        ({"mixture": {"gcd": {"options": {"size": 1}}}}, "always 10,000 prompts"),
        ({"dataset": "gcd", "prompt_template": "Q:"}, "prompt_template"),
        ({"dataset": "gcd", "prompt_template": "{prompt} Use \\boxed{{}}."}, "single braces .* got '{{}}'"),
        ({"dataset": "gcd", "filter": "no_colon"}, "filter"),
        ({"dataset": "../up"}, "dataset"),
        ({"path": "a.csv", "prompt_column": "q", "answer_column": "q"}, "got the prompt's column 'q'"),
        ({"mixture": {"gcd": 0}}, "greater than 0"),
        ({"mixture": {"gcd": 1}, "options": {"a": 1}}, "inside each data set of data.mixture"),
        (
            {"dataset": "gcd", "chat_template_kwargs": {"tokenize": True}},
            "template, got arguments of apply_chat_template: tokenize",
        ),
    ],
)
def test_contradictory_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataSettings.model_validate(values)


def test_settings_survive_a_round_trip_through_plain_values() -> None:
    settings = DataSettings.model_validate({"mixture": {"gcd": 3}, "system_prompt": "Be brief."})
    assert DataSettings.model_validate(settings.model_dump(mode="json")) == settings
