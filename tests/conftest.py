"""Fixtures that every test may ask for, the one that every test has, and the order of all tests."""

from collections.abc import Iterator

import pytest
import structlog

pytest_plugins = ["tests.broker_fixture", "tests.inspection.living_run"]


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that a test calls may configure the logs of this process."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first: started last, one of them would keep a single process busy after the others are done."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
