"""The process of a command that looks at a run: its priority, where it logs, and how it collects garbage.

Knows no run, and imports next to nothing: an audit, which is over soon, calls ``lower_priority`` before it imports what
takes time. A display calls it when it is about to show something: whoever starts one waits for its first sight.

Linux shares its processors between sessions first where it has autogroups, as most distributions do: a niceness then
counts within one session only, and a command in another terminal takes as much from a trainer as any process. So the
command goes on in a session of its own, whose share as a whole is made small.
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from bus.embedded.process import die_with_parent

NICENESS = 19
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

    from observability.log_lines import printable

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
    if os.access(AUTOGROUP, os.W_OK):
        _continue_in_own_session()
        with suppress(OSError):  # the kernel lets nobody but the administrator do this ten times a second
            AUTOGROUP.write_text(str(niceness))
    os.nice(niceness)


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
