"""A run that goes on with a mirror of its trajectories: other offsets, partitions and order, and some missing."""

import asyncio
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.history import BusHistory
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.limits import ClientLimits
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.bus.port import Bus, Outgoing
from streamrl.consumers.ingest.settings import IngestSettings
from streamrl.consumers.training.checkpoints.catalogue import read_manifests
from streamrl.inspection.audit.audit import audit
from streamrl.inspection.audit.report import AlgorithmBalance
from streamrl.schemas.errors import DataLossRefused
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import SKIPS, STEPS, TRAJECTORIES, Topic
from tests.consumers.conftest import model_path  # noqa: F401
from tests.consumers.training.trainer_harness import LOOP, RUN, TRAINING, TrainerHarness, group
from tests.progress import within

GO_ON = IngestSettings(translate_offsets=True)
PATIENT = ClientLimits(connect_timeout_s=60.0)
"""Two brokers share this machine with other tests; a client of the second one has needed more than four seconds."""
LOST = {"p/0/0/1", "p/6/0/0"}
"""One that was trained, and one that was not."""


@dataclass
class Cluster:
    """A bus with the topics of one run."""

    bus: Bus
    run: str

    async def publish(self, *numbers: int) -> None:
        publisher = await self.bus.publisher("worker")
        for number in numbers:
            for sample in group(number):
                partition = number % LOOP.trajectory_partitions
                topic = TRAJECTORIES.full_name(self.run)
                await publisher.publish(Outgoing.of(topic, sample, key=sample.group_id, partition=partition))
        await publisher.close()

    async def copy_to(self, other: "Cluster", topic: Topic, lost: set[str]) -> None:
        """All records of a topic in reverse order, each in the partition after its own."""
        name, publisher = topic.full_name(self.run), await other.bus.publisher("mirror")
        records = [record async for record in BusHistory(self.bus).records(name)]
        for record in reversed(records) if topic is TRAJECTORIES else records:
            message = record.message()
            if getattr(message, "trajectory_id", None) in lost:
                continue
            partition = (record.partition + 1) % topic.partition_count(LOOP.trajectory_partitions)
            await publisher.publish(
                Outgoing(topic.full_name(other.run), record.value, record.key, partition, record.headers)
            )
        await publisher.close()

    async def train(self, root: Path, model: Path, steps: int, ingest: IngestSettings | None = None) -> None:
        training = TRAINING.model_copy(update={"max_steps": steps})
        trainer = TrainerHarness.make(root, model).trainer(
            bus=self.bus, name=self.run, training=training, ingest=ingest or IngestSettings()
        )
        await within(trainer.run(asyncio.Event()), 60)

    async def trained(self, lineage: int) -> list[str]:
        records = BusHistory(self.bus).records(STEPS.full_name(self.run))
        reports = [record.message() async for record in records]
        return [
            ref.trajectory_id
            for report in reports
            if isinstance(report, StepReport) and report.version.lineage == lineage
            for ref in report.trained_refs
        ]

    async def audited(self, root: Path) -> AlgorithmBalance:
        report = await audit(BusHistory(self.bus), self.run, lambda: read_manifests(root / "checkpoints"))
        assert report.is_balanced, report.violations
        return report.algorithms[0]


async def go_on(one: Cluster, other: Cluster, root: Path, model: Path, *, mirrored: bool) -> None:
    await one.publish(*range(8))
    await one.train(root, model, 3)
    await one.copy_to(other, TRAJECTORIES, LOST)
    if mirrored:
        await one.copy_to(other, STEPS, set())
        await one.copy_to(other, SKIPS, set())
    with pytest.raises(DataLossRefused, match=r"--ingest\.translate_offsets true"):
        await other.train(root, model, 4)
    await other.publish(*range(8, 13))
    await other.train(root, model, 6, GO_ON)
    before, after = await one.trained(1), await other.trained(3)
    assert sorted(before) == sorted(sample.trajectory_id for number in range(6) for sample in group(number))
    expected = [sample.trajectory_id for number in range(7, 13) for sample in group(number)]
    assert sorted(after) == sorted(expected), "nothing twice, nothing lost"
    own = await other.audited(root)
    assert (own.trained, own.carried_over, own.pending, own.lineages) == (12, 11, 1, (3,))
    assert own.undone.steps == own.rolled_back.steps == 0
    assert any("at most 1 finished records were not found" in note for note in own.notes)
    # From its first checkpoint there on, it is a run like any other.
    await other.publish(13, 14)
    await other.train(root, model, 7)
    own = await other.audited(root)
    assert (own.trained, own.carried_over, own.pending, own.lineages) == (16, 11, 1, (3, 4))


@pytest.mark.parametrize("mirrored", [True, False])
async def test_on_a_mirror_nothing_is_trained_twice_and_its_audit_balances(
    tmp_path: Path,
    model_path: Path,  # noqa: F811
    mirrored: bool,
) -> None:
    clusters = [Cluster(TrainerHarness.make(tmp_path, model_path).bus, RUN) for _ in range(2)]
    await go_on(clusters[0], clusters[1], tmp_path, model_path, mirrored=mirrored)


async def test_a_run_moves_from_one_broker_to_another(
    tmp_path: Path,
    model_path: Path,  # noqa: F811
    bootstrap_servers: str,
) -> None:
    run = f"moved-{uuid.uuid4().hex[:8]}"
    with start_cluster(tmp_path / "kafka") as second:
        clusters = []
        for servers in (bootstrap_servers, second.bootstrap_servers):
            await apply_topics(servers, run, LOOP.trajectory_partitions)
            clusters.append(Cluster(KafkaBus(KafkaSettings(bootstrap_servers=servers), limits=PATIENT), run))
        await go_on(clusters[0], clusters[1], tmp_path / "run", model_path, mirrored=False)
