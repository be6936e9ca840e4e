"""Keeps the processes of a run alive until the essential one exits successfully, or until it is asked to stop.

``Supervisor`` starts and restarts processes (``Child``), and ``RestartPolicy`` decides what to do after an exit.

Invariants:
- a_crash_loop_ends: more than ``max_restarts`` crashes without a healthy minute between them end the run;
- a_superseded_process_stays_away: two supervisors with processes of the same id do not end each other's for ever;
- processes_that_left_at_an_undone_end_are_restarted: a restore at the very end does not leave a trainer without
  workers;
- a_superseded_trainer_stands_by: the run continues with its workers under the trainer that took over, unless the whole
  run was taken over;
- a_process_stopped_by_an_outside_signal_is_restarted: SIGTERM ends a process only if the supervisor sent it;
- a_crash_while_stopping_is_reported: with name, signal or code, and log; it is not a clean exit.
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
from streamrl.deploy.local.forking import ForkedProcess, ForkServer
from streamrl.deploy.wiring.process import TAKE_OVER
from streamrl.schemas import stopping
from streamrl.schemas.errors import (
    DataLossRefused,
    DiskFull,
    FinishedRunContinues,
    StreamRLError,
    Superseded,
    UserError,
)
from streamrl.schemas.plain_text import plain_text
from streamrl.settings.loading import without_settings

TRANSIENT_S = 6.0
"""Least delay in seconds after a possibly transient error: a Kafka broker takes some seconds to come back."""
LEAVING_S = 60.0
"""Seconds around the undoing of the run's end; a process that exits within them is assumed to do so because of it."""
STOP_GRACE_S = 120.0
"""Seconds in which a process must exit after SIGTERM: a trainer writes the checkpoint of a large model in this time. A
second Ctrl-C does not wait."""
TAIL_BYTES = 16 << 10
"""Bytes at the end of a log that are searched for the error: asyncio's longest traceback has some kilobytes."""
# The last line that a failing process prints: an error line of StreamRL, a traceback's last line, or a logged error.
_ERROR = re.compile(
    r"^error: |^Fatal Python error|^[\w.]*(Error|Exception|Superseded|Refused)\b|level=(error|critical)"
)

CRASHED_AT_STOP = 7
"""Exit code of a run in which a process crashed while it was being stopped."""
CLEAN = frozenset({0, -signal.SIGTERM, *(128 + number for number in stopping.NUMBERS)})
"""Exit codes of a process that was asked to stop. SIGTERM itself ends one that does not handle signals yet."""

log = structlog.get_logger()

_BY_EXIT_CODE: dict[int, type[StreamRLError]] = {
    error.exit_code: error for error in (UserError, Superseded, DataLossRefused, DiskFull)
}


