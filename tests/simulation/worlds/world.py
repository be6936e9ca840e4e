"""One simulated run: processes on the simulated bus, restarted as a supervisor would, and everything they leave behind.

A process is killed (never runs again, not even to clean up), stopped and resumed, asked to end, or ends by itself.
"""

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from random import Random

from streamrl.bus.port import message_of
from streamrl.consumers.training.failpoints import Failpoint
from streamrl.planning.virtual_time import START
from streamrl.schemas.control import ArmWeights, PolicySplit, RunFinished, WeightsReady
from streamrl.schemas.errors import DataLossRefused, FinishedRunContinues, LifecycleError, StreamRLError, Superseded
from streamrl.schemas.identifiers import PolicyVersion, scope_of
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import CONTROL, STEPS
from tests.simulation.bus.broker import committed
from tests.simulation.bus.faults import Chances
from tests.simulation.bus.sim_bus import SimBus
from tests.simulation.clocks import HostClock
from tests.simulation.history import Problem
from tests.simulation.parts.checkpoints import SimDirectory
from tests.simulation.processes import OUTSIDE, PROCESS, Killed, Process, ProcessLoop
from tests.simulation.worlds.crew import RUN, Crew
from tests.simulation.worlds.scenarios import Setup

BACK_OFF_S = 0.7


@dataclass(eq=False)
class Incarnation:
    """One life of a role. ``die_at_write``: the number of writes after which it is killed in the next one.

    ``directory``: in which it was started.
    """

    role: str
    process: Process
    stop: asyncio.Event
    task: "asyncio.Task[None]"
    directory: SimDirectory
    die_at_write: int | None = None
    fail_at_write: int | None = None
    freeze_at_write: int | None = None
    die_at_point: int | None = None
    has_ended: bool = False
    is_replaced: bool = False

    @property
    def is_running(self) -> bool:
        """Whether it lives, stopped or not."""
        return not self.has_ended and not self.process.is_dead


