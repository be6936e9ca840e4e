"""Writes and reads the reader's part of a checkpoint, and checks that a run may continue from it. Knows no tensors.

``manifest.anchors`` are the ledger's known records. ``intake.json`` holds the parts that the manifest has no room for.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import structlog

from streamrl.consumers.ingest.frontier import Frontier
from streamrl.consumers.ingest.ledger import FinishedGroups
from streamrl.consumers.ingest.reader import ReaderSnapshot
from streamrl.consumers.ingest.rejections import SkipTally
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest, SkipSummary
from streamrl.schemas.errors import CheckpointError
from streamrl.schemas.settings import Section

log = structlog.get_logger()

DIGITS = 12
"""Hex digits of a section's checksum: enough to notice a change."""


def stream_fields(snapshot: ReaderSnapshot) -> dict[str, Any]:
    """The manifest's fields that hold the position in the stream."""
    tally = snapshot.tally
    return {
        "frontier": snapshot.frontier.to_json(),
        "anchors": {str(number): record for number, record in snapshot.known_records.items()},
        "skips": SkipSummary(count=tally.count, hash=tally.hash, by_reason=dict(tally.reasons)),
        "prompt_cursor": snapshot.prompt_cursor,
    }


def reader_document(snapshot: ReaderSnapshot) -> dict[str, Any]:
    """The part of the snapshot that is too large for the manifest: the groups that have ended."""
    return {"finished_groups": snapshot.finished_groups.to_json()}


def reader_snapshot(manifest: CheckpointManifest | None, document: Mapping[str, Any], lineage: int) -> ReaderSnapshot:
    """Where the reader of a new lineage starts; at the beginning without a manifest."""
    if manifest is None:
        return ReaderSnapshot(tally=SkipTally(lineage))
    skips = manifest.skips
    before = SkipTally(manifest.lineage, skips.count, skips.hash, Counter(skips.by_reason))
    return ReaderSnapshot(
        frontier=Frontier.from_json(manifest.frontier),
        finished_groups=FinishedGroups.from_json(document["finished_groups"]),
        known_records={int(number): record for number, record in manifest.anchors.items()},
        tally=before.for_next_lineage(lineage),
        prompt_cursor=manifest.prompt_cursor,
    )


def config_marks(sections: Mapping[str, Section]) -> str:
    """Checksums of settings sections in one line, ``loop=1f2e… training=…``, to notice a resume with other settings."""
    return " ".join(f"{name}={_mark(section)}" for name, section in sorted(sections.items()))


def changed_sections(before: str, now: str) -> list[str]:
    """Names of the sections whose checksums differ."""
    old, new = (dict(mark.split("=", 1) for mark in marks.split() if "=" in mark) for marks in (before, now))
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def check_continues(manifest: CheckpointManifest, run_name: str, algorithm: str, marks: str) -> None:
    """Check that a checkpoint belongs to this run and algorithm; changed settings are only logged.

    Raises:
        CheckpointError: it belongs to another run or algorithm.
    """
    if (manifest.run, manifest.algorithm) != (run_name, algorithm):
        raise CheckpointError(
            f"expected a checkpoint of run {run_name!r} and algorithm {algorithm!r}, "
            f"got one of {manifest.run!r} and {manifest.algorithm!r}; use another run directory"
        )
    if manifest.config_hash != marks:
        changed = changed_sections(manifest.config_hash, marks)
        log.warning("resuming with other settings than the checkpoint's", step=manifest.step, changed=changed)


def _mark(section: Section) -> str:
    return hashlib.sha256(section.model_dump_json().encode()).hexdigest()[:DIGITS]
