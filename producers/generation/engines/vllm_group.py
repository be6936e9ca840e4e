"""What runs in the processes of a vLLM engine beside vLLM: they end with their worker, and ranks divide logits.

A worker starts an engine core, or several under data parallelism with their coordinator; a core starts its
tensor-parallel ranks. Each is spawned, asks Linux to be killed at the end of the thread that started it, and looks
whether it is too late for that. So ``kill -9`` of a worker takes all of them with it, without anybody's help.

Each process that a worker starts leads a process group: an interrupt typed at the worker's terminal, or sent to its
group, reaches the worker alone, which then hands over what was sampled and ends them itself.

Each tells the worker which errors it logs, too: a client of vLLM's learns that a process has ended, and not why.

Invariant no_process_of_the_group_outlives_its_worker.
"""

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import context
from typing import Any

from bus.embedded.process import die_with_parent
from schemas.plain_text import plain_text

_STARTER_IS_GONE = 1
_ERRORS = "STREAMRL_ENGINE_ERRORS"
"""Variable with the path of what ``EngineErrors`` reads."""
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


@contextmanager
def _telling_errors() -> Iterator[None]:
    """Tell the worker which errors are logged within, and of one that leaves."""
    try:
        teller = _ErrorTeller(os.environ[_ERRORS])
    except (KeyError, OSError):
        yield  # they are in the log all the same
        return
    # By now what runs within has been unpickled, and vLLM imported, which makes its logger anew.
    logging.getLogger("vllm").addHandler(teller)
    try:
        yield
    except Exception as error:
        teller.tell(error)
        raise


class _Rank(context.SpawnProcess):
    """A process that the kernel kills at the end of the thread that started it."""

    def run(self) -> None:
        end_with(self._parent_pid)  # type: ignore[attr-defined]
        with _telling_errors():
            super().run()


class _Leader(context.SpawnProcess):
    """A ``_Rank`` that leads a process group, and whose own children are ranks."""

    def run(self) -> None:
        end_with(self._parent_pid)  # type: ignore[attr-defined]
        os.setpgid(0, 0)
        context.SpawnContext.Process = _Rank
        with _telling_errors():
            super().run()


@contextmanager
def spawning_a_group(errors: EngineErrors) -> Iterator[None]:
    """What is spawned within, and all its children, ends with this thread, and says which errors it logs."""
    before = context.SpawnContext.Process
    context.SpawnContext.Process = _Leader
    os.environ[_ERRORS] = errors.path
    try:
        yield
    finally:
        del os.environ[_ERRORS]
        context.SpawnContext.Process = before


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
