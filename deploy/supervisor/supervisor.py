"""Keeps the processes of a run alive until the essential one ends well, or until told to stop."""

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from deploy.supervisor.child import Child, ChildSpec
from deploy.supervisor.policy import RestartPolicy, Verdict
from schemas.errors import DataLossRefused, StreamRLError, Superseded, UserError

log = structlog.get_logger()

_BY_EXIT_CODE: dict[int, type[StreamRLError]] = {
    error.exit_code: error for error in (UserError, Superseded, DataLossRefused)
}


@dataclass
class Supervisor:
    """Starts children in order.

    ``children`` holds the living ones by name, ``ended`` the names of those that are not kept alive any more;
    ``restarts`` counts by name.
    """

    specs: Sequence[ChildSpec]
    max_restarts: int
    grace_s: float
    children: dict[str, Child] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    _joined: asyncio.Event = field(default_factory=asyncio.Event)
    _watchers: "list[asyncio.Task[None]]" = field(default_factory=list)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, stop: asyncio.Event) -> None:
        """Run every child until the essential one ends well or ``stop`` is set.

        Consumes: exits of its children. Produces: restarts.
        Waits for: exits, ``stop``.
        On failure: a child that cannot be kept alive ends the run with its last line in the message, under the exit
            code that it had itself. One that was superseded does so only if it is essential.
        On stop: SIGTERM to all, SIGKILL to what is left when the grace period ends.
        """
        self._stop = stop
        for spec in self.specs:
            self.join(spec)
        waiters = [asyncio.create_task(event.wait()) for event in (stop, self.finished)]
        try:
            while not stop.is_set() and not self.finished.is_set() and not _failure(self._watchers):
                self._joined.clear()
                joining = asyncio.create_task(self._joined.wait())
                unfinished = _unfinished(self._watchers)
                await asyncio.wait([*waiters, joining, *unfinished], return_when=asyncio.FIRST_COMPLETED)
                joining.cancel()
        finally:
            self.ending.set()
            await self._end_all()
            for task in [*self._watchers, *waiters]:
                task.cancel()
            await asyncio.gather(*self._watchers, *waiters, return_exceptions=True)
        if (failure := _failure(self._watchers)) is not None:
            raise failure

    def join(self, spec: ChildSpec) -> None:
        """Start one more process, and keep it alive with the others; nothing once the run is ending."""
        if not self._over(self._stop):
            self.ended.discard(spec.name)
            self._watchers.append(asyncio.create_task(self._keep_alive(spec, self._stop)))
            self._joined.set()

    async def _keep_alive(self, spec: ChildSpec, stop: asyncio.Event) -> None:
        try:
            await self._live(spec, stop)
        finally:
            self.ended.add(spec.name)

    async def _live(self, spec: ChildSpec, stop: asyncio.Event) -> None:
        policy = RestartPolicy(self.max_restarts)
        while not self._over(stop):
            child = self.children[spec.name] = await Child.start(spec)
            log.info("process started", process=spec.name, pid=child.pid)
            code = await child.process.wait()
            del self.children[spec.name]
            if self._over(stop):
                return
            verdict = policy.judge(code, child.ran_for_s())
            if verdict is Verdict.DONE:
                if spec.essential:
                    self.finished.set()
                log.info("process ended", process=spec.name)
                return
            if verdict is Verdict.GIVE_UP:
                self._give_up(child, code, policy.crashes)
                return
            self.restarts[spec.name] = self.restarts.get(spec.name, 0) + 1
            pause = policy.delay_s()
            why = {"last_line": child.last_line()} if code > 0 else {}
            log.warning("process died, restarting", process=spec.name, ended=_how(code), in_s=round(pause, 1), **why)
            await asyncio.sleep(pause)

    def _give_up(self, child: Child, code: int, crashes: int) -> None:
        spec, line = child.spec, child.last_line()
        superseded = code == Superseded.exit_code
        if spec.optional or (superseded and not spec.essential):
            log.error("process given up", process=spec.name, ended=_how(code), last_line=line)
            return
        often = f" for the {crashes}th time in a row" if crashes > 1 else ""
        raise _BY_EXIT_CODE.get(code, StreamRLError)(
            f"{spec.name} ended with {_how(code)}{often}: {line}; its log is {spec.log_path}"
        )

    def _over(self, stop: asyncio.Event) -> bool:
        return stop.is_set() or self.finished.is_set() or self.ending.is_set()

    async def _end_all(self) -> None:
        living = list(self.children.values())
        for child in living:
            child.terminate()
        deadline = time.monotonic() + self.grace_s
        await asyncio.gather(*(child.wait_or_kill(deadline) for child in living))


def _how(code: int) -> str:
    return f"code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _failure(tasks: Sequence[asyncio.Task[None]]) -> BaseException | None:
    ended = (task for task in tasks if task.done() and not task.cancelled())
    return next((error for task in ended if (error := task.exception()) is not None), None)


def _unfinished(tasks: Sequence[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
    return [task for task in tasks if not task.done()]
