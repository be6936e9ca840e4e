"""Keeps the processes of a run alive until the essential one ends well, or until it is asked to stop.

``Supervisor`` starts and restarts processes (``Child``), and ``RestartPolicy`` decides about an exit. Invariants:
- a_crash_loop_ends: more than ``max_restarts`` crashes without a healthy minute between them end the run;
- a_superseded_process_stays_away: two supervisors with a process of the same id do not end each other's for ever;
- who_left_at_an_end_that_is_undone_comes_back: a restore at the very end leaves no trainer without workers;
- a_trainer_that_is_superseded_stands_by: the run goes on with its workers under the trainer that took over, unless the
  whole run was taken over;
- a_process_that_a_stranger_stopped_is_restarted: SIGTERM is an end only where it was the supervisor that sent it;
- a_crash_while_stopping_is_reported: by name, signal or code, and log; it is no clean end.
"""

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import structlog

from streamrl.bus.embedded.process import die_with_parent
from streamrl.bus.waiting import end_tasks
from streamrl.deploy.wiring.process import TAKE_OVER
from streamrl.schemas import stopping
from streamrl.schemas.errors import DataLossRefused, DiskFull, EndUndone, StreamRLError, Superseded, UserError
from streamrl.schemas.plain_text import plain_text
from streamrl.settings.loading import without_settings

TRANSIENT_S = 6.0
"""Least delay after what may be a transient error: a Kafka broker takes some seconds to come back."""
LEAVING_S = 60.0
"""Around the moment in which the run's end was undone: who leaves then does so because of that end."""
TAIL_BYTES = 16 << 10
"""Of a log that are searched for the error: the longest traceback of asyncio has some kilobytes."""
# What the processes print last of a failure: our own line, a traceback's last line, or a logged error.
_ERROR = re.compile(
    r"^error: |^Fatal Python error|^[\w.]*(Error|Exception|Superseded|Refused)\b|level=(error|critical)"
)

CRASHED_AT_STOP = 7
"""Exit code where a process crashed while it was being stopped."""
CLEAN = frozenset({0, -signal.SIGTERM, *(128 + number for number in stopping.NUMBERS)})
"""How a process may end that was asked to: before its first line, when it knows no signals yet, by SIGTERM itself."""

log = structlog.get_logger()

_BY_EXIT_CODE: dict[int, type[StreamRLError]] = {
    error.exit_code: error for error in (UserError, Superseded, DataLossRefused, DiskFull)
}


@dataclass(frozen=True)
class ChildSpec:
    """What to start: a name unique in the run, the command, extra environment, and where output goes.

    Settings are in the command's file; of our environment's, it gets only what ``environment`` has, such as secrets.
    ``essential``: the run is over when it ends well. ``optional``: the run goes on if it cannot be kept alive.
    ``awaited``: once the run is over, it still waits for the good end of this one, which comes by itself.
    ``standby``: the command under which it is started anew while another of its kind does the work. ``is_single``: if
    it is superseded too, the other supervisor has all of the run. ``only_first``: further options of its first start.
    """

    name: str
    command: Sequence[str]
    log_path: Path
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    essential: bool = False
    optional: bool = False
    awaited: bool = False
    standby: Sequence[str] = ()
    is_single: bool = False
    only_first: Sequence[str] = ()


