"""The trainer of an attached instance is kept alive as a run's processes are; detaching ends it at any moment."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.deploy.local.supervisor import ChildSpec
from streamrl.policies.role_instance_trainer import NameHolder, supervise_instance, trainer_spec
from streamrl.schemas.control import InstanceState
from streamrl.schemas.errors import StreamRLError, Superseded, UserError
from streamrl.schemas.identifiers import scope_of
from streamrl.schemas.reports import InstanceBeat
from streamrl.schemas.topics import CONTROL, HEARTBEATS
from streamrl.settings.loading import load_settings
from streamrl.settings.tree import RunSettings
from tests.fakes.topics import send, send_control
from tests.fakes.waiting import until
from tests.progress import calm_s, patience

pytestmark = pytest.mark.processes

ATTACHED_AT = 7
ENDS_WELL = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (print('checkpoint written', flush=True), sys.exit(0)))\n"
    "print('ready', flush=True)\n"
    "time.sleep(60)"
)
DIES = "print('error: no room', flush=True); raise SystemExit(1)"


@dataclass
class Attached:
    """An instance with a fake trainer, whose starts and lines are in its log."""

    root: Path
    code: str
    max_restarts: int = 5
    bus: MemoryBus = field(default_factory=MemoryBus)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    said: int = 0

    def __post_init__(self) -> None:
        self.bus.create_topic(CONTROL.full_name("demo"), 1)

    @property
    def log(self) -> Path:
        return self.root / "logs" / "trainer.log"

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def start(self) -> "asyncio.Task[Sequence[str]]":
        command = [sys.executable, "-c", f"import os; print('pid', os.getpid(), flush=True)\n{self.code}"]
        spec = ChildSpec("trainer-second", command, self.log, essential=True)
        run = RunSettings(name="demo", instance="second", max_restarts=self.max_restarts)
        return asyncio.create_task(supervise_instance(spec, run, self.bus, ATTACHED_AT, self.stop))

    def pids(self) -> list[int]:
        return [int(line.split()[1]) for line in self.text().splitlines() if line.startswith("pid ")]

    async def say(self, mode: Literal["run", "pause", "detached"], command: int, policy: str = "second") -> None:
        message = InstanceState(
            sequence=self.said, sent_at=0.0, policy=policy, algorithm="rloo", mode=mode, command_offset=command
        )
        self.said += 1
        await send_control(self.bus, "demo", message)


async def test_a_crashed_trainer_is_restarted(tmp_path: Path) -> None:
    attached = Attached(tmp_path, ENDS_WELL)
    task = attached.start()
    await until(lambda: attached.text().count("ready") == 1)
    os.kill(attached.pids()[0], signal.SIGKILL)
    await until(lambda: attached.text().count("ready") == 2)
    attached.stop.set()
    async with patience(5):
        await task
    assert len(attached.pids()) == 2
    assert attached.text().count("checkpoint written") == 1


async def test_one_that_dies_too_often_ends_it_with_one_line(tmp_path: Path) -> None:
    attached = Attached(tmp_path, DIES, max_restarts=1)
    with pytest.raises(StreamRLError) as raised:
        await attached.start()
    expected = f"trainer-second ended with code 1, 2 times in a row: error: no room; its log is {attached.log}"
    assert (str(raised.value), raised.value.exit_code) == (expected, 1)


@pytest.mark.parametrize(("code", "kind"), [(2, UserError), (3, Superseded)])
async def test_a_user_error_or_a_superseded_trainer_is_not_restarted(
    tmp_path: Path, code: int, kind: type[StreamRLError]
) -> None:
    attached = Attached(tmp_path, f"print('error: it is so', flush=True); raise SystemExit({code})")
    with pytest.raises(kind, match="error: it is so"):
        await attached.start()
    assert len(attached.pids()) == 1


async def test_a_detached_instance_ends_well_and_is_not_started_again(tmp_path: Path) -> None:
    attached = Attached(tmp_path, ENDS_WELL)
    task = attached.start()
    await until(lambda: "ready" in attached.text())
    await attached.say("detached", ATTACHED_AT + 1)
    async with patience(5):
        await task
    assert attached.text().endswith("checkpoint written\n")
    assert len(attached.pids()) == 1


@pytest.mark.parametrize("how", ["detached", "stopped"])
async def test_a_detached_instance_is_not_restarted_however_long_it_would_wait(tmp_path: Path, how: str) -> None:
    attached = Attached(tmp_path, DIES, max_restarts=9)
    task = attached.start()
    # The pause behind the fourth crash is three seconds at least.
    await until(lambda: len(attached.pids()) == 4, timeout_s=30)
    await asyncio.sleep(0.3)
    began = calm_s()
    if how == "detached":
        await attached.say("detached", ATTACHED_AT + 1)
    else:
        attached.stop.set()
    await task
    assert calm_s() - began < 2
    assert len(attached.pids()) == 4


async def test_only_what_was_said_since_it_was_attached_counts_and_only_of_this_instance(tmp_path: Path) -> None:
    attached = Attached(tmp_path, ENDS_WELL)
    await attached.say("detached", ATTACHED_AT - 1)
    task = attached.start()
    await until(lambda: "ready" in attached.text())
    await attached.say("run", ATTACHED_AT)
    await attached.say("pause", ATTACHED_AT + 1)
    await attached.say("detached", ATTACHED_AT + 2, policy="third")
    await asyncio.sleep(0.3)
    assert not task.done()
    attached.stop.set()
    await task


def holder(bus: MemoryBus) -> NameHolder:
    return NameHolder(bus, "demo", "second", silent_after_s=0.5, beat_s=0.05)


def bus_of_an_instance() -> MemoryBus:
    bus = MemoryBus()
    bus.create_topic(HEARTBEATS.full_name(scope_of("demo", "second")), 1)
    return bus


async def test_a_name_is_held_once() -> None:
    """The second is refused, however often it asks, and the first is not disturbed."""
    bus = bus_of_an_instance()
    async with holder(bus).holding():
        for _ in range(2):
            with pytest.raises(
                UserError, match=r"expected no other command to attach second to run demo, got process \d+"
            ):
                async with holder(bus).holding():
                    raise AssertionError("it held the name too")


async def test_one_of_several_simultaneous_holders_gets_the_name() -> None:
    bus, held, over = bus_of_an_instance(), list[NameHolder](), asyncio.Event()

    async def hold(one: NameHolder) -> None:
        async with one.holding():
            held.append(one)
            await over.wait()

    tasks = [asyncio.create_task(hold(holder(bus))) for _ in range(3)]
    await until(lambda: sum(task.done() for task in tasks) == 2)
    over.set()
    refused = [error for error in await asyncio.gather(*tasks, return_exceptions=True) if error is not None]
    assert [type(error) for error in refused] == [UserError, UserError]
    assert len(held) == 1


async def test_a_name_is_free_at_once_when_it_was_given_back_and_after_a_while_when_its_command_died() -> None:
    bus, loop = bus_of_an_instance(), asyncio.get_running_loop()
    async with holder(bus).holding():
        pass
    began = loop.time()
    async with holder(bus).holding():
        assert loop.time() - began < 0.4
        dead = InstanceBeat(policy="second", incarnation="dead", sequence=0, sent_at=0.0)
        await send(bus, scope_of("demo", "second"), HEARTBEATS, dead, "second")
    began = loop.time()
    async with holder(bus).holding():
        assert 0.5 <= loop.time() - began < 5


def test_its_trainer_is_started_from_its_directory_with_the_broker_as_it_was_found(tmp_path: Path) -> None:
    given = ["--run.name=demo", "--run.instance=second", f"--run.directory={tmp_path}", "--data.dataset=chain_sum"]
    given += ["--model.path=m", "--kafka.bootstrap_servers=h:1", "--kafka.security_protocol=SASL_PLAINTEXT"]
    given += ["--kafka.sasl_plain_username=u", "--kafka.sasl_plain_password=hidden"]
    spec = trainer_spec(load_settings(None, given), adopt=True)
    own = tmp_path / "demo" / "instances" / "second"
    assert spec.command[-3:] == ["trainer", str(own / "config.resolved.toml"), "--kafka.bootstrap_servers=h:1"]
    assert (spec.log_path, spec.only_first) == (own / "logs" / "trainer.log", ["--adopt"])
    assert spec.environment == {"STREAMRL_KAFKA__SASL_PLAIN_PASSWORD": "hidden"}
    assert "hidden" not in repr(spec)
