import json

import pytest

from streamrl.schemas.errors import SettingsError
from streamrl.settings.explaining import explain, schema
from streamrl.settings.first import first_keys
from streamrl.settings.keys import known_keys


def test_every_setting_can_be_explained() -> None:
    for key in known_keys():
        assert explain(key)[0] == key


def test_a_setting_says_what_it_may_be_and_where_to_set_it() -> None:
    assert explain("loop.max_staleness")[2:] == [
        "  integer >= 0; default 4",
        "  set it as max_staleness in [loop], STREAMRL_LOOP__MAX_STALENESS, or --loop.max_staleness",
    ]
    assert explain("data.seed")[2] == "  integer >= 0 or none; default none"
    assert '"trl", "verl", "openrlhf"; default "trl"' in explain("data.format")[2]


def test_the_first_settings_exist_and_are_few_and_all_others_are_advanced() -> None:
    first = list(first_keys())
    assert len(first) == len(set(first)) <= 40
    assert set(first) <= set(known_keys())
    for key in known_keys():
        assert ("  advanced: most runs keep the default" in explain(key)) == (key not in first), key


def test_a_section_lists_its_settings() -> None:
    lines = explain("batching")
    assert lines[0] == "[batching]"
    assert any(line.startswith("  token_budget ") for line in lines)


def test_a_table_is_one_setting_and_lists_its_fields() -> None:
    tables = ["emulation.decode", "emulation.lengths", "emulation.training"]
    assert [key for key in known_keys() if key.startswith("emulation.")][2:] == tables
    lines = explain("emulation.decode")
    assert any(line.startswith("  step_s ") for line in lines)
    assert lines[-1] == "  set its fields in [emulation.decode], or as --emulation.decode.FIELD"
    assert explain("emulation.decode.step_s")[2] == "  number > 0; default 0.01"
    assert {"emulation.decode.step_s", "loop.mode"} <= {*known_keys(in_tables=True)}


def test_an_unknown_setting_is_answered_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"did you mean training\.learning_rate\?"):
        explain("training.lr")


def test_the_schema_is_plain_json_and_closed() -> None:
    tree = json.loads(json.dumps(schema()))
    assert tree["additionalProperties"] is False
    assert "loop" in tree["properties"]
