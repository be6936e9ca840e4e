"""Checkpoints: a Hugging Face model directory with the trainer's state beside it, vouched for by one manifest.

    step_{N}/config.json, model.safetensors, tokenizer files …
    step_{N}/trainer_state/{optimizer,rng}.safetensors, intake.json, manifest.json

Invariants:
- the_checkpoint_is_the_truth: weights, optimizer and stream position of one moment, under one manifest written last;
- a_checkpoint_that_does_not_verify_is_never_loaded: every file has its sha256 in the manifest.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import structlog
from pydantic import Field, JsonValue, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from consumers.training.persistence.files import appearing_directory, sha256_of
from schemas.errors import CheckpointError
from schemas.identifiers import PolicyVersion
from schemas.messages.prompts import Part
from schemas.messages.weights import Sha256

log = structlog.get_logger()

STATE = "trainer_state"
MANIFEST = "manifest.json"


class CheckpointFile(Part):
    """A file of the checkpoint, by its path in it."""

    path: str
    size: Annotated[int, Field(ge=0)]
    sha256: Sha256


class CheckpointManifest(Part):
    """What a checkpoint is of. ``frontier``: by partition, which records of the stream are accounted for."""

    format: int = 1
    run: str
    algorithm: str
    lineage: Annotated[int, Field(ge=0)]
    step: Annotated[int, Field(ge=0)]
    policy_version: PolicyVersion
    frontier: dict[str, JsonValue]
    skip_counts: dict[str, int]
    tokens_seen: Annotated[int, Field(ge=0)] = 0
    config_hash: str
    created_at: float
    files: tuple[CheckpointFile, ...] = ()


@dataclass(frozen=True)
class TrainerState:
    """What a checkpoint holds besides the model: ``intake`` is the intake's own snapshot."""

    manifest: CheckpointManifest
    optimizer: dict[str, Tensor]
    rng: dict[str, Tensor]
    intake: dict[str, JsonValue]


@dataclass(frozen=True)
class Restored:
    """A verified checkpoint: where its model is, and the rest of its state."""

    directory: Path
    state: TrainerState


@dataclass(frozen=True)
class CheckpointStore:
    """``root`` holds ``step_{N}`` directories; the newest ``keep`` of them stay."""

    root: Path
    keep: int

    def write(self, state: TrainerState, write_model: Callable[[Path], Any]) -> Path:
        """Write a checkpoint, durably and atomically; ``write_model`` fills the Hugging Face directory.

        Checkpoints of later steps go: they did not verify, or belong to an abandoned lineage.
        """
        target = self.root / f"step_{state.manifest.step}"
        with appearing_directory(target, durable=True) as directory:
            write_model(directory)
            own = directory / STATE
            own.mkdir()
            save_file(state.optimizer, own / "optimizer.safetensors")
            save_file(state.rng, own / "rng.safetensors")
            (own / "intake.json").write_text(json.dumps(state.intake))
            paths = sorted(path for path in directory.rglob("*") if path.is_file())
            manifest = state.manifest.model_copy(update={"files": tuple(_described(directory, p) for p in paths)})
            (own / MANIFEST).write_text(manifest.model_dump_json(indent=1))
        kept = [path for path in self.directories() if (_step_of(path) or 0) <= state.manifest.step][-self.keep :]
        for path in set(self.directories()) - set(kept):
            shutil.rmtree(path, ignore_errors=True)
        return target

    def directories(self) -> list[Path]:
        """Checkpoints, lowest step first; not verified."""
        found = {path: _step_of(path) for path in self.root.glob("step_*")}
        return sorted((path for path, step in found.items() if step is not None), key=lambda path: found[path] or 0)

    def newest(self) -> Restored | None:
        """The newest checkpoint that verifies, or none if there is no checkpoint.

        Raises:
            CheckpointError: there are checkpoints, and none of them verifies.
        """
        problems = []
        for directory in reversed(self.directories()):
            try:
                return load_checkpoint(directory)
            except CheckpointError as error:
                log.warning("checkpoint does not verify, falling back to the one before", problem=str(error))
                problems.append(str(error))
        if problems:
            raise CheckpointError(
                f"expected a checkpoint that verifies in {self.root}, found none of {len(problems)}: {problems[0]}; "
                "restore one, or move the directory away to begin anew"
            )
        return None


def load_checkpoint(directory: Path) -> Restored:
    """Verify and read a checkpoint; the model itself is left to the caller.

    Raises:
        CheckpointError: a file is missing, unreadable, or differs from the manifest.
    """
    own = directory / STATE
    try:
        manifest = CheckpointManifest.model_validate_json((own / MANIFEST).read_bytes())
        _verify(directory, manifest)
        state = TrainerState(
            manifest=manifest,
            optimizer=load_file(own / "optimizer.safetensors"),
            rng=load_file(own / "rng.safetensors"),
            intake=json.loads((own / "intake.json").read_text()),
        )
    except (OSError, ValidationError, ValueError) as error:
        raise CheckpointError(f"expected a whole checkpoint at {directory}, got: {error}") from error
    return Restored(directory, state)


def config_hash(*sections: Any) -> str:
    """Checksum of settings sections, to notice that a run is resumed under others."""
    return hashlib.sha256(b"\n".join(section.model_dump_json().encode() for section in sections)).hexdigest()


def _verify(directory: Path, manifest: CheckpointManifest) -> None:
    for file in manifest.files:
        path = directory / file.path
        if path.stat().st_size != file.size or sha256_of(path) != file.sha256:
            raise CheckpointError(f"expected {path} with sha256 {file.sha256} and {file.size} bytes, got other content")


def _described(directory: Path, path: Path) -> CheckpointFile:
    return CheckpointFile(path=path.relative_to(directory).as_posix(), size=path.stat().st_size, sha256=sha256_of(path))


def _step_of(path: Path) -> int | None:
    match = re.fullmatch(r"step_(\d+)", path.name)
    return None if match is None else int(match[1])
