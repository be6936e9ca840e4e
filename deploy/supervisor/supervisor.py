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
    """Starts children in order. ``children`` holds the living ones by name; ``restarts`` counts by name."""

    specs: Sequence[ChildSpec]
    max_restarts: int
    grace_s: float
    children: dict[str, Child] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    ending: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, stop: asyncio.Event) -> None:
        """Run every child until the essential one ends well or ``stop`` is set.

        Consumes: exits of its children. Produces: restarts.
        Waits for: exits, ``stop``.
        On failure: a child that cannot be kept alive ends the run with its last line in the message, under the exit
            code that it had itself. One that was superseded does so only if it is essential.
        On stop: SIGTERM to all, SIGKILL to what is left when the grace period ends.
        """
        watchers = [asyncio.create_task(self._keep_alive(spec, stop)) for spec in self.specs]
        waiters = [asyncio.create_task(event.wait()) for event in (stop, self.finished)]
        try:
            await asyncio.wait([*watchers, *waiters], return_when=asyncio.FIRST_COMPLETED)
            while not stop.is_set() and not self.finished.is_set() and not _failure(watchers):
                await asyncio.wait([*waiters, *_unfinished(watchers)], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.ending.set()
            await self._end_all()
            for task in [*watchers, *waiters]:
                task.cancel()
            await asyncio.gather(*watchers, *waiters, return_exceptions=True)
        if (failure := _failure(watchers)) is not None:
            raise failure

    async def _keep_alive(self, spec: ChildSpec, stop: asyncio.Event) -> None:
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
            log.warning("process died, restarting", process=spec.name, ended=_how(code), in_s=round(pause, 1))
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
    return next((error for task in tasks if task.done() and (error := task.exception()) is not None), None)


def _unfinished(tasks: Sequence[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
    return [task for task in tasks if not task.done()]