@dataclass(frozen=True)
class ChildSpec:
    """A process to start: a name unique in the run, the command, extra environment, and the log for its output.

    The command's file has the settings. Settings in this process's environment are not inherited; the child gets those
    in ``environment``, such as secrets. ``essential``: the run is over when it exits successfully. ``optional``: the
    run continues if it cannot be kept alive. ``awaited``: a run that is over still waits until this process exits
    successfully, which it does unasked. ``standby``: the command with which it restarts while another process of its
    kind does the work. ``is_single``: if it is superseded together with a trainer, another supervisor has taken over
    the whole run. ``only_first``: further options of its first start. ``forked_by``: the server that forks it; None: it
    gets a new interpreter.
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
    forked_by: ForkServer | None = None


@dataclass
class Child:
    """A running process. The kernel ends it when its parent ends for any reason (PR_SET_PDEATHSIG)."""

    spec: ChildSpec
    process: asyncio.subprocess.Process | ForkedProcess
    started_at: float
    is_asked: bool = field(default=False, init=False)
    was_killed: bool = field(default=False, init=False)

    @classmethod
    async def start(cls, spec: ChildSpec) -> "Child":
        """Start the process in its own session, so that Ctrl-C reaches only the supervisor."""
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        # The log is appended to, because earlier output says why the last process ended. The child keeps its own
        # descriptor.
        environment = without_settings(os.environ) | spec.environment
        with spec.log_path.open("ab") as output:
            if spec.forked_by is not None:
                return cls(spec, await spec.forked_by.start(spec.command, environment, output), time.monotonic())
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,  # a killed supervisor cannot end its children itself
            )
        return cls(spec, process, time.monotonic())

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def ran_for_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started_at

    def terminate(self) -> None:
        """Ask the process to exit (SIGTERM)."""
        self.is_asked = True
        self._signal(signal.SIGTERM)

    def take_over(self) -> None:
        """Tell a standby that the leader has died; a process that is no standby ignores the signal."""
        self._signal(TAKE_OVER)

    async def wait_or_kill(self, deadline: float) -> int:
        """Wait for the exit until a monotonic deadline, then send SIGKILL; returns the exit code."""
        try:
            # All children share one deadline, so the last one waited for has no more time than the first.
            return await asyncio.wait_for(self.process.wait(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            self.was_killed = self.process.returncode is None
            self._signal(signal.SIGKILL)
            return await self.process.wait()

    def crash(self, code: int) -> str | None:
        """The message about an exit by an error or a foreign signal; None if the process exited as requested."""
        if code in CLEAN or (self.was_killed and code == -signal.SIGKILL):
            return None
        # A process that a signal ended has printed no error, so its last line is left out.
        line = f": {self.last_line()}" if code > 0 else ""
        return f"{self.spec.name} ended with {_how(code)} while it was stopped{line}; its log is {self.spec.log_path}"

    def last_line(self) -> str:
        """The last line of the process's log that reports an error, else the last line."""
        try:
            with self.spec.log_path.open("rb") as log:
                # Only the tail, because logs of a long run are large, and this read blocks the event loop.
                log.seek(max(0, self.spec.log_path.stat().st_size - TAIL_BYTES))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        errors = [line for line in lines if _ERROR.search(line)]
        # A process may print text from a model or a reward function.
        return plain_text((errors or lines or [""])[-1])

    def _signal(self, number: signal.Signals) -> None:
        # The pid of a reaped process may belong to another one. asyncio's ``send_signal`` is not used: it polls the
        # process first, and if that has just exited, its exit code is lost for the task that waits for it.
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass
class Supervisor:
    """Starts the processes of ``specs`` in order, and restarts them.

    ``children``: the running processes by name; ``ended``: names of processes that are no longer kept alive;
    ``restarts``: number of restarts by name. ``crashes``: one message for each process that crashed while it was
    stopped.
    """

    specs: Sequence[ChildSpec]
    max_restarts: int
    grace_s: float = STOP_GRACE_S
    children: dict[str, Child] = field(init=False, default_factory=dict)
    restarts: dict[str, int] = field(init=False, default_factory=dict)
    ended: set[str] = field(init=False, default_factory=set)
    finished: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    ending: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    superseded: dict[str, ChildSpec] = field(init=False, default_factory=dict)
    essential_ended: bool = field(init=False, default=False)
    crashes: list[str] = field(init=False, default_factory=list)
    _reported: set[int] = field(init=False, default_factory=set)
    _starting: "set[asyncio.Task[Child]]" = field(init=False, default_factory=set)
    _left: dict[str, tuple[ChildSpec, float]] = field(init=False, default_factory=dict)
    _undone_at: float | None = field(init=False, default=None)
    _joined: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _watchers: "list[asyncio.Task[None]]" = field(init=False, default_factory=list)
    _stop: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    async def run(self, stop: asyncio.Event) -> None:
        """Keep all children running until the essential one exits successfully or ``stop`` is set.

        Consumes: exits of its children. Produces: restarts.
        Waits for: exits, ``stop``.
        On failure: a child that cannot be kept alive ends the run, with the child's last line in the message and with
            the child's exit code. A superseded child does so only if it is essential. A superseded child with
            ``is_single`` is first restarted once.
        On stop: SIGTERM to all, and SIGKILL to those that are left when the grace period ends.
        """
        self._stop = stop
        for spec in self.specs:
            self.join(spec)
        waiters = [asyncio.create_task(event.wait()) for event in (stop, self.finished)]
        try:
            while not stop.is_set() and not self.finished.is_set() and not _failure(self._watchers):
                # Cleared before the list of watchers is read: a process that joins later sets the event again, and is
                # then waited for.
                self._joined.clear()
                joining = asyncio.create_task(self._joined.wait())
                unfinished = _unfinished(self._watchers)
                await asyncio.wait([*waiters, joining, *unfinished], return_when=asyncio.FIRST_COMPLETED)
                joining.cancel()
        finally:
            # Set before the children end; otherwise their watchers would take that for a crash and restart them.
            self.ending.set()
            await self._end_all()
            await end_tasks([*self._watchers, *waiters])
        if (failure := _failure(self._watchers)) is not None:
            raise failure

    def join(self, spec: ChildSpec) -> None:
        """Start another process and keep it alive with the others; does nothing if the run is ending."""
        if not self._is_ending(self._stop):
            # A new worker may have the id of one that left, and would count as gone at once.
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
        policy = RestartPolicy(self.max_restarts, doubts_first_fence=spec.is_single)
        while not self._is_ending(stop):
            stands_by = bool(spec.standby) and (spec.name in self.superseded or bool(self._peers(spec)))
            command = spec.standby if stands_by else [*spec.command, *(() if policy.starts else spec.only_first)]
            child = await self._start(replace(spec, command=command))
            code = await child.process.wait()
            del self.children[spec.name]
            if child.is_asked or self._is_ending(stop):
                self._report_stopped(child, code)
            # An exit during the shutdown does not count, because it was asked for.
            if self._is_ending(stop):
                return
            if child.is_asked and code in CLEAN:
                code = 0
            if code not in (0, Superseded.exit_code):
                for peer in self._peers(spec):
                    peer.take_over()
            decision = policy.decide(code, child.ran_for_s())
            if code == FinishedRunContinues.exit_code:
                self._restart_leavers()
            if code == Superseded.exit_code and decision is RestartDecision.GIVE_UP and self._may_stand_by(spec):
                log.warning("superseded: another trainer leads, this one becomes a standby", process=spec.name)
                continue
            if decision is RestartDecision.DONE and self._left_at_undone_end(child):
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
            # A process that a signal ended has printed no error; its last line would mislead.
            why = {"last_line": child.last_line()} if code > 0 else {"log": str(spec.log_path)}
            log.warning("process died, restarting", process=spec.name, ended=_how(code), in_s=round(pause, 1), **why)
            await asyncio.sleep(pause)
            if code == Superseded.exit_code and any(other.standby for other in self.superseded.values()):
                self._give_up(child, code, policy.crashes)
                return

    async def _start(self, spec: ChildSpec) -> Child:
        """Start a process in a task that the shutdown waits for, so that it also ends a process that just starts."""

        async def start() -> Child:
            child = await Child.start(spec)
            self.children[spec.name] = child
            log.info("process started", process=spec.name, pid=child.pid)
            return child

        self._starting.add(starting := asyncio.create_task(start()))
        starting.add_done_callback(self._starting.discard)
        return await starting

    def _report_stopped(self, child: Child, code: int) -> None:
        """Log a process that was killed or crashed while it was stopped, once."""
        if child.pid in self._reported:
            return
        self._reported.add(child.pid)
        name, place = child.spec.name, str(child.spec.log_path)
        if child.was_killed and code == -signal.SIGKILL:
            log.warning("process killed: it did not exit in time", process=name, after_s=self.grace_s, log=place)
        elif crash := child.crash(code):
            self.crashes.append(crash)
            log.error("process crashed while it was stopped", process=name, ended=_how(code), log=place)

    def _restart_leavers(self) -> None:
        """Restart the processes that have just left because of an end of the run that was undone."""
        self._undone_at = time.monotonic()
        left, self._left = self._left, {}
        for spec, at in left.values():
            if not spec.essential and self._undone_at - at < LEAVING_S:
                log.warning("told of an end that was undone: started again", process=spec.name)
                self.join(spec)

    def _left_at_undone_end(self, child: Child) -> bool:
        """Whether the process was running when the end was undone, and so may have exited because of that end."""
        undone_at = self._undone_at
        if child.spec.essential or undone_at is None:
            return False
        return child.started_at < undone_at and time.monotonic() - undone_at < LEAVING_S

    def _peers(self, spec: ChildSpec) -> list[Child]:
        """Running processes that can do the work of this one."""
        return [child for child in self.children.values() if spec.standby and child.spec.standby]

    def _may_stand_by(self, spec: ChildSpec) -> bool:
        """Record that a process was superseded; returns whether only its own work was taken over."""
        self.superseded[spec.name] = spec
        return bool(spec.standby) and not any(other.is_single for other in self.superseded.values())

    def _give_up(self, child: Child, code: int, crashes: int) -> None:
        spec, line = child.spec, child.last_line()
        superseded = code == Superseded.exit_code
        if superseded and spec.is_single and any(other.standby for other in self.superseded.values()):
            raise Superseded(f"another `streamrl run` has taken this run over: {line}; leave the run to it")
        if spec.standby and not superseded and self._peers(spec):
            log.error("gave up on process, another does its work", process=spec.name, ended=_how(code), last_line=line)
            return
        # A newer process of this id runs elsewhere, so the run is complete without this one unless it is essential.
        if spec.optional or (superseded and not spec.essential):
            log.error("gave up on process", process=spec.name, ended=_how(code), last_line=line)
            return
        often = f", {crashes} times in a row" if crashes > 1 else ""
        # Raised with the class of the child's exit code, so that the run exits with the same code.
        raise _BY_EXIT_CODE.get(code, StreamRLError)(
            f"{spec.name} ended with {_how(code)}{often}: {line}; its log is {spec.log_path}"
        )

    def _is_ending(self, stop: asyncio.Event) -> bool:
        return stop.is_set() or self.finished.is_set() or self.ending.is_set()

    async def _end_all(self) -> None:
        if self._starting:
            await asyncio.wait(self._starting)
        running = list(self.children.values())
        for child in running:
            child.terminate()
        # The grace period starts after the signals, so that each child has all of it.
        deadline = time.monotonic() + self.grace_s
        codes = await asyncio.gather(*(child.wait_or_kill(deadline) for child in running))
        # Reported here, because the children's watchers may be cancelled before they do it.
        for child, code in zip(running, codes, strict=True):
            self._report_stopped(child, code)


@contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """An event that the first SIGINT, SIGTERM or SIGHUP sets; a second one ends this process at once.

    The kernel then ends the children (``die_with_parent``).
    """
    stop = asyncio.Event()

    def ask(number: signal.Signals) -> None:
        stopping.mark_stop_reported()
        by_hand = number == signal.SIGINT
        print("stopping; press Ctrl-C again to stop at once" if by_hand else f"stopping on {number.name}", flush=True)
        stop.set()

    with stopping.stop_requests_handled_by(ask):
        yield stop


def _how(code: int) -> str:
    if code >= 0:
        return f"code {code}"
    # The kernel sends SIGKILL when memory runs out.
    return f"signal {signal.Signals(-code).name}" + (", perhaps out of memory" if code == -signal.SIGKILL else "")


def _failure(tasks: Sequence[asyncio.Task[None]]) -> BaseException | None:
    # ``exception`` raises for a cancelled task.
    ended = (task for task in tasks if task.done() and not task.cancelled())
    return next((error for task in ended if (error := task.exception()) is not None), None)


def _unfinished(tasks: Sequence[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
    return [task for task in tasks if not task.done()]


class RestartDecision(StrEnum):
    """What to do after a process has exited."""

    DONE = "done"
    RESTART = "restart"
    GIVE_UP = "give_up"


@dataclass
class RestartPolicy:
    """Decides whether and when a dead process is restarted. Pure.

    Exponential back-off: min(15 s, 0.5 s × 2^(crashes - 1)), times a random factor of 0.75 to 1.25, so that processes
    that died together do not return together. The count starts again after a process ran for a minute.

    ``doubts_first_fence``: restart the process after its first fence. A broker that dies while a transactional id is
    reopened may forget the id's latest holder (KAFKA-20357) and then fence the only one. If there are two holders, the
    newer one stays: the older one restarts and fences it once, is then fenced itself, and does not return.
    """

    max_restarts: int
    doubts_first_fence: bool = False
    healthy_after_s: float = 60.0
    rng: Callable[[], float] = random.random
    crashes: int = field(default=0, init=False)
    starts: int = field(default=0, init=False)
    _is_transient: bool = field(default=False, init=False)
    _was_superseded: bool = field(default=False, init=False)

    def decide(self, exit_code: int, ran_for_s: float) -> RestartDecision:
        """What to do after an exit.

        A process is not restarted if it was superseded (but see ``doubts_first_fence``), refused to lose data, or found
        its disk full. A user error is final at the first start. At a later start the same settings have worked before,
        so the error may be transient, such as an unreachable broker.
        """
        self.starts += 1
        if exit_code == 0:
            return RestartDecision.DONE
        if exit_code in (DataLossRefused.exit_code, DiskFull.exit_code):
            return RestartDecision.GIVE_UP
        if ran_for_s >= self.healthy_after_s:
            self.crashes, self._was_superseded = 0, False
        if exit_code == Superseded.exit_code:
            if self._was_superseded or not self.doubts_first_fence:
                return RestartDecision.GIVE_UP
            self._was_superseded = self._is_transient = True
            return RestartDecision.RESTART
        if exit_code == UserError.exit_code and self.starts == 1:
            return RestartDecision.GIVE_UP
        self._is_transient = exit_code == UserError.exit_code
        self.crashes += 1
        return RestartDecision.RESTART if self.crashes <= self.max_restarts else RestartDecision.GIVE_UP

    def delay_s(self) -> float:
        """Seconds to wait before the next start; at least about ``TRANSIENT_S`` after a possibly transient error."""
        # The shift is bounded, because a large ``max_restarts`` could make an integer too large for a float.
        doubled = 0.5 * (1 << min(10, max(0, self.crashes - 1)))
        # min(15 s, max(0.5 s * 2^(crashes - 1), 6 s if transient)) * u, with u uniform in [0.75, 1.25).
        return min(15.0, max(doubled, TRANSIENT_S if self._is_transient else 0.0)) * (0.75 + 0.5 * self.rng())
