"""An instance beside the served trainer, on a bus in memory: what is its own, and what the run has to say to it."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from streamrl.bus.history import BusHistory
from streamrl.bus.memory import MemoryBus, MemorySubscription
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.ingest.settings import IngestSettings
from streamrl.consumers.training.session import TrainerContext, TrainerParts
from streamrl.consumers.training.trainer import Trainer
from streamrl.inspection.audit.audit import audit
from streamrl.inspection.audit.follower import AuditFollower
from streamrl.inspection.audit.report import AlgorithmBalance
from streamrl.inspection.audit.state import FollowedRun
from streamrl.inspection.export import USUAL, Exporter, SegmentHistory
from streamrl.policies.attachment import SharedStream
from streamrl.policies.following_trainer import FollowingTrainer
from streamrl.schemas.control import Control, InstanceState, Promotion, RunFinished, Served, WeightsReady
from streamrl.schemas.errors import BusUnavailable, IdentityError, SettingsError
from streamrl.schemas.identifiers import PolicyVersion, named_version, parse_scope, scope_of
from streamrl.schemas.topics import INSTANCE_TOPICS
from tests.consumers.training.trainer_harness import LOOP, RUN, TRAINING, TrainerHarness, group
from tests.fakes.topics import send_control
from tests.progress import within

NAME = "second"


@dataclass
class InstanceHarness:
    """A run whose served trainer has worked, and a harness of an instance beside it. ``said``: control messages."""

    served: TrainerHarness
    own: TrainerHarness
    said: int = 0

    @classmethod
    async def make(cls, root: Path, model_path: Path, groups: int = 4) -> "InstanceHarness":
        served = TrainerHarness.make(root, model_path)
        scope = scope_of(RUN, NAME)
        for topic in INSTANCE_TOPICS:
            served.bus.create_topic(topic.full_name(scope), 1)
        harness = cls(served, InstanceTrainerHarness(served.bus, root / "instances" / NAME, model_path))
        async with served.running(served.trainer()):
            for number in range(groups):
                await served.publish_group(number)
            await served.until_version(1, groups // LOOP.groups_per_step)
        return harness

    async def say(self, kind: type[Control], **fields: Any) -> None:
        message = kind(sequence=self.said, sent_at=0.0, **fields)
        self.said += 1
        await send_control(self.served.bus, RUN, message)

    async def attach(self, mode: str = "run") -> None:
        await self.say(InstanceState, policy=NAME, algorithm="rloo", mode=mode)

    async def serve(self, number: int) -> None:
        await self.say(
            WeightsReady, version=PolicyVersion(1, number), step=number, manifest_sha256="0" * 64, relays=("http://r",)
        )

    def instance(self, begin: Any = "beginning", within_s: float = 0.5, **changes: Any) -> FollowingTrainer:
        ingest = changes.pop("ingest", IngestSettings()).model_copy(update={"attach_from": begin})
        context = self.own.context(policy=NAME, algorithm=AlgorithmSettings(name="rloo"), ingest=ingest, **changes)
        return FollowingTrainer(context, beat_s=0.05, attached_within_s=within_s)

    @asynccontextmanager
    async def running(self, role: FollowingTrainer) -> AsyncIterator["asyncio.Task[None]"]:
        stop = asyncio.Event()
        task = asyncio.create_task(role.run(stop))
        try:
            yield task
        finally:
            stop.set()
            await asyncio.wait({task}, timeout=20)
        task.result()

    async def balances(self) -> dict[str, AlgorithmBalance]:
        """By account; all of them balanced."""
        manifests = [
            each.manifest for harness in (self.served, self.own) for each in read(harness) if each.manifest is not None
        ]
        history = BusHistory(self.served.bus, client_id="audit")
        report = await audit(history, RUN, lambda: manifests)
        assert report.is_balanced, report.violations
        followed = await AuditFollower(history, lambda: manifests, FollowedRun(RUN)).advance()
        assert followed.algorithms == report.algorithms
        return {each.algorithm: each for each in report.algorithms}


class InstanceTrainerHarness(TrainerHarness):
    """Looks at the instance's own topics."""

    def messages(self, topic: str) -> list[Any]:
        log = self.bus.log(f"{scope_of(RUN, NAME)}.{topic}")
        return [record.message() for record in log.partitions[0] if record.value]


