"""Fixtures that every test may ask for, and the one that every test has."""

from collections.abc import Iterator

import pytest
import structlog

pytest_plugins = ["tests.broker_fixture"]


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that a test calls may configure the logs of this process."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
