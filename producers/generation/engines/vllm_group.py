"""What runs in the processes of a vLLM engine beside vLLM: they end with their worker, and ranks divide logits.

A worker starts an engine core, or several under data parallelism with their coordinator; a core starts its
tensor-parallel ranks. Each is spawned, asks Linux to be killed at the end of the thread that started it, and looks
whether it is too late for that. So ``kill -9`` of a worker takes all of them with it, without anybody's help.

Each process that a worker starts leads a process group: an interrupt typed at the worker's terminal, or sent to its
group, reaches the worker alone, which then hands over what was sampled and ends them itself.

Each tells the worker which errors it logs, too: a client of vLLM's learns that a process has ended, and not why.

Invariants: no_process_of_the_group_outlives_its_worker; engines_that_start_together_do_not_mix. vLLM offers no place
to say how its processes are started: it asks multiprocessing. So ``_Process`` stands in multiprocessing's place from
the first engine on and is never taken out. Which engine a process belongs to is a matter of the thread that makes it,
and the process brings along all that it needs: nothing of one engine lies where another could find it.
"""

import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from multiprocessing import context
from typing import Any

from streamrl.bus.embedded.process import die_with_parent
from streamrl.schemas.errors import EngineError
from streamrl.schemas.plain_text import plain_text

_STARTER_IS_GONE = 1
_LONGEST_LINE, _TAIL_BYTES = 400, 16 << 10
_NO_CAUSE = "root cause"
"""Stands in what vLLM says in a process of a failure of another one: see stack trace for root cause."""


class EngineErrors:
    """What the processes of an engine logged as errors: a file without a name, which ends with this process."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the engine runs
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def last(self) -> str:
        """The last one in one line, none that only points to another; empty if there is none."""
        with suppress(OSError, ValueError):
            number = self._file.fileno()
            tail = os.pread(number, _TAIL_BYTES, max(0, os.fstat(number).st_size - _TAIL_BYTES))
            lines = [line for line in tail.decode(errors="replace").splitlines() if line.strip()]
            causes = [line for line in lines if _NO_CAUSE not in line]
            return plain_text((causes or lines or [""])[-1])
        return ""

    def close(self) -> None:
        """Nobody asks any more; idempotent."""
        self._file.close()


class _ErrorTeller(logging.Handler):
    """Appends a line to the worker's ``EngineErrors`` for every error that vLLM logs."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        # Appending: several processes write into it, each a line at once.
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.tell(record.getMessage() if error is None else error)

    def tell(self, said: str | BaseException) -> None:
        text = f"{type(said).__name__}: {said}" if isinstance(said, BaseException) else said
        with suppress(OSError):
            os.write(self._file, f"{' '.join(text.split())[:_LONGEST_LINE]}\n".encode(errors="replace"))


@dataclass(frozen=True)
class _Member:
    """What the starting process passes to a process of an engine, pickled before the target that it runs."""

    errors: str
    """Path of the file that ``EngineErrors`` reads."""
    environment: Mapping[str, str]
    leads: bool


