"""The stream's part of a checkpoint, there and back. Knows no tensors."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import structlog

from consumers.intake.frontier import Frontier
from consumers.intake.ledger import Anchor
from consumers.intake.opening import IntakeStart
from consumers.intake.tally import SkipTally
from consumers.training.persistence.manifest import Anchor as KeptAnchor
from consumers.training.persistence.manifest import CheckpointManifest
from consumers.training.persistence.manifest import SkipTally as KeptTally
from schemas.errors import CheckpointError
from schemas.settings import Section

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
