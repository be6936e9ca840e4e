import asyncio
import os
import re
import sys
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streamrl.deploy.local.logs import LogRotation, rotate
from streamrl.deploy.local.supervisor import Child, ChildSpec
from tests.progress import calm_s

LINES, LINES_A_SECOND = 3000, 5000
WRITER = f"""
import subprocess, sys, time
for number in range({LINES}):
    print(f"line {{number:05}} " + "x" * 88, flush=True)
    if number % 50 == 0:
        time.sleep(0.01)
subprocess.run([sys.executable, "-c", "print('a child of its own, with the same log')"])
"""


@pytest.mark.processes
async def test_a_log_is_bounded_while_its_process_writes_and_nothing_is_lost_between(tmp_path: Path) -> None:
    began = time.monotonic(), calm_s()
    rotation = LogRotation(tmp_path, max_bytes=1 << 16, backup_count=20, look_every_s=0.01)
    stop = asyncio.Event()
    turning = asyncio.create_task(rotation.run(stop))
    child = await Child.start(ChildSpec("writer", [sys.executable, "-c", WRITER], tmp_path / "writer.log"))
    assert await child.process.wait() == 0
    stop.set()
    await turning
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert len(sizes) >= 3, sizes
    assert max(sizes.values()) < 1 << 18, sizes
    copies = sorted(tmp_path.glob("writer.log.*"), key=lambda path: int(path.suffix[1:]), reverse=True)
    text = "".join(path.read_text() for path in (*copies, tmp_path / "writer.log"))
    assert "\0" not in text, "who does not append leaves a hole where the log was cut"
    lines = text.splitlines()
    assert lines[-1] == "a child of its own, with the same log"
    kept = [int(found[1]) for line in lines[:-1] if (found := re.fullmatch(r"line (\d{5}) x{88}", line))]
    assert kept == sorted(set(kept)), "in order, none twice"
    # What is written between copy and cut goes with it: microseconds, or until there is a processor for the cut.
    waited_s = time.monotonic() - began[0] - (calm_s() - began[1])
    assert len(kept) >= LINES - 2 * len(copies) - LINES_A_SECOND * waited_s


def test_so_many_copies_are_kept_the_newest_first(tmp_path: Path) -> None:
    path = tmp_path / "w.log"
    for number in range(5):
        path.write_text(f"life {number}")
        rotate(path, 3)
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {
        "w.log": "",
        "w.log.1": "life 4",
        "w.log.2": "life 3",
        "w.log.3": "life 2",
    }
    path.write_text("more")
    rotate(path, 0)
    assert path.read_text() == ""


def test_a_log_that_cannot_be_copied_stays_and_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "w.log").write_text("x" * 200)
    rotation = LogRotation(tmp_path, max_bytes=100, backup_count=1)

    def full(*_arguments: object) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr("shutil.copyfileobj", full)
        rotation.look()
        rotation.look()
    assert [each["event"] for each in logs] == ["a log cannot be rotated and keeps growing"]
    assert [path.name for path in tmp_path.iterdir()] == ["w.log"]
    rotation.look()
    assert (tmp_path / "w.log.1").read_text() == "x" * 200
