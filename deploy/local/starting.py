"""Starts a run's broker while the task is checked: the broker takes one processor, the check another one.

Invariant a_refused_start_leaves_nothing: if the check refuses the run, the broker is stopped, and everything that its
start created is removed.
"""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def broker_beside(broker: AbstractContextManager[str], data: Path, check: Callable[[], T]) -> Iterator[tuple[str, T]]:
    """Enter ``broker`` in another thread while ``check()`` runs; yields the broker's address and the check's result.

    ``data``: the folder of the broker's data.

    Raises:
        Exception: the check's error, else the broker's.
    """
    created = [folder for folder in (data, *data.parents) if not folder.exists()]
    with ExitStack() as stack:
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="broker") as pool:
                starting = pool.submit(stack.enter_context, broker)
                found = check()
        except BaseException:
            stack.close()  # the pool is closed by now, so the broker has started, or failed to
            if data in created:
                shutil.rmtree(data, ignore_errors=True)
            for folder in created:
                with suppress(OSError):  # something else is in it
                    folder.rmdir()
            raise
        yield starting.result(), found
