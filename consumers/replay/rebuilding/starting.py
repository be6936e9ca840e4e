"""Where a step can be rebuilt from: the nearest earlier checkpoint of its chain, or the initial model. Reads only."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from consumers.replay.steps.chain import Stretch
from consumers.training.persistence.checkpoint import CheckpointStore
from consumers.training.persistence.manifest import CheckpointManifest
from consumers.training.persistence.weight_export import WEIGHTS
from schemas.errors import CheckpointError
from schemas.identifiers import PolicyVersion


@dataclass(frozen=True)
class Start:
    """A model directory, and the optimizer after ``version.number`` steps."""

    version: PolicyVersion
    model: Path | str
    optimizer: dict[str, Tensor] = field(default_factory=dict)


class Starts(Protocol):
    """The checkpoints and weight versions of a run."""

    def versions(self) -> list[PolicyVersion]:
        """Of the checkpoints that are there; not verified."""
        ...

    def load(self, version: PolicyVersion) -> Start:
        """A verified checkpoint.

        Raises:
            CheckpointError: it is gone or does not verify.
        """
        ...

    def originals(self, version: PolicyVersion) -> dict[str, Tensor] | None:
        """The weights of a version as the trainer wrote them, if a checkpoint or the weights store has them."""
        ...


@dataclass
class StoredStarts:
    """``Starts`` of a run: its checkpoints as they were when first asked for, and its weights store."""

    store: CheckpointStore
    weights: Path

    @cached_property
    def manifests(self) -> dict[PolicyVersion, CheckpointManifest]:
        """By version."""
        return {manifest.policy_version: manifest for manifest in self.store.manifests()}

    def versions(self) -> list[PolicyVersion]:
        """See ``Starts``."""
        return list(self.manifests)

    def load(self, version: PolicyVersion) -> Start:
        """See ``Starts``."""
        restored = self.store.load(self.manifests[version])
        return Start(version, restored.directory, restored.state.optimizer)

    def originals(self, version: PolicyVersion) -> dict[str, Tensor] | None:
        """See ``Starts``."""
        with suppress(CheckpointError, OSError, SafetensorError):  # a trainer that goes on prunes both meanwhile
            if version in self.manifests:
                return dict(load_file(self.store.load(self.manifests[version]).directory / WEIGHTS))
        with suppress(OSError, SafetensorError):
            return dict(load_file(self.weights / str(version) / WEIGHTS))
        return None


def candidates(chain: Sequence[Stretch], step: int, versions: Iterable[PolicyVersion]) -> list[PolicyVersion]:
    """Checkpoints from which the step that follows ``step`` finished ones can be rebuilt, nearest first."""
    usable = [
        version
        for version in versions
        if version.number <= step
        and any(
            stretch.lineage == version.lineage and stretch.first - 1 <= version.number <= stretch.last
            for stretch in chain
        )
    ]
    return sorted(usable, key=lambda version: version.number, reverse=True)


def begins_with_the_model(chain: Sequence[Stretch]) -> bool:
    """Whether the chain goes back to the initial model."""
    return bool(chain) and chain[0].first == 1
