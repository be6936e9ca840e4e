"""Fixtures that every test may ask for, those that every test has, and the order and places of all tests."""

import gc
import json
import os
import traceback
from asyncio import selector_events
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import structlog

with suppress(ImportError):  # vLLM's environment has none
    import hypothesis

    # How long an example takes to draw depends on what runs beside the tests.
    hypothesis.settings.register_profile(
        "any_machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("any_machine")

# Half a million objects that live to the end come into being until all tests are collected.
gc.disable()

pytest_plugins = [
    "tests.tiers",
    "tests.broker_fixture",
    "tests.pretrained",
    "tests.ended_children",
    "tests.inspection.living_run",
]

TOGETHER = (
    # They start whole runs of a dozen processes: more than two runs at a time would slow one another down to their
    # time-outs.
    ("tests/pipeline/",),
    (
        "tests/chaos/",
        "tests/deploy/compose/test_processes.py",
        "tests/deploy/local/test_fleet.py",
        "tests/deploy/local/test_progress.py",
        "tests/deploy/local/test_refused_start.py",
        "tests/deploy/local/test_savepoints.py",
        "tests/deploy/local/test_shutdown.py",
        "tests/deploy/local/test_watching.py",
        "tests/deploy/local/test_zombies.py",
        "tests/streamrl/test_api.py",
        "tests/inspection/dashboard/test_outage.py",
        "tests/inspection/test_another_cluster.py",
        "tests/bus/embedded/",
    ),
    # They wait most of the time, and in several processes each would start a broker.
    ("tests/faults/",),
    # They look at one recorded run, or at what one training left.
    ("tests/inspection/replay/",),
    ("tests/inspection/report/commands/",),
    ("tests/consumers/training/test_protocol.py",),
    ("tests/producers/lengths/learned/test_learning.py",),
    # They fork ranks off one process.
    ("tests/consumers/training/ranks/",),
    tuple(
        f"tests/producers/lengths/learned/test_{name}.py"
        for name in ("features", "history", "margin", "model", "openmp", "request_order", "reservoir", "tree_fitting")
    ),
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
LONGEST = 3
"""Lines that come first."""
OPT_IN = {
    "compose": ("STREAMRL_TEST_COMPOSE", "a quarter of an hour and a Docker engine: make test-compose"),
    "long": ("STREAMRL_TEST_LONG", "twenty seconds of processor time and more: make test-long"),
}
"""Tests by their mark, the first that they have: the variable that the target sets, and why they are skipped else."""


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that a test calls may configure the logs of this process."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session", autouse=True)
def _connections_name_their_test() -> Iterator[None]:
    """What nobody closed is told when it is collected, which is while another test runs: it says who opened it."""
    transport: Any = selector_events._SelectorTransport  # type: ignore[attr-defined]
    opens, tells = transport.__init__, transport.__repr__

    def open_here(self: Any, *arguments: Any, **options: Any) -> None:
        self.opened_by = f"{os.environ.get('PYTEST_CURRENT_TEST')}: {' < '.join(_callers())}"
        opens(self, *arguments, **options)

    def tell(self: Any) -> str:
        return f"{tells(self)} opened by {self.opened_by}"

    with mock.patch.multiple(transport, __init__=open_here, __repr__=tell):
        yield


def _callers() -> list[str]:
    """Innermost first, without those of asyncio."""
    frames = traceback.StackSummary.extract(traceback.walk_stack(None), limit=40, lookup_lines=False)
    return [f"{Path(each.filename).name}:{each.lineno}" for each in frames if "/asyncio/" not in each.filename][2:8]


def _line_of(nodeid: str) -> int:
    return next((n for n, line in enumerate(TOGETHER) if nodeid.startswith(line)), len(TOGETHER))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Dear lines first, unit tests last: a long one that started last would keep one process busy to the end."""
    for item in items:
        for mark, (variable, reason) in OPT_IN.items():
            if item.get_closest_marker(mark):
                if not os.environ.get(variable):
                    item.add_marker(pytest.mark.skip(reason))
                break
    items.sort(key=lambda item: (min(_line_of(item.nodeid), LONGEST), item.get_closest_marker("unit") is not None))


def pytest_collection_finish() -> None:
    """No later collection of garbage looks at what is there by now."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Writes the ids of failed tests for ``tests.suite``, which runs them once more."""
    if path := os.environ.get("STREAMRL_TEST_FAILED"):
        failed = [report.nodeid for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, ())]
        Path(path).write_text(json.dumps(list(dict.fromkeys(failed))))


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
            line = _line_of(nodeid)
            return TOGETHER[line][0] if line < len(TOGETHER) else nodeid

    return Together(config, log)
