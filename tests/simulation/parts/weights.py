"""Weight versions in memory: what the trainer exported last, and how a worker gets at it. Knows no files."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from streamrl.schemas.control import AnnouncedWeights
from streamrl.schemas.errors import ChecksumMismatch, WeightsError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.weights.fetch import WeightsFetcher


@dataclass
class WeightShelf:
    """The newest ``keep`` versions, by the sha256 of their manifest; shared by all processes."""

    keep: int = 4
    versions: dict[PolicyVersion, str] = field(default_factory=dict)

    def put(self, version: PolicyVersion, content: str) -> str:
        """Store a version; its sha256."""
        digest = self.versions[version] = hashlib.sha256(f"{version} {content}".encode()).hexdigest()
        for old in sorted(self.versions)[: -self.keep]:
            del self.versions[old]
        return digest


class SimFetcher(WeightsFetcher):
    """Fetches from the shelf of a policy; fails with a probability."""

    def __init__(self, shelf_of: Callable[[str], WeightShelf], chance: Random, failing: float) -> None:
        super().__init__(Path())
        object.__setattr__(self, "shelf_of", shelf_of)
        object.__setattr__(self, "chance", chance)
        object.__setattr__(self, "failing", failing)

    shelf_of: Callable[[str], WeightShelf]
    chance: Random
    failing: float

    async def fetch(self, ready: AnnouncedWeights, attempt: int = 0) -> Path:
        """A name of the policy, if it is an arm, and of the version."""
        await asyncio.sleep(0.02 + 0.1 * self.chance.random())
        if self.chance.random() < self.failing:
            raise WeightsError("simulated failure of a relay")
        versions = self.shelf_of(ready.series).versions
        found = versions.get(ready.version)
        if found is None:
            raise WeightsError(f"expected {ready.version} on the shelf, it holds {sorted(versions)}")
        if found != ready.manifest_sha256:
            raise ChecksumMismatch(f"expected {ready.manifest_sha256} of {ready.version}, got {found}")
        return Path(ready.series) / str(ready.version)

    def keep_only(self, versions: Iterable[PolicyVersion], series: str = "") -> None:
        """Nothing is kept."""
