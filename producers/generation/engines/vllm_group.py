"""What runs in the processes of a vLLM engine beside vLLM: they end with their worker, and ranks divide logits.

A worker starts an engine core, or several under data parallelism with their coordinator; a core starts its
tensor-parallel ranks. Each is spawned, asks Linux to be killed at the end of the thread that started it, and looks
whether it is too late for that. So ``kill -9`` of a worker takes all of them with it, without anybody's help.

Each process that a worker starts leads a process group: an interrupt typed at the worker's terminal, or sent to its
group, reaches the worker alone, which then hands over what was sampled and ends them itself.

Invariant no_process_of_the_group_outlives_its_worker.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context
from typing import Any

from bus.embedded.process import die_with_parent

_STARTER_IS_GONE = 1


class _Rank(context.SpawnProcess):
    """A process that the kernel kills at the end of the thread that started it."""

    def run(self) -> None:
        end_with(self._parent_pid)  # type: ignore[attr-defined]
        super().run()


class _Leader(context.SpawnProcess):
    """A ``_Rank`` that leads a process group, and whose own children are ranks."""

    def run(self) -> None:
        end_with(self._parent_pid)  # type: ignore[attr-defined]
        os.setpgid(0, 0)
        context.SpawnContext.Process = _Rank
        super().run()


@contextmanager
def spawning_a_group() -> Iterator[None]:
    """What is spawned within, and all its children, ends with this thread."""
    before = context.SpawnContext.Process
    context.SpawnContext.Process = _Leader
    try:
        yield
    finally:
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