@dataclass(eq=False)
class World:
    """The processes of one run. ``is_closing``: nobody is restarted any more. ``has_drained``: an attached instance has
    ended well, behind the end of the run. ``told_for_nothing``: roles to be started again after a good end, for the end
    that they were told of is none. ``is_set_back``: something took durable steps from the run; nothing else may.
    """

    setup: Setup
    loop: ProcessLoop
    make_crew: Callable[..., Crew] = Crew
    bus: SimBus = field(init=False)
    crew: Crew = field(init=False)
    alive: list[Incarnation] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    is_closing: bool = False
    has_finished: bool = False
    has_drained: bool = False
    restarts: int = 0
    told_for_nothing: set[str] = field(default_factory=set)
    is_set_back: bool = False

    def __post_init__(self) -> None:
        chance = Random(f"streamrl/bus/{self.setup.scenario}/{self.setup.seed}")
        self.bus = SimBus(self.loop.time, Chances(self.setup.rates, chance))
        self.crew = self.make_crew(self.setup, self.bus)
        self._chance = Random(f"parts/{self.setup.scenario}/{self.setup.seed}")
        self._count = 0
        self._clocks: dict[str, HostClock] = {}

    def note(self, what: str, who: str, *details: object) -> None:
        """Into the trace."""
        self.bus.events.add(what, who, *details)

    def clock_of(self, role: str) -> HostClock:
        """Each role has a machine of its own."""
        if role not in self._clocks:
            chance = Random(f"clock/{role}/{self.setup.scenario}/{self.setup.seed}")
            self._clocks[role] = HostClock.drawn(self.loop.time, chance)
        return self._clocks[role]

    def start(self, role: str, directory: SimDirectory | None = None) -> Incarnation:
        """A new life of a role; in the run's directory, if no other is named."""
        if directory is None:
            self.crew.move_to_holder()
            directory = self.crew.instance if role == "instance" else self.crew.directory
        self._count += 1
        process = Process(f"{role}~{self._count}", role, self.clock_of(role))
        context = copy_context()
        context.run(PROCESS.set, process)
        incarnation = Incarnation(role, process, asyncio.Event(), None, directory)  # type: ignore[arg-type]
        self.alive.append(incarnation)
        self.note("start", process.name)
        chance = Random(self._chance.random())
        incarnation.task = self.loop.create_task(self._live(incarnation, chance), context=context)
        return incarnation

    async def _live(self, life: Incarnation, chance: Random) -> None:
        """Runs in the process."""
        error: BaseException | None = None
        try:
            writes, points = _Counter(), _Counter()
            clock = self.clock_of(life.role)
            run = self.crew.life(
                life.role,
                clock,
                chance,
                lambda name: self._write(life, writes, name),
                lambda p: self._reach(life, points, p),
                life.directory,
            )
            await run(life.stop)
        except Killed:
            return
        except asyncio.CancelledError:
            raise
        except BaseException as caught:
            error = caught
        if life.process.is_dead or self.bus.is_over:
            return
        self.loop.call_soon(self._ended, life, error, context=OUTSIDE)

    def _write(self, life: Incarnation, writes: "_Counter", name: str) -> None:
        """Before a checkpoint's piece becomes durable."""
        if life.process.is_dead:
            raise Killed
        writes.value += 1
        self.note("write", life.process.name, name)
        if life.fail_at_write is not None and writes.value > life.fail_at_write:
            life.fail_at_write = None
            raise OSError("no space left on the simulated device")
        if life.freeze_at_write is not None and writes.value > life.freeze_at_write:
            life.freeze_at_write = None
            self.replace(life, self._chance.uniform(0.0, 1.0), self._chance.uniform(1.0, 8.0))
        if life.die_at_write is not None and writes.value > life.die_at_write:
            self.kill(life, f"before write of {name}")
            raise Killed

    def _reach(self, life: Incarnation, points: "_Counter", point: Failpoint) -> None:
        """At a named point of the trainer."""
        if life.process.is_dead:
            raise Killed
        points.value += 1
        if life.die_at_point is not None and points.value > life.die_at_point:
            self.kill(life, f"at {point.value}")
            raise Killed

    def _ended(self, life: Incarnation, error: BaseException | None) -> None:
        """A process ended by itself."""
        life.has_ended = True
        self.alive.remove(life)
        self.note("end", life.process.name, type(error).__name__, str(error)[:300] if error else "")
        if error is not None and not _is_expected(error, self.setup.accept_loss):
            when = self.loop.time() - START
            self.problems.append(Problem("crash", f"{life.process.name} at {when:.2f} s: {_described(error)}"))
        if error is None and life.role == "trainer" and not life.stop.is_set():
            self.has_finished = True
        if error is None and life.role == "instance" and (self.is_announced_finished or not life.stop.is_set()):
            self.has_drained = True
        if _is_of(error, FinishedRunContinues):
            self._bring_back()
            if not self.is_set_back:
                self.problems.append(Problem("end", f"{error!r}, though nothing set the run back"))
        # Who ended well and was not asked to has done its work: no supervisor starts it again.
        is_needed = life.role in self.told_for_nothing or (life.stop.is_set() and not self.is_announced_finished)
        if error is not None or is_needed:
            self._restart_later(life.role)

    def _bring_back(self) -> None:
        """As the supervisor does: who has left at an end that is none comes back, who is about to leave does then."""
        self.note("end undone", "supervisor")
        for role in self.crew.roles():
            if role not in ("trainer", "coordinator"):
                self.told_for_nothing.add(role)
                self._restart_later(role)

    def _restart_later(self, role: str) -> None:
        if not self.is_closing and not (role == "trainer" and self.has_finished):
            delay = BACK_OFF_S * (0.5 + self._chance.random())
            self.loop.call_later(delay, self._restart, role, context=OUTSIDE)

    def _restart(self, role: str) -> None:
        if not self.is_closing and not self._is_filled(role) and not (role == "trainer" and self.has_finished):
            self.restarts += 1
            self.told_for_nothing.discard(role)
            self.start(role)

    def kill(self, life: Incarnation, where: str = "") -> None:
        """SIGKILL; a supervisor starts the role again."""
        if life.is_running:
            self.note("kill", life.process.name, where)
            self.loop.kill(life.process)
            self.alive.remove(life)
            if life.role == "trainer" and not self.has_told_the_end:
                self.has_finished = False  # it had taken the run over from the one that finished, or was about to end
            self._restart_later(life.role)

    def freeze(self, life: Incarnation) -> None:
        """SIGSTOP."""
        self.note("freeze", life.process.name)
        self.loop.freeze(life.process)

    def thaw(self, life: Incarnation) -> None:
        """SIGCONT."""
        if life.is_running:
            self.note("thaw", life.process.name)
            self.loop.thaw(life.process)

    def replace(self, life: Incarnation, after_s: float, thawed_s: float) -> None:
        """Stop it, start another in its place a moment later, and let it go on as a zombie after that."""
        self.freeze(life)
        life.is_replaced = True
        self.loop.call_later(after_s, self._restart, life.role, context=OUTSIDE)
        self.loop.call_later(after_s + thawed_s, self.thaw, life, context=OUTSIDE)

    def _is_filled(self, role: str) -> bool:
        return any(not life.is_replaced for life in self.of_role(role))

    def of_role(self, role: str) -> list[Incarnation]:
        """Living ones, oldest first."""
        return [life for life in self.alive if life.role == role]

    @property
    def is_announced_finished(self) -> bool:
        """Whether everybody was told that the run has finished, and no newer weights since."""
        return self.has_finished and self.has_told_the_end

    @property
    def has_ever_told_the_end(self) -> bool:
        """Whether the run has finished once: one that adopts it after that has to bring workers of its own."""
        (control,) = self.bus.broker.logs(CONTROL.full_name(RUN))
        return any(isinstance(message_of(record), RunFinished) for record in control.read(0, 1 << 30)[0])

    @property
    def untold_arms(self) -> list[str]:
        """Arms of the split in force whose newest weights are not announced."""
        (control,) = self.bus.broker.logs(CONTROL.full_name(RUN))
        shares: dict[str, float] = {}
        told: dict[str, PolicyVersion] = {}
        for record in committed(control):
            match message_of(record):
                case PolicySplit() as split:
                    shares = split.shares
                case ArmWeights() as weights:
                    told[weights.policy] = weights.version
        return [arm for arm in shares if (newest := self._newest_beside(arm)) and told.get(arm) != newest]

    def _newest_beside(self, policy: str) -> PolicyVersion | None:
        """The newest weights that a policy has exported while it was not served."""
        (steps,) = self.bus.broker.logs(STEPS.full_name(scope_of(RUN, policy)))
        reports = [each for record in committed(steps) if isinstance(each := message_of(record), StepReport)]
        exported = [each.version for each in reports if each.manifest_sha256 is not None and each.served_as is None]
        return max(exported, default=None)

    @property
    def has_told_the_end(self) -> bool:
        """Whether the coordinator's last word is that the run has finished."""
        (control,) = self.bus.broker.logs(CONTROL.full_name(RUN))
        messages = (message_of(record) for record in reversed(control.read(0, 1 << 30)[0]))
        last = next((message for message in messages if isinstance(message, WeightsReady | RunFinished)), None)
        return isinstance(last, RunFinished)


@dataclass
class _Counter:
    value: int = 0


def _is_of(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Whether it is of a kind, or a group that holds one."""
    return isinstance(error, kind) or (isinstance(error, BaseExceptionGroup) and error.subgroup(kind) is not None)


def _is_expected(error: BaseException, may_lose: bool) -> bool:
    """Errors that the faults explain; a broken invariant, or anything that is not ours, is a finding."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_expected(inner, may_lose) for inner in error.exceptions)
    if isinstance(error, LifecycleError) or not isinstance(error, StreamRLError):
        return False
    if isinstance(error, DataLossRefused):
        return may_lose
    if isinstance(error, Superseded):
        return True
    cause = error.__cause__
    known = StreamRLError | TimeoutError | OSError | BaseExceptionGroup
    return cause is None or isinstance(cause, known)


def _described(error: BaseException) -> str:
    parts = [repr(error)]
    while (cause := error.__cause__ or error.__context__) is not None and len(parts) < 5:
        parts.append(repr(cause))
        error = cause
    return " <- ".join(parts)
