"""`streamrl checkpoints`: lists, verifies and pins a run's checkpoints, and lets the run continue from one.

A restore is refused while the run's processes send heartbeats to its broker. If the broker cannot be reached, a restore
is still safe, because it fences any trainer that may be running.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.consumers.training.checkpoints.catalogue import CheckpointEntry
from streamrl.consumers.training.checkpoints.savepoints import Savepoints, pin, problems_of, restore, unpin
from streamrl.consumers.training.checkpoints.storage import CheckpointStorage, open_storage
from streamrl.deploy.wiring.broker import living_process
from streamrl.inspection.source import PastRun, nodes_of, open_run, own_broker
from streamrl.schemas.errors import BrokerError, BusError, CheckpointError, UserError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.settings.run_directory import RunDirectory

NOT_SOUND = 4
"""Exit code if a checkpoint does not verify."""
WIDTH = 140
"""Columns of the table if there is no terminal."""


@dataclass(frozen=True)
class CheckpointRow:
    """One line of the list. ``state``: ``sealed`` (not read), ``verified``, or the damage."""

    entry: CheckpointEntry
    names: tuple[str, ...]
    is_next: bool
    is_undone: bool
    state: str

    @property
    def version(self) -> str:
        """Lineage and step; for a damaged checkpoint only the step, from its location."""
        return str(PolicyVersion(*self.entry.order)) if self.entry.manifest else f"?-{self.entry.slot.step}"

    def to_json(self) -> dict[str, Any]:
        """A JSON-safe form."""
        manifest = self.entry.manifest
        parent = manifest.parent if manifest else None
        return {
            "step": self.entry.slot.step,
            "version": self.version,
            "parent": None if parent is None else str(PolicyVersion(*parent)),
            "size": manifest.size if manifest else None,
            "created_at": manifest.created_at if manifest else None,
            "pinned": list(self.names),
            "next_start": self.is_next,
            "undone": self.is_undone,
            "state": self.state,
        }


def storage_of(run: PastRun) -> CheckpointStorage:
    """The storage of a run's checkpoints.

    Raises:
        SettingsError: the location names no storage.
    """
    # The cache is not used, because files are read piece by piece.
    return open_storage(run.checkpoints, run.directory.path)


def rows_of(found: Savepoints, *, verify: bool) -> list[CheckpointRow]:
    """The rows of the list, newest first. ``verify``: read all files, else only the manifests."""
    ahead, staying = found.next_start, found.staying
    rows = []
    for entry in found.entries:
        problems = problems_of(found.storage, entry) if verify or entry.manifest is None else []
        is_next = ahead is not None and entry.slot == ahead.slot
        undone = entry.manifest is not None and entry.slot not in staying
        state = f"DAMAGED: {problems[0]}" if problems else "verified" if verify else "sealed"
        rows.append(CheckpointRow(entry, tuple(found.names(entry)), is_next, undone, state))
    return rows


def merge_newest(run: Path, target: Path) -> int:
    """Write the newest checkpoint's adapter, merged into its base, as a full model; returns the exit code.

    Raises:
        UserError: the run does not exist, no checkpoint has an adapter, or the target exists.
        CheckpointError: the checkpoints cannot be read, or the base model has changed.
    """
    from streamrl.consumers.training.adapters import BASE, base_sha256, write_merged
    from streamrl.consumers.training.checkpoints.catalogue import newest_model
    from streamrl.consumers.training.checkpoints.manifest import CARD, MANIFEST, STATE, decode_manifest
    from streamrl.consumers.training.model import CPU, copy_tokenizer, load_model
    from streamrl.deploy.wiring.model_card import model_card

    found = open_run(run)
    checkpoint = newest_model(found.checkpoints, found.directory.path / "cache")
    if checkpoint is None or not (checkpoint / BASE).exists():
        got = "no checkpoint" if checkpoint is None else f"{checkpoint}, which is a full model already"
        raise UserError(f"expected a checkpoint with an adapter in {found.checkpoints}, got {got}")
    if target.exists():
        raise UserError(f"expected a directory that does not exist yet, got {target}; name another, or remove it")
    base = json.loads((checkpoint / BASE).read_text())
    if (now := base_sha256(base["path"])) != base["sha256"]:
        raise CheckpointError(
            f"expected the base of the adapter (sha256 {base['sha256'][:12]}) at {base['path']}, got {now[:12]}: the "
            "model's files were changed; restore them"
        )
    write_merged(load_model(base["path"], CPU), checkpoint, target)
    copy_tokenizer(base["path"], target)
    manifest = decode_manifest((checkpoint / STATE / MANIFEST).read_bytes())
    (target / CARD).write_text(model_card(found.settings, manifest, is_merged=True))
    print(f"{checkpoint.name} merged with {base['path']}: {target}")
    return 0


def list_checkpoints(run: Path, *, verify: bool, as_json: bool) -> int:
    """Print a run's checkpoints; returns the exit code.

    Raises:
        UserError: the run does not exist.
        CheckpointError: its checkpoints cannot be read.
    """
    rows = rows_of(Savepoints.read(storage_of(open_run(run))), verify=verify)
    if as_json:
        for row in rows:
            print(json.dumps(row.to_json()))
    elif not rows:
        print("no checkpoints")
    else:
        console = Console(width=None if sys.stdout.isatty() else WIDTH)
        console.print(_table(rows))
        if any(row.is_next for row in rows):
            print("→ the next start continues from this one" + ("" if verify else "; `sealed`: files were not read"))
    return NOT_SOUND if any(row.state.startswith("DAMAGED") for row in rows) and verify else 0


def _table(rows: list[CheckpointRow]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("", "step", "version", "parent", "size", "time", "pinned as", "state"):
        table.add_column(name, justify="right" if name in ("step", "size") else "left", overflow="fold")
    for row in rows:
        manifest = row.entry.manifest
        parent = str(PolicyVersion(*manifest.parent)) if manifest and manifest.parent else "-"
        size = f"{manifest.size / 1e6:,.1f} MB" if manifest else "?"
        at = (
            datetime.fromtimestamp(manifest.created_at).astimezone().isoformat(" ", "seconds")[:19] if manifest else "?"
        )
        state = f"undone, {row.state}" if row.is_undone else row.state
        step, names = str(row.entry.slot.step), ", ".join(row.names) or "-"
        table.add_row("→" if row.is_next else "", step, row.version, parent, size, at, names, state)
    return table


def verify_checkpoints(run: Path, wanted: str | None) -> int:
    """Read every byte of one checkpoint or of all, and print the damage; the exit code is 4 if there is any.

    Raises:
        UserError: the run or the checkpoint does not exist.
        CheckpointError: its checkpoints cannot be read.
    """
    found = Savepoints.read(storage_of(open_run(run)))
    entries = list(found.entries) if wanted is None else [found.find(wanted)]
    if not entries:
        print("no checkpoints")
    bad = 0
    for entry in entries:
        problems = problems_of(found.storage, entry)
        bad += bool(problems)
        for line in _verdict(entry, problems):
            print(line)
    return NOT_SOUND if bad else 0


def _verdict(entry: CheckpointEntry, problems: list[str]) -> Iterator[str]:
    version = str(PolicyVersion(*entry.order)) if entry.manifest else f"step {entry.slot.step}"
    if not problems and entry.manifest is not None:
        yield f"{version} verified: {len(entry.manifest.files)} files, {entry.manifest.size / 1e6:,.1f} MB"
    for problem in problems:
        yield f"{version} DAMAGED: {problem}"


def pin_checkpoint(run: Path, wanted: str, name: str | None) -> int:
    """Pin a checkpoint, so that it is kept; returns the exit code.

    Raises:
        UserError: the run or the checkpoint does not exist, or the name is taken.
        CheckpointError: its checkpoints cannot be read or written.
    """
    found = Savepoints.read(storage_of(open_run(run)))
    entry = found.find(wanted)
    name = pin(found, entry, name, time.time())
    print(f"pinned checkpoint {PolicyVersion(*entry.order)} as {name}: it is kept until it is unpinned")
    return 0


def unpin_checkpoint(run: Path, wanted: str) -> int:
    """Unpin a checkpoint; returns the exit code.

    Raises:
        UserError: the run or the pin does not exist.
        CheckpointError: its checkpoints cannot be read or written.
    """
    names = unpin(Savepoints.read(storage_of(open_run(run))), wanted)
    print(f"unpinned {', '.join(names)}: the trainer may remove it after its next checkpoint")
    return 0


def restore_checkpoint(run: Path, wanted: str) -> int:
    """Let the run's next start continue from a checkpoint; returns the exit code.

    Raises:
        UserError: the run or the checkpoint does not exist, it does not verify, or the run is alive.
        CheckpointError: its checkpoints cannot be read or written.
    """
    past = open_run(run)
    found = Savepoints.read(storage_of(past))
    entry = found.find(wanted)
    version = PolicyVersion(*entry.order)
    refuse_if_alive(past.name, past.directory, past.settings.kafka)
    done = restore(found, entry, time.time())
    if done is None:
        print(f"nothing to do: the next start continues from {version} anyway")
        return 0
    print(f"the next start continues from checkpoint {version}, step {entry.slot.step}, in a new lineage")
    for name, undone in done.undone.items():
        print(f"undone, and kept until you unpin it: checkpoint {undone} as {name}")
    return 0


def refuse_if_alive(name: str, directory: RunDirectory, kafka: KafkaSettings) -> None:
    """Check that no process of a run sends heartbeats; if the broker cannot be reached, the run counts as stopped.

    Raises:
        UserError: a process of the run is alive.
    """
    from streamrl.bus.embedded import detached
    from streamrl.bus.kafka.bus import KafkaBus

    address = kafka.bootstrap_servers or own_broker(directory)
    if address is None and not nodes_of(directory):  # a run's own broker ends with it
        address = detached.running_bootstrap_servers()
    if address is None:
        return
    bus = KafkaBus(kafka.model_copy(update={"bootstrap_servers": address}))
    try:
        living = asyncio.run(living_process(bus, name))
    except (BusError, BrokerError) as error:
        print(f"could not check whether run {name} is alive ({error}); continuing", file=sys.stderr)
        return
    if living is not None:
        raise UserError(
            f"expected run {name} to be stopped, got a heartbeat of its {living}; stop it, then repeat this command"
        )
