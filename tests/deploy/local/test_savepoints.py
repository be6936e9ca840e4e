"""`streamrl checkpoints`, and that audit and trainer understand what it did."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from streamrl.bus.history import BusHistory
from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing
from streamrl.cli.app import app
from streamrl.consumers.training.checkpoints.catalogue import read_manifests
from streamrl.consumers.training.checkpoints.savepoints import Savepoints, restore
from streamrl.deploy.wiring.broker import living_process
from streamrl.inspection.audit.audit import audit
from streamrl.inspection.audit.report import AuditReport
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import TrainerBeat, WorkerState
from streamrl.schemas.topics import HEARTBEATS
from tests.consumers.conftest import model_path  # noqa: F401
from tests.consumers.training.checkpoints.damaged_storage import Storage
from tests.consumers.training.checkpoints.test_savepoints import written
from tests.consumers.training.trainer_harness import LOOP, RUN, TRAINING, TrainerHarness
from tests.fakes.messages import heartbeat
from tests.progress import within

CONFIG = """
[run]
name = "{name}"
directory = "{directory}"
[data]
dataset = "chain_sum"
[generation]
engine = "emulated"
[training]
backend = "emulated"
"""


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    (run / "config.resolved.toml").write_text(CONFIG.format(name="r", directory=tmp_path / "runs"))
    (run / "kafka" / "node-0").mkdir(parents=True)  # a broker of its own, which ended with it
    written(Storage(run / "checkpoints", run), 2, 4)
    return run


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoints", *map(str, arguments)])
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        return getattr(error, "exit_code", 1), str(error)
    return result.exit_code, result.output


def listed(run: Path, *options: str) -> list[tuple[str, list[str], bool, bool, str]]:
    code, text = call("ls", "--run", run, "--json", *options)
    assert code == 0, text
    rows = [json.loads(line) for line in text.splitlines()]
    return [(row["version"], row["pinned"], row["next_start"], row["undone"], row["state"]) for row in rows]


def test_checkpoints_are_listed_pinned_restored_and_unpinned(stored: Path) -> None:
    assert listed(stored) == [("1-4", [], True, False, "sealed"), ("1-2", [], False, False, "sealed")]
    assert call("pin", 2, "--run", stored, "--name", "good")[0] == 0
    code, text = call("restore", "good", "--run", stored)
    assert code == 0
    assert text.splitlines() == [
        "the next start continues from checkpoint 1-2, step 2, in a new lineage",
        "undone, and kept until you unpin it: checkpoint 1-4 as undone-1-4",
    ]
    assert listed(stored, "--verify") == [
        ("1-4", ["undone-1-4"], False, True, "verified"),
        ("1-2", ["good"], True, False, "verified"),
    ]
    assert call("restore", 2, "--run", stored)[1].startswith("nothing to do: the next start continues from 1-2")
    assert call("unpin", "1-4", "--run", stored) == (
        0,
        "unpinned undone-1-4: the trainer may remove it after its next checkpoint\n",
    )
    assert "undone" in call("ls", "--run", stored)[1]


def test_damage_is_named_and_ends_with_code_4(stored: Path) -> None:
    assert call("verify", "--run", stored) == (0, "1-4 verified: 6 files, 0.0 MB\n1-2 verified: 6 files, 0.0 MB\n")
    Storage(stored / "checkpoints", stored).put(1, 4, "config.json", b"[]")
    code, text = call("verify", "--run", stored)
    assert code == 4
    assert "1-4 DAMAGED: expected " in text.replace("\n", " ")
    assert "config.json with sha256 " in text.replace("\n", " ")
    assert call("verify", 2, "--run", stored)[0] == 0
    assert call("ls", "--run", stored, "--verify")[0] == 4


def test_an_unknown_checkpoint_gives_one_line(stored: Path) -> None:
    code, text = call("restore", 7, "--run", stored)
    assert (code, text) == (2, "expected a checkpoint's step, version or pin, got '7'; there are: 1-4, 1-2")
    assert call("unpin", 2, "--run", stored) == (2, "expected a pinned checkpoint, got '2', which has no pin")


async def test_a_run_that_beats_is_alive_and_one_that_did_is_not() -> None:
    bus = MemoryBus()
    topic = HEARTBEATS.full_name(RUN)
    bus.create_topic(topic, 1)
    publisher = await bus.publisher("trainer")
    beat = TrainerBeat(algorithm="grpo", incarnation="a", version=PolicyVersion(1, 2), sequence=0, sent_at=0.0)
    await publisher.publish(Outgoing.of(topic, beat, key="grpo"))
    assert await living_process(bus, RUN, 0.05) is None
    asking = asyncio.create_task(living_process(bus, RUN, 5.0))
    await asyncio.sleep(0.01)
    await publisher.publish(Outgoing.of(topic, beat, key="grpo"))
    assert await asking == "trainer"


async def test_a_worker_that_says_that_it_stops_is_not_alive() -> None:
    bus = MemoryBus()
    topic = HEARTBEATS.full_name(RUN)
    bus.create_topic(topic, 1)
    publisher = await bus.publisher("worker")
    asking = asyncio.create_task(living_process(bus, RUN, 0.2))
    await asyncio.sleep(0.01)
    await publisher.publish(Outgoing.of(topic, heartbeat(state=WorkerState.STOPPED), key="w0"))
    assert await asking is None
    asking = asyncio.create_task(living_process(bus, RUN, 5.0))
    await asyncio.sleep(0.01)
    await publisher.publish(Outgoing.of(topic, heartbeat(), key="w0"))
    assert await asking == "worker w0"


async def audited(harness: TrainerHarness) -> AuditReport:
    return await audit(BusHistory(harness.bus), RUN, lambda: read_manifests(harness.root / "checkpoints"))


async def trained(harness: TrainerHarness, steps: int, first: int = 0, *, publish: bool = True) -> None:
    """Go on to a step."""
    training = TRAINING.model_copy(update={"max_steps": steps, "keep_checkpoints": 9})
    for number in range(first, LOOP.groups_per_step * steps if publish else first):
        await harness.publish_group(number, version=PolicyVersion(1, number // LOOP.groups_per_step))
    await within(harness.trainer(training=training).run(asyncio.Event()), 20)


async def test_a_restored_run_trains_the_undone_steps_again_and_its_audit_balances(
    tmp_path: Path,
    model_path: Path,  # noqa: F811
) -> None:
    harness = TrainerHarness.make(tmp_path, model_path)
    await trained(harness, 6)
    found = Savepoints.read(harness.store().storage)
    done = restore(found, found.find("2"), 7.0)
    assert done is not None
    assert sorted(done.undone.values()) == [(1, 4), (1, 6)]
    assert (await audited(harness)).is_balanced
    # A crash in between: the choice holds, and is told again.
    await trained(harness, 3, publish=False)
    await trained(harness, 6, publish=False)
    assert [report.parent for report in harness.reports() if not report.group_ids] == [None, (1, 2), (3, 3)]
    assert harness.trained_ids(3) + harness.trained_ids(4) == harness.trained_ids(1)[8:], (
        "those of steps 3 to 6, once more"
    )
    report = await audited(harness)
    assert report.is_balanced, report.violations
    (own,) = report.algorithms
    assert (own.rolled_back.steps, own.rolled_back.trained, own.undone.steps) == (4, 16, 0)
    assert (own.lineages, own.trained, own.pending) == ((1, 3, 4), 24, 0)
