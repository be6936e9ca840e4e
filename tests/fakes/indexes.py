"""Indexes of records that a test makes in memory, closed at its end: from 3.13 on Python warns of one that is not."""

from collections.abc import Iterator

import pytest

from streamrl.observability.record_index.store import RecordIndex


@pytest.fixture(autouse=True)
def indexes_in_memory_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those of files are left to their owners, who are to close them."""
    opened = list[RecordIndex]()
    make = RecordIndex.__init__

    def noted(self: RecordIndex, path: object) -> None:
        make(self, path)  # type: ignore[arg-type]
        if path is None:
            opened.append(self)

    monkeypatch.setattr(RecordIndex, "__init__", noted)
    yield
    for index in opened:
        index.close()
