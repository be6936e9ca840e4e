"""Fixtures that every test may ask for, the one that every test has, and the order and places of all tests."""

from collections.abc import Iterator
from typing import Any

import pytest
import structlog

pytest_plugins = ["tests.broker_fixture", "tests.inspection.living_run"]

TOGETHER = (
    # They wait most of the time, and in several processes each would start a broker.
    ("tests/faults/",),
    # They share the records on the broker, and the trainer that nobody disturbed.
    ("tests/chaos/crashing/test_crash_points.py",),
    # They look at one run.
    ("tests/pipeline/test_traced_run.py", "tests/pipeline/test_emulated_run.py::test_the_whole_pipeline"),
    # They look at one recorded run, or at what one training left.
    ("tests/inspection/replay/",),
    ("tests/inspection/report/commands/",),
    ("tests/consumers/training/test_protocol.py",),
    ("tests/producers/lengths/test_learning.py",),
    ("tests/producers/lengths/language_model/",),
    ("tests/benchmarks/lengths/",),
    # They look at one page in one browser, or at one server.
    ("tests/inspection/dashboard/test_page.py",),
    ("tests/inspection/dashboard/test_server.py",),
    ("tests/inspection/report/test_page.py",),
    ("tests/inspection/charts/test_drawing.py",),
    # They need the pretrained model, which the first converts where none did before.
    ("tests/producers/generation/engines/test_real_model.py", "tests/streamrl/init/test_smollm2.py"),
    # They parse all sources once.
    ("tests/architecture/test_budgets.py", "tests/architecture/test_import_layers.py"),
)
"""Tests that share what is dear to make, by how their ids begin: one process of xdist gets all of a line."""


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that a test calls may configure the logs of this process."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first: started last, one of them would keep a single process busy after the others are done."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests are dealt out one by one, except those of ``TOGETHER``.

    xdist's own marker for that does nothing with pytest 9.2: it changes an attribute that ids are not made of.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Together(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return next((line[0] for line in TOGETHER if nodeid.startswith(line)), nodeid)

    return Together(config, log)