class EngineGroup:
    """The processes of one engine, which a thread of this process starts.

    ``environment``: variables that they have and this process has not. ``errors``: what they logged as errors.
    Their temporary files lie in a directory of the group, which ``close`` removes: vLLM leaves some of them behind, and
    so does a process that is killed.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.errors = EngineErrors()
        self._directory = tempfile.TemporaryDirectory(prefix="streamrl-vllm-", ignore_cleanup_errors=True)
        self.member = _Member(self.errors.path, {**environment, "TMPDIR": self._directory.name}, leads=True)
        self._gate, self._is_ended = threading.Lock(), False
        self._processes: list[_Process] = []

    @contextmanager
    def spawning(self) -> Iterator[None]:
        """What this thread spawns within, and all that those processes spawn, is of this group and ends with it."""
        _stand_in()
        token = _STARTING.set(self)
        try:
            yield
        finally:
            _STARTING.reset(token)

    def start(self, process: "_Process", start: Callable[[], None]) -> None:
        """Start a process, unless the group has ended.

        Raises:
            EngineError: it has.
        """
        # Under the lock, so that the end of the group comes before the start, and forbids it, or after, and ends it.
        with self._gate:
            if self._is_ended:
                raise EngineError("expected an engine that is wanted, got one that was given up while it started")
            start()
            self._processes.append(process)

    def kill(self) -> None:
        """End what was started and start no more; from any thread, idempotent. They hold nothing to be put away."""
        with self._gate:
            self._is_ended = True
            for process in self._processes:
                with suppress(ValueError):  # joined and closed
                    process.kill()

    def close(self) -> None:
        """Kill, wait until nothing of it is there, and remove its errors and temporary files; idempotent.

        By the thread that started it.
        """
        self.kill()
        while self._processes:
            with suppress(ValueError):
                self._processes.pop().join()
        self.errors.close()
        self._directory.cleanup()


_STARTING: ContextVar[EngineGroup | None] = ContextVar("the engine whose processes this thread starts", default=None)
_MEMBER: _Member | None = None
"""What this process is in an engine; set before it runs anything, and then all that it spawns is of that engine."""


class _Process(context.SpawnProcess):
    """In the place of multiprocessing's own: one of an engine, if made within its ``spawning`` or by one of its own.

    A process of an engine is killed by the kernel at the end of the thread that started it.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._group = _STARTING.get()
        self.member = _MEMBER if self._group is None else self._group.member

    def start(self) -> None:
        if self._group is None:
            super().start()
        else:
            self._group.start(self, super().start)

    def __reduce__(self) -> tuple[Any, ...]:
        # As it is told in the new process; the call comes before what it runs is unpickled, and so imported.
        return _join, (type(self), self.member, os.getpid()), self.__dict__ | {"_group": None}

    def run(self) -> None:
        if self.member is None:
            super().run()
            return
        with _telling_errors(self.member.errors):
            super().run()


def _join(kind: type[_Process], member: _Member | None, starter: int) -> _Process:
    global _MEMBER  # of the new process, which runs nothing else yet
    if member is not None:
        end_with(starter)
        if member.leads:
            os.setpgid(0, 0)
        os.environ.update(member.environment)
        _MEMBER = replace(member, leads=False)
        _stand_in()
    return kind.__new__(kind)


def _stand_in() -> None:
    context.SpawnContext.Process = _Process


@contextmanager
def _telling_errors(path: str) -> Iterator[None]:
    """Tell the worker which errors are logged within, and of one that leaves."""
    try:
        teller = _ErrorTeller(path)
    except OSError:
        yield  # they are in the log all the same
        return
    # By now what runs within has been unpickled, and vLLM imported, which makes its logger anew.
    logging.getLogger("vllm").addHandler(teller)
    try:
        yield
    except Exception as error:
        teller.tell(error)
        raise


def end_with(starter: int) -> None:
    """Have this process killed when the thread that started it ends; end at once if its process ``starter`` is gone."""
    if sys.platform != "linux":
        return
    die_with_parent()
    if os.getppid() != starter:
        os._exit(_STARTER_IS_GONE)


class RankExtension:
    """Methods that vLLM adds to its worker class in every rank (``worker_extension_cls``), called by name."""

    def divide_logits(self, temperature: float) -> None:
        """Have the model's ``compute_logits`` return them divided by a temperature, in float32.

        vLLM asks ``compute_logits`` of every model that generates; loading new weights leaves ours in its place.
        """
        model: Any = self.get_model()  # type: ignore[attr-defined]
        plain = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = plain(*args, **kwargs)
            # None: of a tensor-parallel model's ranks only the first has them.
            return None if logits is None else logits.float() / temperature

        model.compute_logits = compute_logits
