"""A writer that dies at any moment leaves the old checkpoint or the new one, never a part of one.

In a directory, a forked child exits at each of its writing system calls in turn. In an object store, the writer stops
at each request in turn, before or after the store has executed it.
"""

import itertools
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
from structlog.testing import capture_logs

from streamrl.consumers.training.checkpoints.catalogue import Lineage, read_entries
from streamrl.consumers.training.checkpoints.storage import open_storage
from streamrl.consumers.training.checkpoints.store import CheckpointStore
from streamrl.schemas.identifiers import PolicyVersion
from tests.consumers.training.checkpoints.damaged_storage import Storage, newest, write

CRASHED = 9
WRITING = os.O_WRONLY | os.O_RDWR
EVENTS = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree"}


def a_next_step(storage: Storage) -> Lineage:
    lineage = CheckpointStore(storage.open(), 2).claim_lineage(now=0.0)
    for step in (2, 4):
        write(storage.open(), step, lineage, keep=2)
    return lineage


def a_step_that_replaces_an_abandoned_one(storage: Storage) -> Lineage:
    first = CheckpointStore(storage.open(), 2).claim_lineage(now=0.0)
    for step in (4, 6):
        write(storage.open(), step, first, keep=2)
    return CheckpointStore(storage.open(), 2).claim_lineage(now=0.0)


HISTORIES = [a_next_step, a_step_that_replaces_an_abandoned_one]


def proceed(storage: Storage, lineage: Lineage) -> None:
    parent = PolicyVersion(1, 4) if lineage.number > 1 else None
    write(storage.open(), 6, lineage, parent, keep=2)


def assert_old_or_new(storage: Storage, lineage: Lineage, before: tuple[int, int]) -> tuple[int, int]:
    """Check that the next trainer finds the old or the new checkpoint, and nothing damaged; returns its version."""
    store = CheckpointStore(storage.open(), 2)
    assert store.claim_lineage(now=0.0).number == lineage.number + 1
    with capture_logs() as logs:
        found = newest(storage.open())
        for entry in read_entries(storage.open()):
            assert entry.manifest is not None, entry.problem
            store.load(entry.manifest)
    assert found in (before, (lineage.number, 6))
    assert logs == []
    assert not [name for name in storage.names() if ".tmp" in name]
    return found


@pytest.mark.processes
@pytest.mark.parametrize("history", HISTORIES)
def test_a_writer_killed_at_any_system_call_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, history: Callable[[Storage], Lineage]
) -> None:
    torch.set_num_threads(1)
    lineage = history(Storage(tmp_path / "template", tmp_path))
    before = newest(open_storage(tmp_path / "template", tmp_path))
    found = []
    for moment in itertools.count():
        storage = Storage(tmp_path / "checkpoints", tmp_path)
        shutil.copytree(tmp_path / "template", storage.url)
        own = Lineage(lineage.number, storage.open())
        ended = in_a_child_that_dies(moment, partial(proceed, storage, own))
        found.append(assert_old_or_new(storage, lineage, before))
        shutil.rmtree(storage.url)
        if ended == 0:
            break
        assert ended == CRASHED
    assert set(found) == {before, (lineage.number, 6)}
    assert found == sorted(found, key=lambda version: version == (lineage.number, 6))
    assert len(found) > 30


def in_a_child_that_dies(moment: int, act: Callable[[], None]) -> int:
    """Run ``act`` in a forked process that exits at system call number ``moment``, as if killed; returns the code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        calls = itertools.count()

        def tick() -> None:
            if next(calls) == moment:
                os._exit(CRASHED)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event in EVENTS or (event == "open" and arguments[2] & WRITING):
                tick()

        fsync = os.fsync

        def counted_fsync(descriptor: Any) -> None:
            fsync(descriptor)
            tick()

        vars(os)["fsync"] = counted_fsync
        sys.addaudithook(hook)
        act()
    except BaseException:
        os._exit(1)
    os._exit(0)


class Crash(BaseException):
    """Stands for the death of the process. The code under test must not catch it."""


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("carried_out", [False, True])
def test_a_writer_killed_at_any_request_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, history: Callable[[Storage], Lineage], carried_out: bool
) -> None:
    found = []
    for moment in itertools.count():
        storage = Storage(f"memory://{tmp_path.name}-{moment}", tmp_path)
        lineage = history(storage)
        before = newest(storage.open())
        crashed = False
        with monkeypatch.context() as patch:
            count = itertools.count()
            for name in ("put", "delete", "list"):
                patch.setattr(obstore, name, _dying(getattr(obstore, name), count, moment, carried_out))
            try:
                proceed(storage, lineage)
            except Crash:
                crashed = True
        found.append(assert_old_or_new(storage, lineage, before))
        if not crashed:
            break
    assert found == sorted(found, key=lambda version: version == (lineage.number, 6))
    assert len(found) > 15


def _dying(function: Any, count: Any, moment: int, carried_out: bool) -> Any:
    def request(*arguments: Any, **options: Any) -> Any:
        if next(count) != moment:
            return function(*arguments, **options)
        if carried_out:
            function(*arguments, **options)
        raise Crash

    return request
