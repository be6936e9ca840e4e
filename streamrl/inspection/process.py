"""The process of a command that looks at a run: its priority, its log output, and its garbage collection.

This module knows no run and imports nearly nothing: an audit, which ends soon, calls ``lower_priority`` before its slow
imports. A display enters its own session before its first thread. It lowers its priority only after it has shown
something, because its user waits for that.

With autogroups, which most Linux distributions enable, the kernel shares its processors between sessions first. A
niceness then counts only within one session, so a command in another terminal takes as much from a trainer as any other
process. So the command continues in a session of its own, whose share as a whole is made small.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from streamrl.bus.embedded.process import die_with_parent

NICENESS = 19
SHOWN_S = 0.1
"""Seconds between two checks whether a display has shown something."""
DISPLAY_NICENESS = 10
"""Niceness of a display, which a user watches: it gets a tenth of a processor for each that the run keeps busy. At 19
it would get a seventieth, and a page would stall for minutes next to a run that uses all processors."""
AUTOGROUP = Path("/proc/self/autogroup")
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGWINCH)
FIRST_GENERATION = 50_000
"""Objects after which cycles are looked for. Every few decoded messages would reach Python's default of 700."""


def tune_garbage_collector() -> None:
    """Call once everything is imported and built.

    Objects that exist now are kept until the end, so the collector need not look at them again. Thousands of live small
    messages are no sign of cycles, so a collection starts later. This saves a sixth of the time of decoding
    trajectories.
    """
    # First, so that no garbage is frozen.
    gc.collect()
    gc.freeze()
    gc.set_threshold(FIRST_GENERATION, 10, 10)


def log_to_stderr() -> None:
    """Log warnings and errors as plain lines to standard error. Standard output holds only the command's answer."""
    import structlog

    from streamrl.observability.log_lines import printable

    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            printable,
            structlog.processors.LogfmtRenderer(key_order=["level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    # While a broker is away, the client would log every refused connection. A caller that gives up raises an error.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


def lower_priority(niceness: int = NICENESS) -> None:
    """Leave the processors to the run: from now on, the caller takes little more than idle time.

    Call it before any thread is started. With autogroups it returns in a child process. The calling process then
    forwards signals to the child, and ends with the child's exit code.
    """
    enter_own_session()
    raise_niceness(niceness)


def enter_own_session() -> None:
    """Move to a session of its own, so that ``raise_niceness`` works later. Call it before any thread is started.

    As with ``lower_priority``, it returns in a child process.
    """
    if os.access(AUTOGROUP, os.W_OK):
        _continue_in_own_session()


def raise_niceness(niceness: int) -> None:
    """Lower the priority of all threads of this process."""
    _set_niceness(max(niceness, _STARTED_WITH))


def _set_niceness(niceness: int) -> None:
    if os.access(AUTOGROUP, os.W_OK) and os.getsid(0) == os.getpid():  # never our parent's session
        with suppress(OSError):  # the kernel allows only administrators to do this ten times a second
            AUTOGROUP.write_text(str(niceness))
    threads = os.listdir("/proc/self/task") if sys.platform == "linux" else []  # elsewhere one call sets all threads
    for thread in threads or ["0"]:
        with suppress(OSError):  # it has ended in the meantime, or its priority may not be raised
            os.setpriority(os.PRIO_PROCESS, int(thread), niceness)


_STARTED_WITH = os.getpriority(os.PRIO_PROCESS, 0)


async def give_way_when(is_shown: Callable[[], bool]) -> None:
    """Lower a display's priority as soon as it has shown something."""
    while not is_shown():  # noqa: ASYNC110 - no event tells that something was shown
        await asyncio.sleep(SHOWN_S)
    raise_niceness(DISPLAY_NICENESS)


_answering = 0


@contextmanager
def normal_priority() -> Iterator[None]:
    """Run the block at normal priority, because a user waits for its answer.

    Only administrators may raise a priority that was lowered. For other users nothing changes.
    """
    global _answering
    lowered = os.getpriority(os.PRIO_PROCESS, 0)
    if lowered <= _STARTED_WITH and not _answering:
        yield
        return
    if not _answering:
        _set_niceness(_STARTED_WITH)
    _answering += 1
    try:
        yield
    finally:
        _answering -= 1
        if not _answering:
            raise_niceness(DISPLAY_NICENESS)


def print_before_imports(text: str) -> None:
    """Print the next step before slow imports, because they may take long on a busy machine."""
    if sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr, flush=True)


def use_one_thread() -> None:
    """Limit numpy to one thread. Call it before numpy is imported: its idle threads would spin."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _continue_in_own_session() -> None:
    before = os.getpid()
    awaited = {*PASSED_ON, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)  # so that none arrives before ``sigwait``
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # our parent may ignore it, and then it would not be delivered
    if child := os.fork():
        code = _wait_for(child, awaited)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        _exit_as(code)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != before:  # the parent ended before it could be watched
        os._exit(128 + signal.SIGTERM)


def _wait_for(child: int, awaited: Collection[signal.Signals]) -> int:
    """Exit code of the child, negative for the signal that ended it."""
    while True:
        number = signal.sigwait(awaited)
        if number == signal.SIGTSTP:
            _stop_with(child)
        elif number != signal.SIGCHLD:
            os.kill(child, number)
        # SIGCHLD is also sent when a child is stopped or continued. Then waitpid returns 0 as the pid.
        elif (ended := os.waitpid(child, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(ended[1])


def _stop_with(child: int) -> None:
    """Stop the child and this process until this process is continued.

    The child's session has no terminal, so a terminal cannot stop it.
    """
    os.kill(child, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.kill(child, signal.SIGCONT)


def _exit_as(code: int) -> NoReturn:
    # By the same signal, so that a shell sees how the child ended. Without exit handlers, because the child runs them.
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