@dataclass
class Child:
    """A process of a spec. The kernel ends it with its parent (PR_SET_PDEATHSIG), however that ends."""

    spec: ChildSpec
    process: asyncio.subprocess.Process
    started_at: float
    is_asked: bool = field(default=False, init=False)
    was_killed: bool = field(default=False, init=False)

    @classmethod
    async def start(cls, spec: ChildSpec) -> "Child":
        """Start it in a session of its own, so that Ctrl-C reaches the supervisor alone."""
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        # Appended to: the output of the life before says why it ended. The child keeps its own descriptor.
        with spec.log_path.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=without_settings(os.environ) | spec.environment,
                start_new_session=True,
                preexec_fn=die_with_parent,  # for a supervisor that is killed and can end nobody
            )
        return cls(spec, process, time.monotonic())

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def ran_for_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started_at

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        self.is_asked = True
        self._signal(signal.SIGTERM)

    def take_over(self) -> None:
        """Tell a standby that the leader is gone; nothing happens to a process that stands for nobody."""
        self._signal(TAKE_OVER)

    async def wait_or_kill(self, deadline: float) -> int:
        """Wait for the end until a monotonic deadline, then SIGKILL; the exit code."""
        try:
            # One deadline for all children: who is waited for last has no more time than the first.
            return await asyncio.wait_for(self.process.wait(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            self.was_killed = self.process.returncode is None
            self._signal(signal.SIGKILL)
            return await self.process.wait()

    def crash(self, code: int) -> str | None:
        """What to say of an end by an error, or by a signal that it was not sent; None: it was asked to end so."""
        if code in CLEAN or (self.was_killed and code == -signal.SIGKILL):
            return None
        # A process that a signal ended has printed no error of its own; of a crash Python says where.
        line = f": {self.last_line()}" if code > 0 else ""
        return f"{self.spec.name} ended with {_how(code)} while it was stopped{line}; its log is {self.spec.log_path}"

    def last_line(self) -> str:
        """The last line of its log that reports an error, else the last one."""
        try:
            with self.spec.log_path.open("rb") as log:
                # The tail alone: logs of a long run are large, and the event loop reads this one itself.
                log.seek(max(0, self.spec.log_path.stat().st_size - TAIL_BYTES))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        errors = [line for line in lines if _ERROR.search(line)]
        # A process may print what a model or a reward function said.
        return plain_text((errors or lines or [""])[-1])

    def _signal(self, number: signal.Signals) -> None:
        # Once it is reaped its pid may belong to a stranger. Not by asyncio's ``send_signal``: it polls the process
        # first, and the exit code of one that has just ended is then lost for the task that waits for it.
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass
class Supervisor:
    """Starts children in order.

    ``children`` holds the running ones by name, ``ended`` the names of those that are not kept alive any more;
    ``restarts`` counts by name. ``crashes``: what is to be said of those that did not end well when they were stopped.
    """

    specs: Sequence[ChildSpec]
    max_restarts: int
    grace_s: float
    children: dict[str, Child] = field(init=False, default_factory=dict)
    restarts: dict[str, int] = field(init=False, default_factory=dict)
    ended: set[str] = field(init=False, default_factory=set)
    finished: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    ending: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    superseded: dict[str, ChildSpec] = field(init=False, default_factory=dict)
    essential_ended: bool = field(init=False, default=False)
    crashes: list[str] = field(init=False, default_factory=list)
    _judged: set[int] = field(init=False, default_factory=set)
    _starting: "set[asyncio.Task[Child]]" = field(init=False, default_factory=set)
    _left: dict[str, tuple[ChildSpec, float]] = field(init=False, default_factory=dict)
    _undone_at: float | None = field(init=False, default=None)
    _joined: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _watchers: "list[asyncio.Task[None]]" = field(init=False, default_factory=list)
    _stop: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    async def run(self, stop: asyncio.Event) -> None:
        """Run every child until the essential one ends well or ``stop`` is set.

        Consumes: exits of its children. Produces: restarts.
        Waits for: exits, ``stop``.
        On failure: a child that cannot be kept alive ends the run with its last line in the message, under the exit
            code that it had itself. One that was superseded does so only if it is essential. One that is there once
            is started once more first.
        On stop: SIGTERM to all, SIGKILL to what is left when the grace period ends.
        """
        self._stop = stop
        for spec in self.specs:
            self.join(spec)
        waiters = [asyncio.create_task(event.wait()) for event in (stop, self.finished)]
        try:
            while not stop.is_set() and not self.finished.is_set() and not _failure(self._watchers):
                # Cleared before the list of watchers is taken: one that joins afterwards
                # sets it again, and is waited for.
                self._joined.clear()
                joining = asyncio.create_task(self._joined.wait())
                unfinished = _unfinished(self._watchers)
                await asyncio.wait([*waiters, joining, *unfinished], return_when=asyncio.FIRST_COMPLETED)
                joining.cancel()
        finally:
            # Before the children end, or their watchers would take it for a crash and start them again.
            self.ending.set()
            await self._end_all()
            await end_tasks([*self._watchers, *waiters])
        if (failure := _failure(self._watchers)) is not None:
            raise failure

    def join(self, spec: ChildSpec) -> None:
        """Start one more process, and keep it alive with the others; nothing once the run is ending."""
        if not self._over(self._stop):
            # A worker may come back under the id of one that left; it would count as gone at once.
            self.ended.discard(spec.name)
            self._watchers.append(asyncio.create_task(self._keep_alive(spec, self._stop)))
            self._joined.set()

    async def _keep_alive(self, spec: ChildSpec, stop: asyncio.Event) -> None:
        try:
            await self._restart_until_final(spec, stop)
        finally:
            self.ended.add(spec.name)
            self._finish_if_over()

    def _finish_if_over(self) -> None:
        awaited = [spec.name for spec in self.specs if spec.awaited and spec.name not in self.ended]
        if self.essential_ended and not awaited:
            self.finished.set()

    async def _restart_until_final(self, spec: ChildSpec, stop: asyncio.Event) -> None:
        policy = RestartPolicy(self.max_restarts, opens_once_more=spec.is_single)
        while not self._over(stop):
            stands_by = bool(spec.standby) and (spec.name in self.superseded or bool(self._peers(spec)))
            command = spec.standby if stands_by else [*spec.command, *(() if policy.starts else spec.only_first)]
            child = await self._start(replace(spec, command=command))
            code = await child.process.wait()
            del self.children[spec.name]
            if child.is_asked or self._over(stop):
                self._judge(child, code)
            # An exit during the shutdown is not counted: it was asked for.
            if self._over(stop):
                return
            if child.is_asked and code in CLEAN:
                code = 0
            if code not in (0, Superseded.exit_code):
                for peer in self._peers(spec):
                    peer.take_over()
            decision = policy.decide(code, child.ran_for_s())
            if code == EndUndone.exit_code:
                self._bring_back()
            if code == Superseded.exit_code and decision is RestartDecision.GIVE_UP and self._may_stand_by(spec):
                log.warning("superseded: the run goes on under another trainer, this one stands by", process=spec.name)
                continue
            if decision is RestartDecision.DONE and self._left_for_nothing(child):
                log.warning("told of an end that was undone: started again", process=spec.name)
                continue
            if decision is RestartDecision.DONE:
                self._left[spec.name] = spec, time.monotonic()
                if spec.essential:
                    self.essential_ended = True
                    self._finish_if_over()
                log.info("process ended", process=spec.name)
                return
            if decision is RestartDecision.GIVE_UP:
                self._give_up(child, code, policy.crashes)
                return
            self.restarts[spec.name] = self.restarts.get(spec.name, 0) + 1
            pause = policy.delay_s()
            # A process that a signal ended has printed no error; the last line would mislead.
            why = {"last_line": child.last_line()} if code > 0 else {"log": str(spec.log_path)}
            log.warning("process died, restarting", process=spec.name, ended=_how(code), in_s=round(pause, 1), **why)
            await asyncio.sleep(pause)
            if code == Superseded.exit_code and any(other.standby for other in self.superseded.values()):
                self._give_up(child, code, policy.crashes)
                return

    async def _start(self, spec: ChildSpec) -> Child:
        """Where the shutdown finds it, at whatever moment that begins."""

        async def start() -> Child:
            child = await Child.start(spec)
            self.children[spec.name] = child
            log.info("process started", process=spec.name, pid=child.pid)
            return child

        self._starting.add(starting := asyncio.create_task(start()))
        starting.add_done_callback(self._starting.discard)
        return await starting

    def _judge(self, child: Child, code: int) -> None:
        if child.pid in self._judged:
            return
        self._judged.add(child.pid)
        name, place = child.spec.name, str(child.spec.log_path)
        if child.was_killed and code == -signal.SIGKILL:
            log.warning("process killed: it did not end in its time", process=name, after_s=self.grace_s, log=place)
        elif crash := child.crash(code):
            self.crashes.append(crash)
            log.error("process crashed while it was stopped", process=name, ended=_how(code), log=place)

    def _bring_back(self) -> None:
        """Start again who was told of the end of a run that goes on."""
        self._undone_at = time.monotonic()
        left, self._left = self._left, {}
        for spec, at in left.values():
            if not spec.essential and self._undone_at - at < LEAVING_S:
                log.warning("told of an end that was undone: started again", process=spec.name)
                self.join(spec)

    def _left_for_nothing(self, child: Child) -> bool:
        """Whether it was there when the end was undone, and may have been told of that end before."""
        undone_at = self._undone_at
        if child.spec.essential or undone_at is None:
            return False
        return child.started_at < undone_at and time.monotonic() - undone_at < LEAVING_S

    def _peers(self, spec: ChildSpec) -> list[Child]:
        """Running processes that can do its work."""
        return [child for child in self.children.values() if spec.standby and child.spec.standby]

    def _may_stand_by(self, spec: ChildSpec) -> bool:
        """Note that it was superseded; whether only its own work was taken over."""
        self.superseded[spec.name] = spec
        return bool(spec.standby) and not any(other.is_single for other in self.superseded.values())

    def _give_up(self, child: Child, code: int, crashes: int) -> None:
        spec, line = child.spec, child.last_line()
        superseded = code == Superseded.exit_code
        if superseded and spec.is_single and any(other.standby for other in self.superseded.values()):
            raise Superseded(f"another `streamrl run` has taken this run over: {line}; let it go on")
        if spec.standby and not superseded and self._peers(spec):
            log.error("process given up, another does its work", process=spec.name, ended=_how(code), last_line=line)
            return
        # A newer process of this id runs elsewhere; the run has what it needs, unless this was the one that ends it.
        if spec.optional or (superseded and not spec.essential):
            log.error("process given up", process=spec.name, ended=_how(code), last_line=line)
            return
        often = f" for the {crashes}th time in a row" if crashes > 1 else ""
        # Raised again under the child's own class, so that our exit code is the one that it had.
        raise _BY_EXIT_CODE.get(code, StreamRLError)(
            f"{spec.name} ended with {_how(code)}{often}: {line}; its log is {spec.log_path}"
        )

    def _over(self, stop: asyncio.Event) -> bool:
        return stop.is_set() or self.finished.is_set() or self.ending.is_set()

    async def _end_all(self) -> None:
        if self._starting:
            await asyncio.wait(self._starting)
        running = list(self.children.values())
        for child in running:
            child.terminate()
        # From after the signals: all of them have the whole grace period.
        deadline = time.monotonic() + self.grace_s
        codes = await asyncio.gather(*(child.wait_or_kill(deadline) for child in running))
        # Here, for who watches them may not come to it any more.
        for child, code in zip(running, codes, strict=True):
            self._judge(child, code)


@contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """An event that the first SIGINT, SIGTERM or SIGHUP sets; a second one ends this process at once.

    The kernel ends the children with it (``die_with_parent``).
    """
    stop = asyncio.Event()

    def ask(number: signal.Signals) -> None:
        stopping.said_by_itself()
        by_hand = number == signal.SIGINT
        print("stopping; press Ctrl-C again to end at once" if by_hand else f"stopping by {number.name}", flush=True)
        stop.set()

    with stopping.until_asked(ask):
        yield stop


def _how(code: int) -> str:
    if code >= 0:
        return f"code {code}"
    # The kernel's choice where memory runs out; who else sends this one knows that he did.
    return f"signal {signal.Signals(-code).name}" + (", as for want of memory" if code == -signal.SIGKILL else "")


def _failure(tasks: Sequence[asyncio.Task[None]]) -> BaseException | None:
    # ``exception`` raises on a task that was cancelled.
    ended = (task for task in tasks if task.done() and not task.cancelled())
    return next((error for task in ended if (error := task.exception()) is not None), None)


def _unfinished(tasks: Sequence[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
    return [task for task in tasks if not task.done()]


class RestartDecision(StrEnum):
    """What to do about a process that ended."""

    DONE = "done"
    RESTART = "restart"
    GIVE_UP = "give_up"


@dataclass
class RestartPolicy:
    """Decides whether a dead process is started again, and when. Pure.

    Exponential back-off: min(15 s, 0.5 s × 2^(crashes - 1)), times a random factor of 0.75 to 1.25, so that processes
    that died together do not come back together. A process that ran for a minute starts counting anew.

    ``opens_once_more``: a broker that dies while a transactional id is opened again may forget whom it gave the id last
    (KAFKA-20357), and then fences its only holder. So the first fence of such a process is doubted. Of two holders the
    newer one stays: the older one, started again, fences it once, is fenced in turn, and does not come back.
    """

    max_restarts: int
    opens_once_more: bool = False
    healthy_after_s: float = 60.0
    rng: Callable[[], float] = random.random
    crashes: int = field(default=0, init=False)
    starts: int = field(default=0, init=False)
    _is_transient: bool = field(default=False, init=False)
    _was_superseded: bool = field(default=False, init=False)

    def decide(self, exit_code: int, ran_for_s: float) -> RestartDecision:
        """What to do after an exit.

        A superseded process (but see ``opens_once_more``), one that refuses to lose data and one without room on its
        disk stay away. A user error is final at the first start; at a later one the same settings worked before, so it
        may be transient, such as a broker that cannot be reached.
        """
        self.starts += 1
        if exit_code == 0:
            return RestartDecision.DONE
        if exit_code in (DataLossRefused.exit_code, DiskFull.exit_code):
            return RestartDecision.GIVE_UP
        if ran_for_s >= self.healthy_after_s:
            self.crashes, self._was_superseded = 0, False
        if exit_code == Superseded.exit_code:
            if self._was_superseded or not self.opens_once_more:
                return RestartDecision.GIVE_UP
            self._was_superseded = self._is_transient = True
            return RestartDecision.RESTART
        if exit_code == UserError.exit_code and self.starts == 1:
            return RestartDecision.GIVE_UP
        self._is_transient = exit_code == UserError.exit_code
        self.crashes += 1
        return RestartDecision.RESTART if self.crashes <= self.max_restarts else RestartDecision.GIVE_UP

    def delay_s(self) -> float:
        """How long to wait before the next start, at least ``TRANSIENT_S`` after what may be a transient error."""
        # The shift is bounded, or a large ``max_restarts`` could make an integer that no float holds.
        doubled = 0.5 * (1 << min(10, max(0, self.crashes - 1)))
        # min(15 s, max(0.5 s * 2^(crashes - 1), 6 s if transient)) * u, with u uniform in [0.75, 1.25).
        return min(15.0, max(doubled, TRANSIENT_S if self._is_transient else 0.0)) * (0.75 + 0.5 * self.rng())
