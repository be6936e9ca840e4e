"""Writes, verifies, loads and prunes the checkpoints of a run.

A checkpoint is a Hugging Face model directory, the trainer's state next to it, and one manifest that lists both:

    step_{N}/config.json, model.safetensors, tokenizer files …
    step_{N}/trainer_state/{optimizer,rng}.safetensors, intake.json, report.bin, manifest.json

A write stages the files, makes them durable, computes their checksums, checks that no newer trainer exists (the fence),
and publishes the manifest. A process that dies before it publishes the manifest leaves no checkpoint. A process that
dies afterwards leaves a complete one. The manifest lists every file with its checksum, and becomes visible only when
all files are durable.

Invariants:
- a_checkpoint_captures_one_moment: weights, optimizer and stream position belong together, under one manifest that is
  written last;
- a_checkpoint_that_does_not_verify_is_never_loaded: every file has its sha256 in the manifest;
- a_superseded_writer_publishes_nothing: the lineage is checked right before the manifest becomes visible.
"""

import errno
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog
from pydantic import JsonValue, TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamrl.consumers.training.checkpoints.catalogue import (
    CheckpointsState,
    Lineage,
    claim_lineage,
    pinned_versions,
    prunable_slots,
    read_checkpoints_state,
    read_entries,
    read_manifests,
    read_pins,
    read_rollback,
    resumable,
)
from streamrl.consumers.training.checkpoints.manifest import (
    MANIFEST,
    STATE,
    CheckpointFile,
    CheckpointManifest,
    decode_manifest,
)
from streamrl.consumers.training.checkpoints.shards import WHOLE, optimizer_files, read_optimizer
from streamrl.consumers.training.checkpoints.storage import CheckpointStorage, Slot
from streamrl.schemas.errors import CheckpointError
from streamrl.schemas.files import sha256_of

log = structlog.get_logger()

OPTIMIZER, RNG, READER, REPORT = (f"{STATE}/{name}" for name in (WHOLE, "rng.safetensors", "intake.json", "report.bin"))
TENSORS = ".safetensors"
SECURING_THREADS = 4
"""Threads that sync staged files to disk. Concurrent syncs share the disk's flushes."""
_READER = TypeAdapter(dict[str, JsonValue])


