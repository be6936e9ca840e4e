"""Our code in the processes of a vLLM engine: they end with their worker, report errors, and ranks divide logits.

A worker starts an engine core; with data parallelism it starts several and their coordinator. A core starts its
tensor-parallel ranks. Each process is spawned, asks Linux to be killed when the thread that started it ends, and checks
that this has not happened already. So ``kill -9`` of a worker ends all of them, without help from another process.

Each process that a worker starts leads a process group. An interrupt typed at the worker's terminal, or sent to its
group, reaches only the worker, which then hands over sampled tokens and ends the processes itself.

Each process also reports its logged errors to the worker: vLLM's client learns that a process has ended, but not why.

Invariants: no_process_of_the_group_outlives_its_worker; engines_that_start_together_do_not_mix. vLLM offers no hook for
starting its processes, but uses multiprocessing. So ``_Process`` replaces multiprocessing's own class from the first
engine on, and is never removed. The thread that creates a process decides to which engine it belongs, and the process
receives all that it needs. No engine stores anything where another would find it.
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
"""Part of vLLM's message about a failure in another process: "see stack trace for root cause"."""


class EngineErrors:
    """The errors that an engine's processes logged, in a file without a name, which ends with this process."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open while the engine runs
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def last(self) -> str:
        """The last error as one line, preferably one that does not only refer to another; empty if there is none."""
        with suppress(OSError, ValueError):
            number = self._file.fileno()
            tail = os.pread(number, _TAIL_BYTES, max(0, os.fstat(number).st_size - _TAIL_BYTES))
            lines = [line for line in tail.decode(errors="replace").splitlines() if line.strip()]
            causes = [line for line in lines if _NO_CAUSE not in line]
            return plain_text((causes or lines or [""])[-1])
        return ""

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()


class _ErrorReporter(logging.Handler):
    """Appends a line to the worker's ``EngineErrors`` for every error that vLLM logs."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        # Opened for appending: several processes write to it, each a whole line at once.
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.report(record.getMessage() if error is None else error)

    def report(self, said: str | BaseException) -> None:
        text = f"{type(said).__name__}: {said}" if isinstance(said, BaseException) else said
        with suppress(OSError):
            os.write(self._file, f"{' '.join(text.split())[:_LONGEST_LINE]}\n".encode(errors="replace"))


@dataclass(frozen=True)
class _Member:
    """Data that a process of an engine gets from the process that starts it, pickled before the target that it runs."""

    errors: str
    """Path of the file that ``EngineErrors`` reads."""
    environment: Mapping[str, str]
    leads: bool


class EngineGroup:
    """The processes of one engine, which a thread of this process starts.

    ``environment``: variables that only they have. ``errors``: the errors that they logged. Their temporary files are
    in a directory of the group, which ``close`` removes: vLLM leaves some of them behind, and so does a killed process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.errors = EngineErrors()
        self._directory = tempfile.TemporaryDirectory(prefix="streamrl-vllm-", ignore_cleanup_errors=True)
        self.member = _Member(self.errors.path, {**environment, "TMPDIR": self._directory.name}, leads=True)
        self._gate, self._is_ended = threading.Lock(), False
        self._processes: list[_Process] = []

    @contextmanager
    def spawning(self) -> Iterator[None]:
        """Within this context, processes that this thread spawns, and their own children, belong to this group."""
        _replace_process_class()
        token = _STARTING.set(self)
        try:
            yield
        finally:
            _STARTING.reset(token)

    def start(self, process: "_Process", start: Callable[[], None]) -> None:
        """Start a process of the group.

        Raises:
            EngineError: the group has ended.
        """
        # The lock orders start and end of the group: an earlier end forbids the start, a later one kills the process.
        with self._gate:
            if self._is_ended:
                raise EngineError("expected to start a vLLM process, but its engine was stopped during its start")
            start()
            self._processes.append(process)

    def kill(self) -> None:
        """Kill all processes of the group and refuse to start others. May be called from any thread; idempotent.

        The processes have nothing that needs to be saved.
        """
        with self._gate:
            self._is_ended = True
            for process in self._processes:
                with suppress(ValueError):  # it was joined and closed
                    process.kill()

    def close(self) -> None:
        """Kill all processes, wait for their end, and remove errors and temporary files; idempotent.

        Only for the thread that started them.
        """
        self.kill()
        while self._processes:
            with suppress(ValueError):
                self._processes.pop().join()
        self.errors.close()
        self._directory.cleanup()


_STARTING: ContextVar[EngineGroup | None] = ContextVar("the engine whose processes this thread starts", default=None)
_MEMBER: _Member | None = None
"""This process's membership in an engine, set before it runs anything. All processes that it spawns inherit it."""


class _Process(context.SpawnProcess):
    """Replaces multiprocessing's own class. A process belongs to an engine if it is created within that engine's
    ``spawning`` or by one of that engine's processes.

    The kernel kills a process of an engine when the thread that started it ends.
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
        # The new process calls ``_join`` before it unpickles its target, which imports the target's module.
        return _join, (type(self), self.member, os.getpid()), self.__dict__ | {"_group": None}

    def run(self) -> None:
        if self.member is None:
            super().run()
            return
        with _reporting_errors(self.member.errors):
            super().run()


def _join(kind: type[_Process], member: _Member | None, starter: int) -> _Process:
    global _MEMBER  # this is the new process, which runs nothing else yet
    if member is not None:
        end_with(starter)
        if member.leads:
            os.setpgid(0, 0)
        os.environ.update(member.environment)
        _MEMBER = replace(member, leads=False)
        _replace_process_class()
    return kind.__new__(kind)


def _replace_process_class() -> None:
    context.SpawnContext.Process = _Process


@contextmanager
def _reporting_errors(path: str) -> Iterator[None]:
    """Report to the worker the errors that are logged in this context, and an exception that leaves it."""
    try:
        reporter = _ErrorReporter(path)
    except OSError:
        yield  # errors are still in the log
        return
    # The target has been unpickled by now, so vLLM is imported and has set up its logger.
    logging.getLogger("vllm").addHandler(reporter)
    try:
        yield
    except Exception as error:
        reporter.report(error)
        raise


def end_with(starter: int) -> None:
    """Make the kernel kill this process when the thread that started it ends; exit if process ``starter`` is gone."""
    if sys.platform != "linux":
        return
    die_with_parent()
    if os.getppid() != starter:
        os._exit(_STARTER_IS_GONE)


class RankExtension:
    """Methods that vLLM adds to its worker class in every rank (``worker_extension_cls``), called by name."""

    def divide_logits(self, temperature: float) -> None:
        """Make the model's ``compute_logits`` return logits divided by a temperature, in float32.

        vLLM calls ``compute_logits`` of every generating model; loading new weights does not undo the replacement.
        """
        model: Any = self.get_model()  # type: ignore[attr-defined]
        plain = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = plain(*args, **kwargs)
            # None: only the first rank of a tensor-parallel model has logits.
            return None if logits is None else logits.float() / temperature

        model.compute_logits = compute_logits
