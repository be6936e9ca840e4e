"""A pytest plugin: each test is of one tier, ``unit``, ``integration`` or ``long``, by which ``-m`` selects it.

A long test is marked so. An integration test asks for the fixture of a broker or of the pretrained model, or is marked
as one that starts processes. Any other test is a unit test: it stays in its own process, and fails where it starts
another one, a broker's included.
"""

import ctypes.util
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import pytest

UNIT, INTEGRATION, LONG = TIERS = ("unit", "integration", "long")
LONG_MARKS = {"long", "compose"}
NEEDING_MARKS = {"processes", "vllm"}
NEEDING_FIXTURES = {"bootstrap_servers", "proxied_node", "emulated_run", "rank_zygote", "page", "pretrained_model"}
"""Each starts a broker, ranks or a browser for several tests, or gives them the pretrained model."""
STARTS: tuple[tuple[Any, str], ...] = ((subprocess.Popen, "__init__"), (BaseProcess, "start"), (os, "fork"))
"""All ways to start a process from Python; asyncio's is that of ``subprocess``."""
WHAT_TO_DO = "mark it with pytest.mark.processes"


def tier_of(marks: set[str], fixtures: set[str]) -> str:
    """The tier of a test with these marks and fixtures."""
    if marks & LONG_MARKS:
        return LONG
    return INTEGRATION if marks & NEEDING_MARKS or fixtures & NEEDING_FIXTURES else UNIT


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test with its tier, before ``-m`` looks at it."""
    marks = {mark.name for mark in item.iter_markers()}
    item.add_marker(tier_of(marks, set(getattr(item, "fixturenames", ()))))


class Starts:
    """What the present test has tried to start although it is a unit test."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self._is_unit = False

    def begin_test(self, tier: str) -> None:
        """A test of this tier begins, its fixtures included."""
        self.refused, self._is_unit = [], tier == UNIT

    def expect_allowed(self, what: str) -> None:
        """Say that something starts.

        Raises:
            OSError: the present test is a unit test.
        """
        if self._is_unit:
            self.refused.append(what)
            raise OSError(f"expected a unit test to stay in its own process, got the start of {what}: {WHAT_TO_DO}")

    def guard(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, refused in a unit test."""

        @wraps(start)
        def guarded(*arguments: Any, **options: Any) -> Any:
            self.expect_allowed(f"{start.__qualname__}{arguments[1:]}"[:200])
            return start(*arguments, **options)

        return guarded

    def free(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, in which a unit test may start processes."""

        @wraps(call)
        def freed(*arguments: Any, **options: Any) -> Any:
            was, self._is_unit = self._is_unit, False
            try:
                return call(*arguments, **options)
            finally:
                self._is_unit = was

        return freed


starts = Starts()


@pytest.fixture(scope="session", autouse=True)
def _unit_tests_start_nothing() -> Iterator[None]:
    platform.processor()  # libraries ask for it, and the first who does starts uname
    with ExitStack() as stack:
        for where, name in STARTS:
            stack.enter_context(mock.patch.object(where, name, starts.guard(getattr(where, name))))
        # A library that torch brings looks for libdl while it is imported, with ldconfig, gcc and ld.
        stack.enter_context(mock.patch.object(ctypes.util, "find_library", starts.free(ctypes.util.find_library)))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Know of which tier the present test is."""
    starts.begin_test(UNIT if item.get_closest_marker(UNIT) else "")
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[Any]:
    """A start is a failure also where the code under test went on without it."""
    try:
        return (yield)
    finally:
        refused, starts.refused = starts.refused, []
        if item.get_closest_marker(UNIT):
            refused += sorted(asked_for(item) & NEEDING_FIXTURES)
        if refused:
            pytest.fail(f"a unit test started {'; '.join(refused)}: {WHAT_TO_DO}", pytrace=False)


def asked_for(item: pytest.Item) -> set[str]:
    """The fixtures of a test, those included that it asked for while it ran."""
    return set(item._request._fixture_defs) if isinstance(item, pytest.Function) else set()
