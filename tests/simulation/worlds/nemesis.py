"""Does harm to a world, act by act, as its seed says; then makes everything whole again and waits for the end."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from random import Random

from streamrl.bus.port import Outgoing, TopicPartition
from streamrl.consumers.training.checkpoints.savepoints import Savepoints, restore
from streamrl.schemas.control import OperatorCommand
from streamrl.schemas.errors import CheckpointError, UserError
from streamrl.schemas.identifiers import SERVED_POLICY
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import COMMANDS, STEPS, TRAJECTORIES, UNGRADED
from tests.simulation.bus.faults import FaultRates
from tests.simulation.bus.network import NODES
from tests.simulation.clocks import STEPS_S
from tests.simulation.history import Problem
from tests.simulation.worlds.crew import INSTANCE, RUN
from tests.simulation.worlds.scenarios import CALM, Harm
from tests.simulation.worlds.world import Incarnation, World

QUIET = replace(CALM, latency_s=0.01)
POISON = (b"", b"\xff" * 12, b"\x00\x00\x00\x7fabc", None, b"\x04\x00\x00\x00\x81\xa1a\x01")
LAST_WORDS_S = 20.0


class Nemesis:
    """Acts on one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = Random(f"nemesis/{world.setup.scenario}/{world.setup.seed}")
        self._acts = [(field.name, getattr(world.setup.harm, field.name)) for field in fields(Harm)]
        self._zombies: list[Incarnation] = []
        self._pending: set[asyncio.Task[None]] = set()

    async def torment(self) -> None:
        """Harm for a while, then heal; returns when the run has ended, or should have."""
        world, setup = self._world, self._world.setup
        for role in world.crew.roles():
            world.start(role)
        if setup.attached_from:
            await self._command("attach", INSTANCE)
        names, weights = zip(*self._acts, strict=True)
        until = world.loop.time() + setup.harm_for_s
        while sum(weights) > 0 and world.loop.time() < until and not (world.is_announced_finished or world.problems):
            await asyncio.sleep(setup.harm_every_s * (0.3 + 1.4 * self._chance.random()))
            act = self._chance.choices(names, weights)[0]
            await getattr(self, f"_{act}")()
        if not sum(weights):
            await self._until_finished(setup.harm_for_s)
        await self._heal()
        is_over = await self._until_finished(setup.patience_s)
        if setup.harm.lose_directory or setup.harm.second_holder:
            is_over = is_over or world.has_ever_told_the_end
        if not is_over and setup.must_finish:
            living = sorted(life.process.name for life in world.alive)
            detail = f"not finished {setup.patience_s} s after the last fault: {living}"
            world.problems.append(Problem("liveness", detail))
        if setup.harm.split and not world.problems:
            await self._hear_of_arms()
        await self._close()

    async def _until_finished(self, seconds: float) -> bool:
        world, until = self._world, self._world.loop.time() + seconds
        while world.loop.time() < until:
            learns = world.of_role("trainer") or (world.setup.attached_from and not world.has_drained)
            if world.problems or (world.is_announced_finished and not learns):
                return True
            if world.setup.harm.pause_instance and int(world.loop.time()) % 5 == 0:
                await self._command("resume_instance", INSTANCE)
            if world.setup.harm.promote and int(world.loop.time()) % 5 == 0:
                await self._command("promote", SERVED_POLICY)  # whose last step ends the run
            if world.setup.harm.pause_flow and int(world.loop.time()) % 5 == 0:
                await self._command("resume")  # a coordinator that is not there does not hear it
            await asyncio.sleep(0.5)
        return False

    async def _heal(self) -> None:
        world = self._world
        world.note("heal", "nemesis")
        world.bus.chances.rates = self._quiet(world.setup.rates)
        if self._pending:
            await asyncio.wait(self._pending)
        world.bus.broker.restart()
        for life in [*world.alive]:
            life.die_at_write = life.fail_at_write = life.freeze_at_write = life.die_at_point = None
            if life.process.is_stopped:
                world.thaw(life)

    def _quiet(self, rates: FaultRates) -> FaultRates:
        return replace(QUIET, delivery_timeout_s=rates.delivery_timeout_s)

    async def _hear_of_arms(self) -> None:
        """All that arms of the last split have exported is announced by now, or within a while."""
        world, until = self._world, self._world.loop.time() + LAST_WORDS_S
        while (untold := world.untold_arms) and world.loop.time() < until:
            await asyncio.sleep(0.5)
        if untold:
            world.problems.append(Problem("arms", f"weights of {untold} are not announced after {LAST_WORDS_S} s"))

    async def _close(self) -> None:
        """Everybody who is left is asked to end, and must."""
        world = self._world
        world.crew.move_to_holder()
        world.is_closing = True
        await asyncio.sleep(1.0)
        for life in world.alive:
            life.stop.set()
        until = world.loop.time() + LAST_WORDS_S
        while world.alive and world.loop.time() < until:
            await asyncio.sleep(0.25)
        for life in world.alive:
            world.problems.append(Problem("stop", f"{life.process.name} did not end in {LAST_WORDS_S} s when asked"))

    def _one(self, role: str) -> Incarnation | None:
        """A living, running one of a role (or of all workers)."""
        found = [life for life in self._world.alive if life.role.startswith(role) and not life.process.is_stopped]
        return self._chance.choice(found) if found else None

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        async def wait_and_act() -> None:
            await asyncio.sleep(seconds)
            act()

        task = asyncio.create_task(wait_and_act())
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    def _draw(self, low: float, high: float) -> float:
        return low + (high - low) * self._chance.random()

    async def _kill(self, role: str) -> None:
        if (life := self._one(role)) is not None:
            self._world.kill(life)

    async def _pause(self, role: str, low: float, high: float) -> None:
        if (life := self._one(role)) is not None:
            self._world.freeze(life)
            self._later(self._draw(low, high), lambda: self._world.thaw(life))

    async def _replace(self, role: str) -> None:
        """Stop one as SIGSTOP does, start another in its place, and let the first go on as a zombie."""
        if (life := self._one(role)) is not None:
            self._world.freeze(life)
            life.is_replaced = True
            await asyncio.sleep(self._draw(0.0, 2.0))
            self._world.start(life.role)
            self._later(self._draw(0.1, 6.0), lambda: self._world.thaw(life))

    async def _ask_to_stop(self, role: str) -> None:
        if (life := self._one(role)) is not None:
            self._world.note("stop", life.process.name)
            life.stop.set()

    async def _kill_trainer(self) -> None:
        life = self._one("trainer")
        if life is not None and self._chance.random() < 0.6:
            life.die_at_point = self._chance.randint(0, 30)
        elif life is not None:
            self._world.kill(life)

    async def _kill_in_write(self) -> None:
        if (life := self._one("trainer")) is not None:
            life.die_at_write = self._chance.randint(0, 12)

    async def _fail_write(self) -> None:
        if (life := self._one("trainer")) is not None:
            life.fail_at_write = self._chance.randint(0, 12)

    async def _zombie_in_write(self) -> None:
        """The trainer stands still at some moment of a checkpoint, while another takes over."""
        if (life := self._one("trainer")) is not None:
            life.freeze_at_write = self._chance.randint(0, 16)

    async def _step_clock(self) -> None:
        role = self._chance.choice(self._world.crew.roles())
        seconds = self._chance.choice(STEPS_S)
        self._world.note("clock", role, seconds)
        self._world.clock_of(role).step(seconds)

    async def _cut_network(self) -> None:
        """A node is not reached any more by one role, or by nobody."""
        network, node = self._world.bus.network, self._chance.randrange(NODES)
        role = self._chance.choice([*self._world.crew.roles(), ""])
        self._world.note("cut", role or "everybody", node)
        network.cut(role, node)
        self._later(self._draw(0.3, 8.0), lambda: network.mend(role, node))

    async def _slow_disk(self) -> None:
        network, node = self._world.bus.network, self._chance.randrange(NODES)
        network.slow[node] = self._draw(0.1, 1.5)
        self._world.note("slow disk", "nemesis", node, network.slow[node])
        self._later(self._draw(1.0, 8.0), lambda: network.slow.pop(node, None))

    async def _repeat_trained(self) -> None:
        """A record that was trained arrives once more, however long ago that was."""
        broker = self._world.bus.broker
        (steps,), logs = broker.logs(STEPS.full_name(RUN)), broker.logs(TRAJECTORIES.full_name(RUN))
        reports = [record.message() for record in steps.read(0, 1 << 30)[0]]
        trained = [
            (ref.partition, ref.offset)
            for report in reports
            if isinstance(report, StepReport)
            for batch in report.micro_batches
            for ref in batch
        ]
        if trained:
            partition, offset = self._chance.choice(trained)
            record = logs[partition].slots[offset].record
            assert record is not None, "it was trained"
            self._world.note("repeat trained", "nemesis", partition, offset, len(logs[partition].slots))
            broker.append(logs[partition].tp, Outgoing(record.topic, record.value, record.key, None, record.headers))

    async def _stop_trainer(self) -> None:
        await self._ask_to_stop("trainer")

    async def _zombie_trainer(self) -> None:
        await self._replace("trainer")

    async def _second(self, role: str) -> None:
        """Two of a role at once, neither of them stopped."""
        if (life := self._one(role)) is not None:
            self._world.start(life.role)

    async def _second_trainer(self) -> None:
        await self._second("trainer")

    async def _damage_checkpoint(self) -> None:
        if self._world.crew.directory.place.damage_newest():
            self._world.is_set_back = True
            self._world.note("damage", "nemesis")

    async def _restore_checkpoint(self) -> None:
        """An operator ends the trainer and goes back, unless it was started again meanwhile: the command refuses then.

        One that stands still is not heard of, and may go on later.
        """
        world = self._world
        if world.has_finished:
            return
        for life in world.of_role("trainer"):
            world.kill(life, "to restore")
        await asyncio.sleep(self._draw(0.0, 0.5))
        found = Savepoints.read(world.crew.directory.place)
        sound = [entry for entry in found.entries if entry.manifest is not None]
        if world.has_finished or not sound or self._one("trainer") is not None:
            return
        entry, world.is_set_back = self._chance.choice(sound), True
        try:
            restored = restore(found, entry, world.loop.time())
        except (UserError, CheckpointError) as error:
            world.note("not restored", "operator", str(error))
        else:
            world.note("restore", "operator", *entry.order, "no change" if restored is None else "")

    async def _lose_directory(self) -> None:
        """The run's directory is gone, with its checkpoints and weights; a while later the run is adopted without."""
        world = self._world
        if world.has_finished:
            return
        for life in world.of_role("trainer"):
            world.kill(life, "with its directory")
        lost, emptied = world.crew.directory, world.crew.empty_directory()
        world.crew.directories = [each for each in world.crew.directories if each is not lost] + [emptied]
        world.crew.shelf.versions.clear()
        world.is_set_back = True
        world.note("lose directory", "nemesis")

        def adopt() -> None:
            emptied.adopts = True

        self._later(self._draw(0.5, 8.0), adopt)

    async def _second_holder(self) -> None:
        """Somebody starts a trainer of the same name in another directory, told to take the run over or not."""
        world = self._world
        if world.has_finished:
            return
        other = world.crew.empty_directory(adopts=self._chance.random() < 0.5)
        world.crew.directories.insert(0, other)
        world.is_set_back = True
        world.note("second holder", "nemesis", "adopts" if other.adopts else "")
        world.start("trainer", other)

    async def _kill_worker(self) -> None:
        await self._kill("worker")

    async def _kill_grader(self) -> None:
        await self._kill("grader")

    async def _pause_grader(self) -> None:
        await self._pause("grader", 0.5, 8.0)

    async def _zombie_grader(self) -> None:
        await self._replace("grader")

    async def _second_grader(self) -> None:
        await self._second("grader")

    async def _stop_grader(self) -> None:
        await self._ask_to_stop("grader")

    async def _kill_everybody(self) -> None:
        """As when a machine goes down with all that runs on it; the broker is elsewhere."""
        for life in [*self._world.alive]:
            self._world.kill(life)

    async def _pause_worker(self) -> None:
        await self._pause("worker", 0.5, 8.0)

    async def _zombie_worker(self) -> None:
        await self._replace("worker")

    async def _second_worker(self) -> None:
        await self._second("worker")

    async def _stop_worker(self) -> None:
        await self._ask_to_stop("worker")

    async def _kill_dispatcher(self) -> None:
        await self._kill("dispatcher")

    async def _pause_dispatcher(self) -> None:
        await self._pause("dispatcher", 0.5, 8.0)

    async def _zombie_dispatcher(self) -> None:
        await self._replace("dispatcher")

    async def _second_dispatcher(self) -> None:
        await self._second("dispatcher")

    async def _kill_coordinator(self) -> None:
        await self._kill("coordinator")

    async def _zombie_coordinator(self) -> None:
        await self._replace("coordinator")

    async def _second_coordinator(self) -> None:
        await self._second("coordinator")

    async def _broker_outage(self) -> None:
        broker = self._world.bus.broker
        if broker.is_up:
            self._world.note("broker down", "nemesis")
            broker.is_up = False
            self._later(self._draw(0.3, 6.0), broker.restart)

    async def _pause_flow(self) -> None:
        await self._command("pause")
        self._later(self._draw(0.5, 3.0), lambda: None)
        await asyncio.sleep(self._draw(0.5, 3.0))
        await self._command("resume")

    async def _kill_instance(self) -> None:
        life = self._one("instance")
        if life is not None and self._chance.random() < 0.6:
            life.die_at_point = self._chance.randint(0, 30)
        elif life is not None:
            self._world.kill(life)

    async def _kill_instance_in_write(self) -> None:
        if (life := self._one("instance")) is not None:
            life.die_at_write = self._chance.randint(0, 12)

    async def _stop_instance(self) -> None:
        await self._ask_to_stop("instance")

    async def _zombie_instance(self) -> None:
        await self._replace("instance")

    async def _second_instance(self) -> None:
        await self._second("instance")

    async def _pause_instance(self) -> None:
        await self._command("pause_instance", INSTANCE)
        await asyncio.sleep(self._draw(0.5, 3.0))
        await self._command("resume_instance", INSTANCE)

    async def _promote(self) -> None:
        """Workers are to follow the other one."""
        self._world.note("promote", "operator")
        await self._command("promote", self._chance.choice([INSTANCE, SERVED_POLICY]))

    async def _split(self) -> None:
        """Groups are divided between the served policy and another, in other shares than before, or no more."""
        share = self._chance.choice([0.0, 0.2, 0.5, 0.8, 1.0])
        arm = self._chance.choice([INSTANCE, SERVED_POLICY]) if self._world.setup.harm.promote else INSTANCE
        self._world.note("split", "operator", arm, share)
        await self._command("split", shares={arm: share} if share else {})

    async def _detach_instance(self) -> None:
        """It leaves with its arm, and is attached anew a while later."""
        await self._command("detach", INSTANCE)
        await asyncio.sleep(self._draw(1.0, 5.0))
        await self._command("attach", INSTANCE)
        if not self._world.of_role("instance"):
            self._world.has_drained = False
            self._world.start("instance")

    async def _command(self, action: str, policy: str | None = None, shares: Mapping[str, float] | None = None) -> None:
        about: dict[str, object] = {"action": action, "policy": policy, "sent_at": self._world.loop.time()}
        about["shares"] = [{"policy": arm, "share": share} for arm, share in (shares or {}).items()]
        command = OperatorCommand.model_validate(about)
        topic = COMMANDS.full_name(RUN)
        self._world.note("command", action)
        self._world.bus.broker.append(TopicPartition(topic, 0), Outgoing.of(topic, command, key=action))

    async def _poison(self) -> None:
        """Somebody writes what no trajectory is."""
        self._poison_topic(TRAJECTORIES.full_name(RUN))

    async def _poison_ungraded(self) -> None:
        self._poison_topic(UNGRADED.full_name(RUN))

    def _poison_topic(self, topic: str) -> None:
        broker = self._world.bus.broker
        log = self._chance.choice(broker.logs(topic))
        value = self._chance.choice(POISON)
        headers = (("schema", b"trajectory"), ("schema-version", self._chance.choice([b"1", b"9", b"x"])))
        self._world.note("poison", "nemesis", *log.tp, len(log.slots))
        broker.append(log.tp, Outgoing(log.tp.topic, value, "poison", None, headers))

    async def _repeat_record(self) -> None:
        """A record arrives once more, there or in another partition, soon or long after."""
        broker, topic = self._world.bus.broker, TRAJECTORIES.full_name(RUN)
        logs = broker.logs(topic)
        held = [slot.record for log in logs for slot in log.slots[log.first :] if slot.record is not None]
        if held:
            record, log = self._chance.choice(held), self._chance.choice(logs)
            self._world.note("repeat", "nemesis", record.partition, record.offset, *log.tp, len(log.slots))
            broker.append(log.tp, Outgoing(topic, record.value, record.key, None, record.headers))

    async def _retention(self) -> None:
        """The broker deletes the older half of a partition."""
        broker = self._world.bus.broker
        log = self._chance.choice(broker.logs(TRAJECTORIES.full_name(RUN)))
        before = log.first + (len(log.slots) - log.first) // 2
        self._world.note("retention", "nemesis", *log.tp, before)
        broker.expire(log.tp, before)
