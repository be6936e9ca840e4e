"""`streamrl audit --follow` on a bus in memory: what it tells, keeps, serves, and how it ends."""

import asyncio
import json
from pathlib import Path

import pytest

from streamrl.bus.history import BusHistory
from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing
from streamrl.consumers.training.checkpoints.manifest import MANIFEST, STATE, encode_manifest
from streamrl.inspection.audit.following import NOT_BALANCED, AuditMeter, Following, FollowOptions, closing_report
from streamrl.inspection.source import PastRun
from streamrl.observability.metrics.families import Meters
from streamrl.schemas.errors import BusUnavailable, DataError
from streamrl.schemas.topics import STEPS
from streamrl.settings.loading import load_settings
from streamrl.settings.run_directory import RunDirectory
from tests.fakes.topics import create_topics
from tests.inspection.audit.test_balance import busy_world
from tests.inspection.audit.test_violations import change, trained_and_skipped
from tests.inspection.audit.written_topics import RUN, WrittenTopics
from tests.progress import patience

SOON = 0.01


class FollowingHarness:
    """A run's directory, and its topics on a bus, to which a world is written bit by bit."""

    def __init__(self, folder: Path, world: WrittenTopics) -> None:
        self.world, self.bus = world, create_topics(MemoryBus(), RUN, 3)
        directory = RunDirectory(folder / RUN)
        directory.create()
        directory.config.write_text(f'[run]\nname = "{RUN}"\n[model]\npath = "absent"\n[data]\npath = "absent"\n')
        self.past = PastRun(directory, load_settings(directory.config, []))
        self.written, self.said = 0, list[str]()
        self.meters = Meters(RUN)

    async def write(self, until: int | None = None) -> None:
        publisher = await self.bus.publisher("p")
        for _, out in self.world.written[self.written : until]:
            await publisher.publish(out)
        self.written = len(self.world.written) if until is None else until
        for saved in self.world.saved:
            if saved.after <= self.written:
                state = self.past.directory.checkpoints / f"step_{saved.manifest.step}" / STATE
                state.mkdir(parents=True, exist_ok=True)
                (state / MANIFEST).write_bytes(encode_manifest(saved.manifest))

    def following(self, options: FollowOptions, history: BusHistory | None = None) -> Following:
        history = history or BusHistory(self.bus)
        return Following(self.past, history, options, AuditMeter(self.meters), say=self.said.append)

    def figure(self, name: str, **labels: str) -> float | None:
        return self.meters.registry.get_sample_value(name, {"run": RUN, **labels})


def finished(world: WrittenTopics) -> WrittenTopics:
    """The same world, in which the last report says that it was the last."""
    world.checkpoint()
    last = world.last_report
    change(world, STEPS, lambda message: message.replace(finished=True) if message == last else message)
    return world


async def until(condition: "asyncio.Future[int] | None", said: list[str], text: str) -> None:
    async with patience(20):
        while not any(text in line for line in said):
            assert condition is None or not condition.done()
            await asyncio.sleep(SOON)


async def test_it_ends_with_0_when_the_run_is_finished_and_balanced(tmp_path: Path) -> None:
    harness = FollowingHarness(tmp_path, finished(busy_world(1)))
    await harness.write(300)
    following = harness.following(FollowOptions(SOON))
    running = asyncio.ensure_future(following.run(asyncio.Event()))
    await until(running, harness.said, "; 0 new")
    await harness.write()
    async with patience(20):
        assert await running == 0
    following.close()
    assert all(" balanced: " in line for line in harness.said[:-1])
    assert "skipped + " in harness.said[0]
    assert harness.said[-1].endswith("the run is finished")
    assert harness.figure("streamrl_audit_balanced", algorithm="grpo") == 1
    assert harness.figure("streamrl_audit_lag_records") == 0
    pending = harness.figure("streamrl_audit_pending_trajectories", algorithm="grpo")
    assert pending == len(harness.world.pending())
    # What it knows is in the run's directory: the next one reads nothing again.
    again = harness.following(FollowOptions(SOON))
    assert (await again.round()).is_balanced
    again.close()
    assert again.new_records == 0