@dataclass(frozen=True)
class TrainerState:
    """Everything in a checkpoint except the model.

    ``optimizer``: the optimizer's tensors; if several ranks wrote them, each is assembled on access. ``reader``: the
    snapshot of the stream reader, without the fields in the manifest. ``report``: the encoded report of this step, so
    that a restarted trainer can announce it again.
    """

    manifest: CheckpointManifest
    optimizer: Mapping[str, Tensor]
    rng: dict[str, Tensor]
    reader: dict[str, JsonValue]
    report: bytes = b""

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.optimizer.values(), *self.rng.values()))


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint whose files match its manifest.

    ``directory``: the local directory with the model. ``state``: everything else. ``undoes``: if an operator rolled the
    run back to this checkpoint, the newest lineage whose later steps are undone; 0 without a rollback.
    """

    directory: Path
    state: TrainerState
    undoes: int = 0


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one algorithm of a run. The store keeps the newest ``keep`` and all pinned ones."""

    storage: CheckpointStorage
    keep: int
    _cleanup_failures: list[Exception] = field(default_factory=list, compare=False, repr=False)

    def held(self, claimed: int = 0) -> CheckpointsState:
        """The lineage claims and checkpoints in this storage, and the id of the claim to lineage ``claimed``, if any.

        Raises:
            CheckpointError: the storage cannot be read.
        """
        return read_checkpoints_state(self.storage, claimed)

    def claim_lineage(self, *, at_least: int = 1, now: float) -> Lineage:
        """Take the run over: claim a lineage number greater than those of all claims and checkpoints.

        ``at_least``: the smallest number that may be claimed.

        Raises:
            CheckpointError: the storage cannot be read or written to.
        """
        # Manifests count too: a lineage must not be shared with checkpoints that were moved here without their claims.
        newest = max((manifest.lineage for manifest in self.manifests()), default=0)
        lineage = claim_lineage(self.storage, at_least=max(at_least, newest + 1), now=now)
        # Clean up only after the claim. Files that look abandoned may belong to an older trainer that is still writing,
        # and the claim stops that trainer. Files of newer lineages are kept, because this trainer may itself have been
        # suspended and superseded.
        self._clean_up(lambda: self.storage.clear_leftovers(lineage.number))
        return lineage

    def write(
        self,
        state: TrainerState,
        write_model: Callable[[Path], Any],
        lineage: Lineage,
        write_optimizer: Callable[[Path], Any] | None = None,
    ) -> str:
        """Write a checkpoint durably and atomically; returns its path or URL.

        ``write_model`` fills the Hugging Face directory. ``write_optimizer`` is for an optimizer state that is spread
        over ranks, and writes it into the given directory; None: the optimizer's state is in ``state``. Afterwards,
        old checkpoints and those of abandoned lineages are deleted.

        Raises:
            Superseded: a newer lineage exists; nothing was published.
            CheckpointError: the disk is full or the store fails; earlier checkpoints are unchanged.
        """
        assert state.manifest.lineage == lineage.number
        slot = self.storage.slot(lineage.number, state.manifest.step)
        needed = self._needed(state, in_parts=write_optimizer is not None)
        self._check_space(needed)
        try:
            with self.storage.staging(slot, lineage.number) as directory:
                write_model(directory)
                _write_state(directory, state, write_optimizer)
                manifest = state.manifest.model_copy(update={"files": self._sync_and_describe(directory)})
                self._set_pinned_aside(slot, lineage)
                slot = self.storage.publish(slot, directory, manifest, lineage.check)
        except (OSError, SafetensorError) as error:
            # If a newer trainer cleared this one's files, the true cause is Superseded, which the check raises.
            with suppress(CheckpointError):
                lineage.check()
            raise CheckpointError(
                f"expected to write a checkpoint of about {needed} bytes to {self.storage.address(slot)}, "
                f"got: {error} ({self._free()} bytes are free in {self.storage.scratch}); "
                "free space or repair the storage; earlier checkpoints are unchanged"
            ) from error
        # A restart needs the old checkpoints until the new one is published, so they are pruned only now.
        self._prune(manifest, lineage)
        return self.storage.address(slot)

    def _sync_and_describe(self, directory: Path) -> tuple[CheckpointFile, ...]:
        """Sync the staged files to disk and describe them. Checksums are computed while the disk writes."""
        paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
        largest_first = sorted(paths, key=lambda path: path.stat().st_size, reverse=True)
        with ThreadPoolExecutor(SECURING_THREADS) as pool:
            # ``map`` submits all files at once, the largest first. This thread computes checksums during the syncs.
            syncs = pool.map(self.storage.secure, largest_first)
            files = tuple(_describe(directory, path) for path in paths)
            for _ in syncs:
                pass  # raises the error of a sync that failed
        return files

    def _set_pinned_aside(self, slot: Slot, lineage: Lineage) -> None:
        """Move an older lineage's pinned checkpoint out of this slot. In a directory, lineages share a step's slot."""
        if self.storage.aside(slot, lineage.number) == slot:
            return
        data = self.storage.manifest(slot)
        if data is None or not (pinned := pinned_versions(read_pins(self.storage).values())):
            return
        with suppress(CheckpointError):  # a manifest that does not decode cannot be matched with a pin
            existing = decode_manifest(data)
            if existing.lineage < lineage.number and (existing.lineage, existing.step) in pinned:
                lineage.check()
                self.storage.set_aside(slot, existing.lineage)

    def newest(self) -> VerifiedCheckpoint | None:
        """The checkpoint to continue from: the newest that verifies. None: there are no checkpoints.

        Checkpoints are ordered by lineage, then by step. Those that a rollback undid are ignored.

        Raises:
            CheckpointError: there are checkpoints, but none of them verifies; or the storage cannot be read.
        """
        problems = []
        entries, rollback = read_entries(self.storage), read_rollback(self.storage)
        # Slots without a valid manifest come first, so that their problems are logged. The others follow, newest first.
        found = resumable(entries, rollback)
        for entry in sorted(found, key=lambda entry: entry.manifest is not None):
            try:
                if entry.manifest is None:
                    raise CheckpointError(entry.problem)
                loaded = self.load(entry.manifest, entry.slot)
                undoes = rollback.lineage if rollback is not None and entry.order[0] <= rollback.lineage else 0
                return replace(loaded, undoes=undoes)
            except CheckpointError as error:
                log.warning("checkpoint does not verify, falling back to an older one", problem=str(error))
                problems.append(str(error))
        if problems:
            raise CheckpointError(
                f"expected a checkpoint that verifies in {self.storage}, found none of {len(problems)}: "
                f"{problems[0]}; restore one, or move them away to start from the initial model"
            )
        return None

    def manifests(self) -> list[CheckpointManifest]:
        """The valid manifests, newest first. The files that they list are not verified."""
        return read_manifests(self.storage)

    def load(self, manifest: CheckpointManifest, slot: Slot | None = None) -> VerifiedCheckpoint:
        """Fetch, verify and read the checkpoint of a manifest; ``slot``: where the manifest was read, if known.

        Raises:
            CheckpointError: the checkpoint does not verify, or cannot be fetched.
        """
        slot = slot or self.storage.slot(manifest.lineage, manifest.step)
        try:
            if not self._holds(slot, manifest):
                # The checkpoint was moved aside, or a later attempt at the step wrote it to another slot.
                others = (each for each in self.storage.slots() if each.step == manifest.step and each != slot)
                slot = next((each for each in others if self._holds(each, manifest)), slot)
            directory = self.storage.fetch(slot, manifest)
        except OSError as error:
            raise CheckpointError(f"expected to fetch {self.storage.address(slot)}, got: {error}") from error
        restored = load_checkpoint(directory)
        if restored.state.manifest != manifest:
            wanted = f"{manifest.lineage}-{manifest.step}"
            raise CheckpointError(f"expected checkpoint {wanted} at {directory}, got another one that replaced it")
        return restored

    def _holds(self, slot: Slot, manifest: CheckpointManifest) -> bool:
        """Whether the slot has exactly this manifest."""
        data = self.storage.manifest(slot)
        try:
            return data is not None and decode_manifest(data) == manifest
        except CheckpointError:
            return False

    def _prune(self, written: CheckpointManifest, lineage: Lineage) -> None:
        def remove() -> None:
            entries = read_entries(self.storage)
            # Pins are read last, so that pins made while the entries were read are included.
            pinned = pinned_versions(read_pins(self.storage).values())
            for slot in prunable_slots(entries, written, self.keep, pinned):
                # In a directory, a newer trainer may have written its checkpoint to this slot by now.
                lineage.check()
                self.storage.remove(slot)

        self._clean_up(remove)

    def _clean_up(self, remove: Callable[[], None]) -> None:
        """Run ``remove``. A failure does not stop the trainer; of several in a row only the first is logged."""
        try:
            remove()
        except (OSError, CheckpointError) as error:
            if not self._cleanup_failures:
                log.warning(
                    "old files could not be deleted from the checkpoint storage; this is logged once",
                    storage=str(self.storage),
                    problem=str(error),
                )
            self._cleanup_failures.append(error)
        else:
            self._cleanup_failures.clear()

    def _needed(self, state: TrainerState, *, in_parts: bool) -> int:
        """Estimated bytes of a checkpoint. The model, and an optimizer in parts, are assumed as large as the newest."""
        newest = next(iter(self.manifests()), None)
        files = newest.files if newest else ()
        if in_parts:
            return max(state.size, sum(file.size for file in files))
        return state.size + sum(file.size for file in files if not file.path.startswith(f"{STATE}/"))

    def _check_space(self, needed: int) -> None:
        free = self._free()
        if free < needed:
            raise CheckpointError(
                f"expected {needed} bytes free in {self.storage.scratch} for a checkpoint, got {free}; "
                "free space; earlier checkpoints are unchanged"
            ) from OSError(errno.ENOSPC, "too little space")

    def _free(self) -> int:
        # Before the first checkpoint the directory does not exist. Its nearest existing parent is on the same disk.
        existing = next(
            path for path in (self.storage.scratch, *self.storage.scratch.absolute().parents) if path.exists()
        )
        return shutil.disk_usage(existing).free


