"""The process of a command that looks at a run: its priority, where it logs, and how it collects garbage.

Knows no run, and imports next to nothing: an audit, which is over soon, calls ``lower_priority`` before it imports what
takes time. A display goes into its own session before its first thread, and gives way once it has shown something:
whoever starts one, or asks it for something, waits for it.

Linux shares its processors between sessions first where it has autogroups, as most distributions do: a niceness then
counts within one session only, and a command in another terminal takes as much from a trainer as any process. So the
command goes on in a session of its own, whose share as a whole is made small.
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
"""Between two looks whether a display has shown something."""
DISPLAY_NICENESS = 10
"""Of what somebody waits for while it goes on: a tenth of a processor for each that the run keeps busy. At 19 it would
be a seventieth, with which a page stands still for minutes beside a run that leaves nothing."""
AUTOGROUP = Path("/proc/self/autogroup")
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGWINCH)
FIRST_GENERATION = 50_000
"""Objects after which cycles are looked for; Python's own 700 would be reached with every few messages decoded."""


def tune_garbage_collector() -> None:
    """Call once everything is imported and built.

    What is there now stays for good and need not be looked at again; and thousands of small messages alive at once
    are no sign of cycles, so looking starts later. Worth a sixth of the time of decoding trajectories.
    """
    # First, so that no garbage is frozen for good.
    gc.collect()
    gc.freeze()
    gc.set_threshold(FIRST_GENERATION, 10, 10)


def log_to_stderr() -> None:
    """Warnings and worse, as plain lines: standard output is the answer of a command and nothing else."""
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
    # Of a broker that goes away the client would log every refused connection; what gives up says so itself.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


def lower_priority(niceness: int = NICENESS) -> None:
    """Leave the processors to the run: from now on the caller takes what nobody else wants, or little more.

    Called before any thread is started. Where there are autogroups it returns in a child; this process passes signals
    on to it and ends as it ends.
    """
    enter_own_session()
    give_way(niceness)


def enter_own_session() -> None:
    """For who will give way later. Called before any thread is started; see ``lower_priority``."""
    if os.access(AUTOGROUP, os.W_OK):
        _continue_in_own_session()


def give_way(niceness: int) -> None:
    """From now on, all threads of this process."""
    _set_niceness(max(niceness, _STARTED_WITH))


def _set_niceness(niceness: int) -> None:
    if os.access(AUTOGROUP, os.W_OK) and os.getsid(0) == os.getpid():  # never the session of whoever started us
        with suppress(OSError):  # the kernel lets nobody but the administrator do this ten times a second
            AUTOGROUP.write_text(str(niceness))
    threads = os.listdir("/proc/self/task") if sys.platform == "linux" else []  # elsewhere one call is for all of them
    for thread in threads or ["0"]:
        with suppress(OSError):  # it ended meanwhile, or may not be raised
            os.setpriority(os.PRIO_PROCESS, int(thread), niceness)


_STARTED_WITH = os.getpriority(os.PRIO_PROCESS, 0)


async def give_way_when(is_shown: Callable[[], bool]) -> None:
    """As a display does, once there is something to be seen."""
    while not is_shown():  # noqa: ASYNC110 - what is seen is not ours to signal
        await asyncio.sleep(SHOWN_S)
    give_way(DISPLAY_NICENESS)


_answering = 0


@contextmanager
def normal_priority() -> Iterator[None]:
    """While somebody waits for an answer. What was lowered, only administrators may raise; else nothing changes."""
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
            give_way(DISPLAY_NICENESS)


def say_at_once(text: str) -> None:
    """To a person, before anything is imported that takes time: on a busy machine that may be long."""
    if sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr, flush=True)


def use_one_thread() -> None:
    """Call before numpy is imported: its threads wait for work by turning, and displays have none for them."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _continue_in_own_session() -> None:
    before = os.getpid()
    awaited = {*PASSED_ON, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)  # so that none comes before it is waited for
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who starts us may ignore it, and nothing would be told then
    if child := os.fork():
        code = _wait_for(child, awaited)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        _exit_as(code)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != before:  # it ended before it could be watched
        os._exit(128 + signal.SIGTERM)


def _wait_for(child: int, awaited: Collection[signal.Signals]) -> int:
    """Exit code of the child, negative for the signal that ended it."""
    while True:
        number = signal.sigwait(awaited)
        if number == signal.SIGTSTP:
            _stop_with(child)
        elif number != signal.SIGCHLD:
            os.kill(child, number)
        # SIGCHLD also tells of a child that was stopped or goes on; waitpid gives 0 for its pid then.
        elif (ended := os.waitpid(child, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(ended[1])


def _stop_with(child: int) -> None:
    """Until somebody lets this process go on. A stop from a terminal would not act in a session that has none."""
    os.kill(child, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.kill(child, signal.SIGCONT)


def _exit_as(code: int) -> NoReturn:
    # By the same signal, so that a shell sees how the child ended; and with no exit handlers, which are the child's.
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
