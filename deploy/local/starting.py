"""Starts a run's broker while the task is checked: the broker takes one processor, the check another one.

Invariant a_refused_start_leaves_nothing: if the check refuses the run, the broker is stopped, and everything that its
start created is removed. The same holds if the check is interrupted, or the wait for the broker after it.
"""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from streamrl.schemas.stopping import held

T = TypeVar("T")


@contextmanager
def broker_beside(broker: AbstractContextManager[str], data: Path, check: Callable[[], T]) -> Iterator[tuple[str, T]]:
    """Enter ``broker`` in another thread while ``check()`` runs; yields the broker's address and the check's result.

    ``data``: the folder of the broker's data.

    Raises:
        Exception: the check's error, else the broker's.
    """
    created = [folder for folder in (data, *data.parents) if not folder.exists()]
    with ExitStack() as stack, ThreadPoolExecutor(1, thread_name_prefix="broker") as pool:
        try:
            with held():  # a pool that is interrupted here does not know its thread, and would not wait for it
                starting = pool.submit(stack.enter_context, broker)
            found = check()
            wait([starting])
        except BaseException:
            pool.shutdown()  # then the broker has started, or failed to, and can be stopped
            stack.close()
            if data in created:
                shutil.rmtree(data, ignore_errors=True)
            for folder in created:
                with suppress(OSError):  # something else is in it
                    folder.rmdir()
            raise
        yield starting.result(), found
