"""A trainer of a tiny model, stopped while it exports versions; the next one goes on from what is there."""

import asyncio
import atexit
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from random import Random
from tempfile import mkdtemp

from streamrl.bus.history import BusHistory
from streamrl.consumers.training.checkpoints.catalogue import read_manifests
from streamrl.inspection.audit.audit import audit
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weights import MANIFEST, WeightManifest
from tests.chaos.stops.moment import Subject
from tests.chaos.stops.second_life import second_life
from tests.consumers.training.factories import save_tiny_model
from tests.consumers.training.trainer_harness import RUN, TRAINING, TrainerHarness, group

EVERY_S = 0.02
MODEL = Path(mkdtemp(prefix="stops-model-"))
atexit.register(shutil.rmtree, MODEL, ignore_errors=True)
save_tiny_model(MODEL)


@asynccontextmanager
async def trainer(root: Path, _random: Random) -> AsyncIterator[Subject]:
    harness, numbers = TrainerHarness.make(root, MODEL), itertools.count()

    async def load() -> None:
        while True:
            newest = max((report.version for report in harness.reports()), default=PolicyVersion(1, 0))
            await harness.publish(*group(next(numbers), version=newest))
            await asyncio.sleep(EVERY_S)

    async def judge() -> list[str]:
        before = len(harness.reports())

        def left_to_do() -> list[str]:
            steps = len(harness.reports()) - before
            return [] if steps >= 3 else [f"it takes {steps} steps"]

        problems = await second_life(harness.trainer(training=TRAINING).run, load, left_to_do)
        verdict = await audit(BusHistory(harness.bus), RUN, lambda: read_manifests(root / "checkpoints"))
        problems += [f"audit: {violation}" for violation in verdict.violations]
        problems += [] if verdict.is_balanced else ["the audit does not balance"]
        return problems + _damaged(harness)

    subject = harness.trainer(training=TRAINING)
    yield Subject(subject.run, load, lambda: len(harness.reports()) > 2, judge)


def _damaged(harness: TrainerHarness) -> list[str]:
    """Versions that are announced, lie there, and are not what was announced."""
    problems = []
    for manifest in harness.root.glob("weights/*/" + MANIFEST):
        for file in WeightManifest.model_validate_json(manifest.read_bytes()).files:
            if sha256((manifest.parent / file.name).read_bytes()).hexdigest() != file.sha256:
                problems.append(f"{manifest.parent.name} calls itself whole, and {file.name} is another")
    return problems
