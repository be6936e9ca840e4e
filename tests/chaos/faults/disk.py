"""A full disk under the checkpoints, and damage to the newest of them between a kill and the restart."""

import asyncio
import errno
import json
import os
import random
import resource
import subprocess
import time
from pathlib import Path

from streamrl.schemas.errors import DiskFull
from tests.chaos.faults.plan import Event, Fault
from tests.chaos.runs.chaos_run import ChaosRun
from tests.chaos.runs.waiting import FleetFailed

DISK_SIZE = "4m"
BALLAST = "ballast"
SMALLEST_FILE = 4096
END_S = 60.0


def mount_small_disk(run: ChaosRun) -> None:
    """Put the checkpoints on a tiny file system of their own, where that is allowed."""
    directory = run.setting.directory.checkpoints
    directory.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "chaos", str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return
    if done.returncode == 0:
        run.cleanups.append(lambda: subprocess.run(["umount", "-l", str(directory)], check=True))


async def fill_disk(run: ChaosRun, _event: Event) -> float:
    """No space for checkpoints, or where they have no disk of their own no file of the trainer may grow.

    The trainer must end and say so; once there is room it goes on, as by the same command.
    """
    directory = run.setting.directory.checkpoints
    if os.path.ismount(directory):
        _fill(directory / BALLAST)
    else:
        pid = await run.fleet.living("trainer")
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (SMALLEST_FILE, resource.RLIM_INFINITY))
    reason = await asyncio.wait_for(run.fleet.trainer_ended(), END_S)
    if f"ended with code {DiskFull.exit_code}: error: " not in (reason or ""):
        raise FleetFailed(f"expected a trainer that ends with code {DiskFull.exit_code} and says why, got {reason!r}")
    (directory / BALLAST).unlink(missing_ok=True)
    run.fleet.start_trainer()
    return time.time()


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


async def truncate_checkpoint(run: ChaosRun, event: Event) -> float:
    def damage(path: Path) -> None:
        os.truncate(path, path.stat().st_size // 2)

    return await _damage(run, event, damage)


async def flip_a_bit(run: ChaosRun, event: Event) -> float:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        bit = random.Random(event.seed).randrange(len(content) * 8)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)

    return await _damage(run, event, damage)


async def _damage(run: ChaosRun, event: Event, damage: "object") -> float:
    assert callable(damage)
    await run.until(lambda: len(_manifests(run)) >= 2, "second checkpoint")
    await run.fleet.end_trainer()
    manifest = _manifests(run)[-1]
    damage(random.Random(event.seed).choice(_files_of(manifest)))
    run.fleet.start_trainer()
    return time.time()


def _manifests(run: ChaosRun) -> list[Path]:
    """Manifests of checkpoints, oldest first."""
    found = run.setting.directory.checkpoints.glob("step_*/*/manifest.json")
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def _files_of(manifest: Path) -> list[Path]:
    """The manifest and every file that it vouches for."""
    named = [manifest.parents[1] / file["path"] for file in json.loads(manifest.read_text())["files"]]
    return [manifest, *(path for path in named if path.stat().st_size)]


FAULTS = (
    Fault("checkpoint-disk-full", fill_disk, ("C5",), prepare=mount_small_disk, mixes=False),
    Fault("checkpoint-truncated", truncate_checkpoint, ("C4",), mixes=False),
    Fault("checkpoint-bit-flipped", flip_a_bit, ("C4",), mixes=False),
)