async def test_it_ends_with_4_as_soon_as_the_books_do_not_balance(tmp_path: Path) -> None:
    world = busy_world(1)
    good = len(world.written)
    planted = trained_and_skipped(world)
    harness = FollowingHarness(tmp_path, world)
    await harness.write(good)
    following = harness.following(FollowOptions(SOON, fail_fast=True))
    running = asyncio.ensure_future(following.run(asyncio.Event()))
    await until(running, harness.said, " balanced: ")
    await harness.write()
    async with patience(20):
        assert await running == NOT_BALANCED
    following.close()
    assert "NOT BALANCED, 1 problems: " in harness.said[-2]
    assert planted.name is not None
    assert f"two_fates: {planted.name} at partition" in harness.said[-1]
    assert harness.figure("streamrl_audit_balanced", algorithm="grpo") == 0
    assert harness.figure("streamrl_audit_problems_total", algorithm="grpo", kind="two_fates") == 1


async def test_a_stop_keeps_what_was_read_and_the_verdict_is_the_exit_code(tmp_path: Path) -> None:
    harness, stop = FollowingHarness(tmp_path, busy_world(0)), asyncio.Event()
    await harness.write()
    following = harness.following(FollowOptions(60.0, as_json=True))
    running = asyncio.ensure_future(following.run(stop))
    await until(running, harness.said, '"balanced": true')
    stop.set()
    async with patience(5):
        assert await running == 0
    following.close()
    told = json.loads(harness.said[0])
    assert told["new_records"] == len(harness.world.written)
    assert told["algorithms"]["grpo"]["trained"] == len(harness.world.current.trained)
    report = await closing_report(harness.past, BusHistory(harness.bus))
    assert report.is_balanced
    assert report.produced == told["produced"]


async def test_a_broker_that_is_away_for_a_while_is_asked_again(tmp_path: Path) -> None:
    harness, stop = FollowingHarness(tmp_path, busy_world(0)), asyncio.Event()
    away = False

    class Flaky(BusHistory):
        async def extents(self, *topics: str):  # type: ignore[no-untyped-def]
            if away:
                raise BusUnavailable("no broker answers")
            return await super().extents(*topics)

    await harness.write()
    following = harness.following(FollowOptions(SOON), Flaky(harness.bus))
    running = asyncio.ensure_future(following.run(stop))
    await until(running, harness.said, "; 0 new")
    away = True
    await until(running, harness.said, "trying again: no broker answers")
    away = False
    harness.said.clear()
    await until(running, harness.said, " balanced: ")
    stop.set()
    assert await running == 0
    following.close()


async def test_recreated_topics_are_followed_from_their_beginning(tmp_path: Path) -> None:
    harness = FollowingHarness(tmp_path, busy_world(0))
    await harness.write()
    following = harness.following(FollowOptions(SOON))
    await following.round()
    following.close()
    other = FollowingHarness(tmp_path / "other", busy_world(1))
    await other.write()
    anew = Following(other.past, BusHistory(other.bus), FollowOptions(SOON), None, say=harness.said.append)
    anew.close()
    other.past.directory.audit.write_bytes(harness.past.directory.audit.read_bytes())
    anew = Following(other.past, BusHistory(other.bus), FollowOptions(SOON), None, say=harness.said.append)
    report = await anew.round()
    anew.close()
    assert report.is_balanced
    assert report.produced == sum(map(len, other.world.log.values()))
    assert "recreated; starting again" in harness.said[-1]


async def test_a_record_that_does_not_decode_ends_it(tmp_path: Path) -> None:
    harness = FollowingHarness(tmp_path, busy_world(0))
    await harness.write()
    await (await harness.bus.publisher("p")).publish(Outgoing(STEPS.full_name(RUN), b"?", None, 0))
    following = harness.following(FollowOptions(SOON))
    with pytest.raises(DataError, match=r"steps\[0\]@"):
        await following.run(asyncio.Event())
    following.close()
