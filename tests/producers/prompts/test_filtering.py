from typing import Any

import pytest

from streamrl.producers.prompts.sources import load_filter
from streamrl.schemas.errors import DataError, SettingsError


def fails(entry: dict[str, Any]) -> bool:
    return bool(entry["no such column"])


def words(entry: dict[str, Any]) -> str:
    return "no"


def changes(entry: dict[str, Any]) -> bool:
    entry["answer"] = entry["answer"].strip()
    return True


def adds(entry: dict[str, Any]) -> bool:
    entry["level"] = 1
    return True


@pytest.mark.parametrize(
    ("function", "reason"), [("words", "got a text: no"), ("changes", "it only chooses"), ("adds", "it only chooses")]
)
def test_a_filter_chooses_and_does_nothing_else(function: str, reason: str) -> None:
    with pytest.raises(DataError, match=rf"test_filtering:{function}.*{reason}"):
        load_filter(f"{__name__}:{function}")({"answer": " 7"})


def test_without_a_filter_every_entry_is_accepted() -> None:
    assert load_filter(None)({})


def test_a_filter_that_fails_is_named() -> None:
    with pytest.raises(DataError, match=r"test_filtering:fails.*KeyError"):
        load_filter(f"{__name__}:fails")({})


def test_a_filter_that_cannot_be_loaded_is_a_settings_error() -> None:
    with pytest.raises(SettingsError):
        load_filter(f"{__name__}:nothing")
