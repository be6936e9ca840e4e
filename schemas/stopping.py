"""How a process is asked to end: Ctrl-C, SIGTERM, a terminal that was closed. One way for all commands and roles.

``handle_signals`` is the first thing that a command does. From then on a signal interrupts the main thread wherever it
is, as Ctrl-C does in Python: ``KeyboardInterrupt`` is raised, and within ``asyncio.run`` the task is cancelled. A loop
that ends in its own way waits ``until_asked`` instead. Imports next to nothing, for it comes before all else.

Invariants:
- the_first_signal_asks_and_the_second_ends_at_once: without any clean-up, for it is the clean-up that hangs;
- a_signal_that_comes_twice_at_once_counts_once: timeout(1) and shells send it to a process and to its group;
- an_interrupt_that_a_callback_swallows_is_raised_again: Python runs callbacks of weak references and finalizers between
  two lines, imports among them, and drops what they raise.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_S = 0.5
"""Signals so close together are one request: a person who presses Ctrl-C again has seen that the first did nothing."""


AGAIN_S = 0.02
"""Pause before a swallowed interrupt is raised again: the callback that swallowed it takes less."""


class _Requests:
    """What this process knows of requests to end; there is one, as signals are the process's."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.at = 0.0
        self.is_handled = False
        self.is_over = False
        self.is_held = False
        self.is_swallowed = False
        self.is_said = False
        self.tell: Callable[[signal.Signals], object] | None = None


_requests = _Requests()


def handle_signals() -> None:
    """Let SIGTERM and SIGHUP interrupt this process as Ctrl-C does, and let a crash leave the stacks of all threads.

    SIGHUP stays ignored where it was, as under nohup. The stacks go to standard error, which of a role is its log.
    """
    with suppress(AttributeError, OSError, ValueError):  # there may be no standard error
        faulthandler.enable()
    _requests.is_handled = True
    sys.unraisablehook = _raise_again
    for number in (signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _on_signal)


def is_over() -> None:
    """The command is through: what comes now meets no code of ours, and ends the process as a second signal does."""
    _requests.is_over = True
    # Python notes an interrupt that left a text it ran, such as the methods of a dataclass, and `python -m` would end
    # by SIGINT whatever became of it. With the next text that it runs it forgets.
    exec("")  # noqa: S102
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, _on_signal)


def exit_code(after_ctrl_c: int = 128 + signal.SIGINT) -> int:
    """Of a command that was asked to end: 128 and the signal's number, as a shell reports it.

    ``after_ctrl_c``: of one that goes on until Ctrl-C, which is its good end.
    """
    first = _requests.first
    return after_ctrl_c if first in (None, signal.SIGINT) else 128 + first


def say_stopped() -> None:
    """Say to a person, once, that this command was stopped."""
    if not _requests.is_said:
        _requests.is_said = True
        first = _requests.first
        with suppress(OSError):  # the terminal may be gone
            by = "" if first in (None, signal.SIGINT) else f" by {first.name}"
            sys.stderr.write(f"stopped{by}\n")
            sys.stderr.flush()


def said_by_itself() -> None:
    """The command has its own words for its stop."""
    _requests.is_said = True


@contextmanager
def until_asked(on_ask: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Within, the first request calls ``on_ask`` in the running event loop, and interrupts nothing.

    A request that came before, and was lost in a clean-up, calls ``on_ask`` at once. For the main thread.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    if not _requests.is_handled:
        _requests.first = None  # of an earlier run in this process, which is a user's own
    before = {
        number: signal.signal(number, _on_signal)
        for number in NUMBERS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    }
    _requests.tell = lambda number: loop.call_soon_threadsafe(on_ask, number)
    if _requests.first is not None:
        _requests.is_swallowed = False
        on_ask(_requests.first)
    try:
        yield
    finally:
        _requests.tell = None
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def held() -> Iterator[None]:
    """The block is not interrupted: a request that comes meanwhile interrupts at the end of the block.

    For what starts processes, and for clean-up that takes time. Does nothing where no signal interrupts: in other
    threads, and within ``until_asked``.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or _requests.is_held or _requests.tell is not None or _requests.is_over:
        yield
        return
    if isinstance(sys.exc_info()[1], KeyboardInterrupt) and _requests.first is None:
        # Cleaning up after Ctrl-C: another one is the second.
        _note(signal.SIGINT)
    asked_before = _requests.first
    _requests.is_held = True
    before = signal.getsignal(signal.SIGINT)
    if callable(before):
        signal.signal(signal.SIGINT, _on_signal)
    try:
        yield
    finally:
        _requests.is_held = False
        if callable(before):
            signal.signal(signal.SIGINT, before)
        if _requests.first is not asked_before:
            _interrupt(None)


def _note(number: signal.Signals) -> None:
    _requests.first, _requests.at = number, time.monotonic()


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _requests.is_over:
        os._exit(128 + number)
    if _requests.first is not None and not _requests.is_swallowed:
        if time.monotonic() - _requests.at >= SAME_S:
            os._exit(128 + number)
        return
    _requests.is_swallowed = False
    _note(signal.Signals(number))
    if _requests.tell is not None:
        _requests.tell(signal.Signals(number))
    elif not _requests.is_held:
        _interrupt(frame)


def _interrupt(frame: FrameType | None) -> None:
    """As Ctrl-C does at this moment: asyncio has put its own handler there while it runs a task."""
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    if callable(on_ctrl_c) and on_ctrl_c is not _on_signal:
        on_ctrl_c(signal.SIGINT, frame)
    else:
        raise KeyboardInterrupt


def _raise_again(unraisable: "sys.UnraisableHookArgs") -> None:
    if not isinstance(unraisable.exc_value, KeyboardInterrupt) or _requests.is_over:
        sys.__unraisablehook__(unraisable)
        return
    # Not here: what this function raises is dropped as well.
    _requests.is_swallowed = True
    threading.Thread(target=_send_again, args=(_requests.first or signal.SIGINT,), daemon=True).start()


def _send_again(number: signal.Signals) -> None:
    """Send it once the main thread has left ``_raise_again``, in which a busy machine may keep it for long."""
    while True:
        time.sleep(AGAIN_S)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 — documented, the name apart
        while frame is not None and frame.f_code is not _raise_again.__code__:
            frame = frame.f_back
        if frame is None:
            break
    os.kill(os.getpid(), number)
