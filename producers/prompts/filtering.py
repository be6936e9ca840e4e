"""The user's filter over entries, with its failures turned into one-line errors."""

from collections.abc import Callable
from typing import Any

from schemas.errors import DataError
from schemas.import_path import load_function

Filter = Callable[[dict[str, Any]], bool]


def load_filter(path: str | None) -> Filter:
    """The function behind ``data.filter``; without one, every entry is accepted.

    Raises:
        SettingsError: it cannot be loaded.
    """
    if path is None:
        return lambda entry: True
    function = load_function(path)

    def accepts(entry: dict[str, Any]) -> bool:
        try:
            return bool(function(entry))
        except Exception as error:
            raise DataError(f"expected true or false from data.filter {path}, got {error!r}") from error

    return accepts