def read(harness: TrainerHarness) -> list[Any]:
    from streamrl.consumers.training.checkpoints.catalogue import read_entries

    return read_entries(harness.store().storage)


def own_bytes(bus: MemoryBus) -> list[bytes | None]:
    """All that is on topics of the run itself, but for its stream."""
    names = [f"{RUN}.{name}" for name in ("steps", "skips", "dead-letters", "heartbeats")]
    return [record.value for name in names for log in bus.log(name).partitions for record in log]


@pytest.fixture
async def harness(tmp_path: Path, model_path: Path) -> InstanceHarness:
    return await InstanceHarness.make(tmp_path, model_path)


def test_names_of_an_instance_tell_its_run_and_its_policy() -> None:
    assert (scope_of("demo", "policy"), scope_of("demo", "rloo")) == ("demo", "demo.policy.rloo")
    assert (parse_scope("demo"), parse_scope("demo.policy.rloo")) == (("demo", "policy"), ("demo", "rloo"))
    version = PolicyVersion(1, 20)
    assert [named_version(name, version) for name in (None, "policy", "rloo")] == ["1-20", "1-20", "rloo/1-20"]


async def test_the_run_is_unaffected_by_an_instance_and_each_accounts_for_every_record(
    harness: InstanceHarness,
) -> None:
    before = own_bytes(harness.served.bus)
    await harness.attach()
    async with harness.running(harness.instance()):
        await harness.own.until_version(1, 2)
    assert own_bytes(harness.served.bus) == before
    reports = harness.own.reports()
    assert {(report.policy, report.algorithm) for report in reports} == {(NAME, "rloo")}
    assert {report.policy for report in harness.served.reports()} == {None}
    found = await harness.balances()
    assert {name: (own.trained, own.pending) for name, own in found.items()} == {"grpo": (8, 0), NAME: (8, 0)}


async def test_an_export_takes_an_instance_along(harness: InstanceHarness, tmp_path: Path) -> None:
    await harness.attach()
    async with harness.running(harness.instance()):
        await harness.own.until_version(1, 2)
    manifests = [each.manifest for harness in (harness.served, harness.own) for each in read(harness)]
    history, to = BusHistory(harness.served.bus, client_id="export"), tmp_path / "export"
    await Exporter(history, RUN, tmp_path, to, "jsonl").export(USUAL, manifests)
    exported = SegmentHistory(to)
    report = await audit(exported, RUN, lambda: exported.manifest.checkpoints)
    assert {own.algorithm: (own.trained, own.is_balanced) for own in report.algorithms} == {
        "grpo": (8, True),
        NAME: (8, True),
    }


async def test_an_instance_that_was_killed_goes_on_from_its_checkpoint_and_trains_nothing_twice(
    harness: InstanceHarness,
) -> None:
    await harness.attach()
    role = harness.instance()
    task = asyncio.create_task(role.run(asyncio.Event()))
    await harness.own.until_version(1, 2)
    task.cancel()  # without a checkpoint of what came since
    await asyncio.wait({task})
    for number in range(4, 8):
        await harness.served.publish_group(number)
    async with harness.running(harness.instance()):
        await harness.own.until_version(2, 4)
    found = (await harness.balances())[NAME]
    assert (found.trained, found.pending, found.lineages) == (16, 0, (1, 2))


async def test_an_instance_that_is_cancelled_twice_leaves_no_task(harness: InstanceHarness) -> None:
    await harness.attach()
    before = asyncio.all_tasks()
    for turns in range(1, 5):
        task = asyncio.create_task(harness.instance().run(asyncio.Event()))
        await harness.own.until_version(turns, 0)
        task.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before


async def test_its_lineages_begin_above_all_that_lies_where_its_weights_go(harness: InstanceHarness) -> None:
    """Of an earlier life, say, whose checkpoints are gone."""
    await harness.attach()
    (harness.own.root / "weights" / "7-3").mkdir(parents=True)
    async with harness.running(harness.instance()):
        await harness.own.until_version(8, 2)
    assert {path.name for path in (harness.own.root / "weights").iterdir()} == {"7-3", "8-0", "8-1", "8-2"}


