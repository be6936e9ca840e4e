from typing import Any

import pytest

from streamrl.producers.prompts.sources import load_filter
from streamrl.schemas.errors import DataError, SettingsError


def fails(entry: dict[str, Any]) -> bool:
    return bool(entry["no such column"])


def test_without_a_filter_every_entry_is_accepted() -> None:
    assert load_filter(None)({})


def test_a_filter_that_fails_is_named() -> None:
    with pytest.raises(DataError, match=r"test_filtering:fails.*KeyError"):
        load_filter(f"{__name__}:fails")({})


def test_a_filter_that_cannot_be_loaded_is_a_settings_error() -> None:
    with pytest.raises(SettingsError):
        load_filter(f"{__name__}:nothing")