def load_checkpoint(directory: Path) -> VerifiedCheckpoint:
    """Verify a checkpoint in a local directory and read its state. The caller loads the model.

    Raises:
        CheckpointError: a file is missing, unreadable, or differs from the manifest.
    """
    try:
        manifest = decode_manifest((directory / STATE / MANIFEST).read_bytes())
        # Verify before parsing, so that the error names the damaged file and does not come from a parser.
        _verify(directory, manifest)
        state = TrainerState(
            manifest=manifest,
            optimizer=read_optimizer([directory / path for path in optimizer_files(_paths(manifest))]),
            rng=load_file(directory / RNG),
            reader=_READER.validate_json((directory / READER).read_bytes()),
            report=(directory / REPORT).read_bytes(),
        )
    except (OSError, SafetensorError, ValueError, CheckpointError) as error:
        raise CheckpointError(f"expected a whole checkpoint at {directory}, got: {error}") from error
    return VerifiedCheckpoint(directory, state)


def _write_state(directory: Path, state: TrainerState, write_optimizer: Callable[[Path], Any] | None) -> None:
    (directory / STATE).mkdir()
    if write_optimizer is None:
        save_file(dict(state.optimizer), directory / OPTIMIZER)
    else:
        write_optimizer(directory / STATE)
    save_file(state.rng, directory / RNG)
    (directory / READER).write_bytes(_READER.dump_json(state.reader))
    (directory / REPORT).write_bytes(state.report)


def _verify(directory: Path, manifest: CheckpointManifest) -> None:
    listed = _paths(manifest)
    missing = sorted({RNG, READER, REPORT} - listed)
    if missing:
        raise CheckpointError(f"a manifest that does not list {missing[0]}")
    optimizer_files(listed)
    if not any(path.endswith(TENSORS) and not path.startswith(f"{STATE}/") for path in listed):
        raise CheckpointError("a manifest that lists no model")
    for file in manifest.files:
        path = directory / file.path
        if path.stat().st_size != file.size or sha256_of(path) != file.sha256:
            raise CheckpointError(f"{path}, which differs from the listed {file.size} bytes with sha256 {file.sha256}")
        # The checksum proves that the file is unchanged. Opening it proves that it contains tensors.
        if path.suffix == TENSORS:
            with safe_open(path, "numpy"):
                pass


def _paths(manifest: CheckpointManifest) -> set[str]:
    return {file.path for file in manifest.files}


def _describe(directory: Path, path: Path) -> CheckpointFile:
    return CheckpointFile(path=path.relative_to(directory).as_posix(), size=path.stat().st_size, sha256=sha256_of(path))