async def test_a_late_export_of_a_former_policy_is_refused_and_it_trains_on(
    harness: InstanceHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another policy is promoted, and the former one's trainer has not heard of it."""
    await harness.attach()
    async with harness.running(harness.instance("now")):
        # Skips tell that it knows where "now" is: what comes sooner may lie before that.
        await harness.own.until(lambda: bool(harness.own.reports()) and bool(harness.own.skips()))
        (harness.own.root / "weights" / "2-9").mkdir()
        for number in range(4, 8):
            await harness.served.publish_group(number)
        await harness.own.until_version(1, 2)
    assert [report.manifest_sha256 is None for report in harness.own.reports()] == [False, True, True]
    lines = [line for line in capsys.readouterr().out.splitlines() if "weights not exported" in line]
    assert len(lines) == 2
    assert "expected nothing newer than 1-1 in " in lines[0]
    assert {path.name for path in (harness.own.root / "weights").iterdir()} == {"1-0", "2-9"}


async def test_an_instance_attached_from_now_skips_earlier_records_with_one_row_a_partition(
    harness: InstanceHarness,
) -> None:
    await harness.attach()
    async with harness.running(harness.instance("now")):
        await harness.own.until(lambda: bool(harness.own.reports()) and bool(harness.own.skips()))
        for number in range(4, 8):
            await harness.served.publish_group(number)
        await harness.own.until_version(1, 2)
    assert {row.reason.value for row in harness.own.skips()} == {"before_attach"}
    assert len(harness.own.skips()) <= LOOP.trajectory_partitions
    found = (await harness.balances())[NAME]
    assert (found.skipped, found.trained, found.pending) == ({"before_attach": 8}, 8, 0)


async def test_an_instance_that_is_attached_starts_however_long_it_reads_that(harness: InstanceHarness) -> None:
    await harness.attach()
    async with harness.running(harness.instance(within_s=0.0)):
        await harness.own.until_version(1, 2)


async def test_a_paused_instance_takes_nothing_and_goes_on_where_it_was(harness: InstanceHarness) -> None:
    await harness.attach("pause")
    async with harness.running(harness.instance()):
        await harness.own.until(lambda: bool(harness.own.reports()))
        await asyncio.sleep(0.5)
        assert [report.version for report in harness.own.reports()] == [(1, 0)]
        await harness.attach("run")
        await harness.own.until_version(1, 2)


async def test_a_detached_instance_ends_with_a_checkpoint_and_can_come_back(harness: InstanceHarness) -> None:
    await harness.attach()
    role = harness.instance()
    async with harness.running(role) as task:
        await harness.own.until_version(1, 2)
        await harness.attach("detached")
        await within(asyncio.shield(task), 10)
    with pytest.raises(SettingsError, match=f"expected instance {NAME} to be attached to run {RUN}, got detached"):
        await harness.instance().run(asyncio.Event())
    await harness.attach()
    async with harness.running(harness.instance()):
        await harness.own.until(lambda: harness.own.reports()[-1].version == (2, 2))


async def test_an_instance_ends_when_the_run_is_finished_and_read(harness: InstanceHarness) -> None:
    await harness.attach()
    await harness.served.publish_group(4)  # half a step
    await harness.say(RunFinished, step=2, reason="the trainer reached its last step")
    async with harness.running(harness.instance()) as task:
        await within(asyncio.shield(task), 15)
    found = (await harness.balances())[NAME]
    assert (found.trained, found.pending) == (8, 2)


async def test_a_broker_that_goes_away_with_the_run_is_not_waited_for(
    harness: InstanceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.attach()
    role = replace(harness.instance(), gone_after_s=0.5)
    async with harness.running(role) as task:
        await harness.own.until_version(1, 2)
        await harness.served.publish_group(4)  # half a step: there is something to wait with
        await harness.say(RunFinished, step=2, reason="the trainer reached its last step")

        async def silent(self: MemorySubscription, partitions: Any = None) -> Any:
            raise BusUnavailable("expected the broker to answer, got connection refused")

        monkeypatch.setattr(MemorySubscription, "end_offsets", silent)
        await within(asyncio.shield(task), 10)


async def test_an_error_after_the_runs_end_restarts_the_instance_while_its_broker_answers(
    harness: InstanceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last step may be in its checkpoint and not reported yet."""
    await harness.attach()
    await harness.say(RunFinished, step=2, reason="the trainer reached its last step")

    async def failing(self: Trainer, _stop: asyncio.Event) -> None:
        assert isinstance(self.context.standing, SharedStream)
        while not self.context.standing.attachment.run_is_over:
            await asyncio.sleep(0.01)
        raise BusUnavailable("expected a leader of the partition, got none")

    monkeypatch.setattr(Trainer, "run", failing)
    with pytest.raises(BusUnavailable, match="expected a leader"):
        await within(harness.instance().run(asyncio.Event()), 10)


async def test_age_is_counted_in_served_versions_and_bounded_by_a_setting(harness: InstanceHarness) -> None:
    await harness.attach()
    await harness.serve(3)
    # Groups 0 and 1 were sampled by version 0, 2 and 3 by version 1; served is 3.
    async with harness.running(harness.instance(ingest=IngestSettings(max_served_age=2))):
        await harness.own.until_version(1, 1)
    assert {(row.reason.value, row.group_id) for row in harness.own.skips()} == {("stale", "p/0/0"), ("stale", "p/1/0")}
    assert "served versions of age" in harness.own.skips()[0].detail
    assert harness.own.reports()[-1].metrics["off_policy/mean"] == 2.0


async def test_a_group_whose_sample_never_comes_is_closed_by_what_was_served_when_all_was_read(
    harness: InstanceHarness,
) -> None:
    await harness.attach()
    await harness.served.publish(group(4)[0])  # of two
    await harness.serve(40)
    async with harness.running(harness.instance()):
        await harness.own.until(lambda: bool(harness.own.skips()))
    assert [(row.reason.value, row.trajectory_id) for row in harness.own.skips()] == [("group_incomplete", "p/4/0/0")]


async def test_an_instance_that_adopts_trains_what_served_lineages_sampled(harness: InstanceHarness) -> None:
    await harness.attach()
    async with harness.running(harness.instance()):
        await harness.own.until_version(1, 2)
    lost = InstanceTrainerHarness(harness.served.bus, harness.own.root.with_name("elsewhere"), harness.own.model_path)
    harness.own = lost
    async with harness.running(harness.instance(adopt=True)):
        await lost.until_version(2, 2)
    assert lost.skips() == []


async def test_the_directory_of_an_instance_of_another_run_is_refused(harness: InstanceHarness) -> None:
    await harness.attach()
    async with harness.running(harness.instance()):
        await harness.own.until_version(1, 2)
    role = harness.instance()
    identity = role.context.run.identity
    stranger = identity.load()
    assert stranger is not None
    assert identity.swap(stranger, stranger.replace(run_id="another"))
    with pytest.raises(IdentityError, match=f"expected the directory of instance {NAME} to belong to run {RUN}"):
        await replace(role).run(asyncio.Event())


async def test_two_instances_and_the_served_trainer_do_not_fence_each_other(harness: InstanceHarness) -> None:
    await harness.attach()
    served = harness.served.trainer(training=TRAINING)
    stop = asyncio.Event()
    task = asyncio.create_task(served.run(stop))
    # One after the other: models are not loaded in two threads of a process at once.
    await harness.served.until(lambda: harness.served.reports()[-1].version == (2, 2))
    async with harness.running(harness.instance()):
        await harness.own.until_version(1, 2)
        for number in range(4, 8):
            await harness.served.publish_group(number)
        await harness.served.until(lambda: harness.served.reports()[-1].version == (2, 4))
        await harness.own.until_version(1, 4)
    stop.set()
    await within(task, 20)
    found = await harness.balances()
    assert {name: own.trained for name, own in found.items()} == {"grpo": 16, NAME: 16}


async def test_the_runs_own_trainer_stays_after_its_last_step_and_can_be_served_again(
    harness: InstanceHarness,
) -> None:
    """Another policy is served: the end of the own one's steps is not the run's."""
    await harness.serve(2)
    await harness.say(Served, policy=NAME, since=PolicyVersion(1, 2))
    training = TRAINING.model_copy(update={"max_steps": 2})
    async with harness.running(FollowingTrainer(harness.served.context(training=training), beat_s=0.05)) as task:
        await harness.served.until(lambda: harness.served.reports()[-1].finished)
        beats = len(harness.served.messages("heartbeats"))
        await harness.served.until(lambda: len(harness.served.messages("heartbeats")) > beats + 10)
        assert not task.done()
        await harness.say(Served, policy="policy", since=PolicyVersion(4, 9))
        await within(task, 20)
    last = harness.served.reports()[-1]
    assert (last.version, last.served_as, last.finished) == ((5, 2), (5, 10), True)


async def test_the_end_of_an_earlier_life_is_not_believed_by_the_run_s_own_trainer_before_a_while(
    harness: InstanceHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.policies.following_trainer.CONTINUED_WITHIN_S", 3.0)
    await harness.serve(2)
    await harness.say(Served, policy=NAME, since=PolicyVersion(1, 2))
    await harness.say(RunFinished, step=2)
    began = asyncio.get_running_loop().time()
    async with harness.running(FollowingTrainer(harness.served.context(), beat_s=0.05)) as task:
        await within(task, 20)
    assert asyncio.get_running_loop().time() - began > 3.0


async def test_one_policy_is_served_and_a_promotion_begins_a_lineage_above_all_that_were(
    harness: InstanceHarness,
) -> None:
    """The instance's weights are exported under a served version, and the run's own trainer goes on beside it."""
    await harness.attach()
    await harness.serve(2)
    opened: list[tuple[str, bool]] = []
    one_at_a_time = threading.Lock()  # both load a model in this process

    def role(context: TrainerContext) -> FollowingTrainer:
        def open_policy(restored: Any) -> Any:
            with one_at_a_time:
                return context.parts.open_policy(restored)

        def parts_of(is_served: bool) -> TrainerParts:
            opened.append((context.run.policy, is_served))
            return replace(context.parts, open_policy=open_policy)

        return FollowingTrainer(context, beat_s=0.05, attached_within_s=0.5, parts_of=parts_of)

    instance, own = role(harness.instance().context), role(harness.served.context())
    async with harness.running(instance), harness.running(own):
        await harness.own.until_version(1, 2)
        await harness.served.until(lambda: harness.served.reports()[-1].version == (2, 2))
        await harness.say(Served, policy=NAME, since=PolicyVersion(1, 2))
        await harness.own.until(lambda: harness.own.reports()[-1].served_as is not None)
        await harness.served.until(lambda: harness.served.reports()[-1].version == (3, 2))
        first = harness.own.reports()[-1]
        assert (first.version, first.served_as) == ((2, 2), (2, 3))
        promotion = Promotion(policy=NAME, since=PolicyVersion(1, 2), lineage=2, shift=1)
        await harness.say(
            WeightsReady,
            version=PolicyVersion(2, 3),
            step=2,
            manifest_sha256="0" * 64,
            relays=("http://r",),
            promotion=promotion,
        )
        for number in range(4, 6):
            await harness.served.publish_group(number)
        await harness.own.until_version(2, 3)
        await harness.served.until(lambda: harness.served.reports()[-1].version == (3, 3))
        assert harness.own.reports()[-1].served_as == (2, 4)
        assert harness.served.reports()[-1].served_as is None
    assert set(opened) == {(NAME, False), ("policy", True), (NAME, True), ("policy", False)}
    # A restart goes on in the same numbers.
    async with harness.running(role(harness.instance().context)):
        await harness.own.until(lambda: harness.own.reports()[-1].version == (3, 3))
        assert harness.own.reports()[-1].served_as == (3, 4)
    found = await harness.balances()
    assert {name: (own.trained, own.pending) for name, own in found.items()} == {"grpo": (12, 0), NAME: (12, 0)}
