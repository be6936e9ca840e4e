"""A test fails when a process that it started dies of a signal that was not sent to it.

Of a role or another command of ours every such signal counts, of any other process those of a crash. In tests/chaos
roles also kill themselves, and a test of a crash says so with ``crashing``.
"""

import os
import signal
import subprocess
from asyncio import base_subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS}
SELF_KILLING = "tests/chaos/"


class Ended:
    """The signals that this process sent, and the processes that died of another one."""

    def __init__(self) -> None:
        self.sent: dict[int, set[int]] = {}
        self.died: list[str] = []
        self.expected: set[int] = set()
        self.nodeid = ""

    def note_sent(self, pid: int, number: int) -> None:
        """By pid, or by the group of that number, which is that of a process with a session of its own."""
        self.sent.setdefault(pid, set()).add(int(number))

    def note_end(self, pid: int, code: int | None, arguments: object) -> None:
        """A process has ended."""
        if code is None or code >= 0 or -code in self.sent.get(pid, set()) | self.expected:
            return
        number, command = signal.Signals(-code), _words(arguments)
        is_ours = ("-m", "streamrl") in pairwise(command) and not self.nodeid.startswith(SELF_KILLING)
        if number in CRASHES or is_ours:
            self.died.append(f"{' '.join(command)[:200]} (pid {pid}) died of {number.name}, which nobody sent it")


ended = Ended()


def _words(arguments: Any) -> list[str]:
    words = [arguments] if isinstance(arguments, str | bytes | os.PathLike) else arguments
    return [os.fsdecode(word) for word in words]


def handles_sigterm(pid: int) -> bool:
    """Whether a process of this machine has come to its first line: Python by itself leaves SIGTERM as it is."""
    (caught,) = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@contextmanager
def crashing(*numbers: signal.Signals) -> Iterator[None]:
    """Within, processes may die of these."""
    before, ended.expected = ended.expected, ended.expected | {int(number) for number in numbers}
    try:
        yield
    finally:
        ended.expected = before


@pytest.fixture(scope="session", autouse=True)
def _ends_are_looked_at() -> Iterator[None]:
    kill, killpg = os.kill, os.killpg
    started: Any = subprocess.Popen
    transport: Any = base_subprocess.BaseSubprocessTransport
    popen_ends, asyncio_ends = started._handle_exitstatus, transport._process_exited

    def noted_kill(pid: int, number: int) -> None:
        ended.note_sent(pid, number)
        kill(pid, number)

    def noted_killpg(group: int, number: int) -> None:
        ended.note_sent(group, number)
        killpg(group, number)

    def popen_ended(self: Any, *arguments: Any, **options: Any) -> None:
        popen_ends(self, *arguments, **options)
        ended.note_end(self.pid, self.returncode, self.args)

    def asyncio_ended(self: Any, code: int) -> None:
        ended.note_end(self._proc.pid, code, self._proc.args)
        asyncio_ends(self, code)

    with (
        mock.patch.object(os, "kill", noted_kill),
        mock.patch.object(os, "killpg", noted_killpg),
        mock.patch.object(started, "_handle_exitstatus", popen_ended),
        mock.patch.object(transport, "_process_exited", asyncio_ended),
    ):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Know whose test it is."""
    ended.nodeid = item.nodeid
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[Any]:
    """After all of a test's fixtures, which end the processes that it left."""
    try:
        return (yield)
    finally:
        died, ended.died = ended.died, []
        if died:
            pytest.fail("\n".join(died), pytrace=False)
