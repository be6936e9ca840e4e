"""The stream's part of a checkpoint, there and back. Knows no tensors."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import structlog

from consumers.ingest.frontier import Frontier
from consumers.ingest.ledger import Anchor
from consumers.ingest.reader import IntakeStart
from consumers.ingest.rejections import SkipTally
from consumers.training.checkpoints.manifest import Anchor as KeptAnchor
from consumers.training.checkpoints.manifest import CheckpointManifest
from consumers.training.checkpoints.manifest import SkipTally as KeptTally
from schemas.errors import CheckpointError
from schemas.settings import Section

# The named points of the trainer's work. A process that dies at any of them is resumed without loss or repeat.


class Point(StrEnum):
    """In the order in which a life passes them; each names what was just done."""

    FENCED = "fenced"
    LINEAGE_CLAIMED = "lineage_claimed"
    RESTORED = "restored"
    POLICY_OPENED = "policy_opened"
    START_EXPORTED = "start_exported"
    START_ANNOUNCED = "start_announced"

    GROUP_TAKEN = "group_taken"
    GROUP_SKIPPED = "group_skipped"
    GROUP_CREDITED = "group_credited"
    GRADIENT_ADDED = "gradient_added"
    BATCH_GATHERED = "batch_gathered"
    STEP_APPLIED = "step_applied"
    STEP_REFUSED = "step_refused"
    TRAINED_MARKED = "trained_marked"
    LEFT_OUT_SKIPPED = "left_out_skipped"
    WEIGHTS_EXPORTED = "weights_exported"
    DIGESTS_MADE = "digests_made"
    REPORT_MADE = "report_made"
    SNAPSHOT_TAKEN = "snapshot_taken"
    ROWS_SETTLED = "rows_settled"
    CHECKPOINT_WRITTEN = "checkpoint_written"
    ANNOUNCING = "announcing"
    ANNOUNCED = "announced"
    METRICS_WRITTEN = "metrics_written"

    STOP_SEEN = "stop_seen"
    GRADIENT_DROPPED = "gradient_dropped"
    LAST_ANNOUNCED = "last_announced"
    READING_ENDED = "reading_ended"


Reached = Callable[[Point], None]


def ignore(_point: Point) -> None:
    """What a trainer does with its points unless somebody watches."""


log = structlog.get_logger()

DIGITS = 12
"""Hex digits of a section's checksum: enough to notice a change."""


def stream_fields(snapshot: IntakeStart) -> dict[str, Any]:
    """The manifest's fields that say where in the stream it stands."""
    tally = snapshot.tally
    return {
        "frontier": snapshot.frontier.to_json(),
        "anchors": {
            str(number): KeptAnchor(offset=anchor.offset, trajectory_id=anchor.trajectory_id)
            for number, anchor in snapshot.anchors.items()
        },
        "skips": KeptTally(count=tally.count, hash=tally.hash, by_reason=dict(tally.reasons)),
        "prompt_cursor": snapshot.prompt_cursor,
    }


def intake_document(snapshot: IntakeStart) -> dict[str, Any]:
    """What of the intake is too large for the manifest."""
    return {"dedupe": dict(snapshot.dedupe)}


def intake_start(manifest: CheckpointManifest | None, document: Mapping[str, Any], lineage: int) -> IntakeStart:
    """Where the intake of a new lineage begins; at the beginning without a manifest."""
    if manifest is None:
        return IntakeStart(tally=SkipTally(lineage))
    skips = manifest.skips
    before = SkipTally(manifest.lineage, skips.count, skips.hash, Counter(skips.by_reason))
    return IntakeStart(
        frontier=Frontier.from_json(manifest.frontier),
        dedupe={name: (int(place[0]), int(place[1])) for name, place in document.get("dedupe", {}).items()},
        anchors={int(n): Anchor(found.offset, found.trajectory_id) for n, found in manifest.anchors.items()},
        tally=before.succeeded_by(lineage),
        prompt_cursor=manifest.prompt_cursor,
    )


def config_marks(sections: Mapping[str, Section]) -> str:
    """Checksums of settings sections in one line, ``loop=1f2e… training=…``, to notice a resume under others."""
    return " ".join(f"{name}={_mark(section)}" for name, section in sorted(sections.items()))


def changed_sections(before: str, now: str) -> list[str]:
    """Names of the sections whose checksums differ."""
    old, new = (dict(mark.split("=", 1) for mark in marks.split() if "=" in mark) for marks in (before, now))
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def check_continues(manifest: CheckpointManifest, run_name: str, algorithm: str, marks: str) -> None:
    """Make sure that a checkpoint is of this run and algorithm; other settings are only worth a warning.

    Raises:
        CheckpointError: it is of another run or algorithm.
    """
    if (manifest.run, manifest.algorithm) != (run_name, algorithm):
        raise CheckpointError(
            f"expected a checkpoint of run {run_name!r} and algorithm {algorithm!r}, "
            f"got one of {manifest.run!r} and {manifest.algorithm!r}; use another run directory"
        )
    if manifest.config_hash != marks:
        changed = changed_sections(manifest.config_hash, marks)
        log.warning("resuming under other settings than the checkpoint's", step=manifest.step, changed=changed)


def _mark(section: Section) -> str:
    return hashlib.sha256(section.model_dump_json().encode()).hexdigest()[:DIGITS]
