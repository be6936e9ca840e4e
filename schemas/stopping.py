"""How a process is asked to stop: Ctrl-C, SIGTERM or a closed terminal. All commands and roles share this module.

A command calls ``handle_signals`` first. From then on a signal interrupts the main thread at any point, as Ctrl-C does
in Python: ``KeyboardInterrupt`` is raised, and within ``asyncio.run`` the task is cancelled. A loop that stops in its
own way uses ``stop_requests_handled_by`` instead. This module imports almost nothing, because it is loaded before
everything else.

Invariants:
- the_first_signal_requests_a_stop_and_the_second_ends_at_once: the second skips all clean-up, as the clean-up may hang;
- simultaneous_signals_count_once: timeout(1) and shells send a signal to a process and to its process group;
- an_interrupt_swallowed_by_a_callback_is_raised_again: Python runs callbacks of weak references and finalizers between
  any two lines, imports included, and drops the exceptions that they raise;
- a_module_that_is_being_imported_is_not_interrupted: a library of C++ that runs Python code while it loads, as torch
  does, aborts the process if that code raises. The interrupt comes when the import is over.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_S = 0.5
"""Seconds within which two signals count as one request. A person waits longer before pressing Ctrl-C again."""
AGAIN_S = 0.02
"""Seconds between two looks whether a swallowed or postponed interrupt can be raised."""
IMPORTING_S = 60.0
"""Most seconds that an import postpones an interrupt: torch takes 2 s, on a busy machine 30 s."""


class _Requests:
    """State of the requests to stop. There is one object, because signals concern the whole process."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.at = 0.0
        self.is_handled = False
        self.is_over = False
        self.is_held = False
        self.is_due = False  # the first request's interrupt was swallowed or postponed, and will be raised again
        self.is_again = False  # the next signal is the one that raises it
        self.is_reported = False
        self.on_request: Callable[[signal.Signals], object] | None = None


_requests = _Requests()


def handle_signals() -> None:
    """Let SIGTERM and SIGHUP interrupt this process as Ctrl-C does, and let a crash leave the stacks of all threads.

    SIGHUP stays ignored if it was ignored before, as under nohup. The stacks go to standard error; a role's standard
    error is its log. SIGINT interrupts even if it was ignored before, as in the background of a script.
    """
    with suppress(AttributeError, OSError, ValueError):  # the process may have no standard error
        faulthandler.enable()
    _requests.is_handled = True
    sys.unraisablehook = _raise_again
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # Scripts start their background commands so. asyncio cancels a task only if SIGINT has a handler.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _on_signal)


def is_over() -> None:
    """Mark the command as finished. A later signal ends the process at once, as a second signal does."""
    _requests.is_over = True
    # When an interrupt leaves code that Python ran from a string, such as a dataclass's methods, Python sets a flag.
    # With that flag, `python -m` ends by SIGINT even if the interrupt was handled. Running another string clears it.
    exec("")  # noqa: S102
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, _on_signal)


def exit_code(after_ctrl_c: int = 128 + signal.SIGINT) -> int:
    """Exit code of a command that was asked to stop: 128 plus the signal's number, as a shell reports it.

    ``after_ctrl_c``: the exit code after Ctrl-C. A command that runs until Ctrl-C passes its code for success.
    """
    first = _requests.first
    return after_ctrl_c if first in (None, signal.SIGINT) else 128 + first


def report_stopped() -> None:
    """Print to standard error, once, that this command was stopped."""
    if not _requests.is_reported:
        _requests.is_reported = True
        first = _requests.first
        with suppress(OSError):  # the terminal may be gone
            by = "" if first in (None, signal.SIGINT) else f" by {first.name}"
            sys.stderr.write(f"stopped{by}\n")
            sys.stderr.flush()


def mark_stop_reported() -> None:
    """Note that the command has printed its own message about the stop, so ``report_stopped`` prints none."""
    _requests.is_reported = True


@contextmanager
def stop_requests_handled_by(on_ask: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Within the block, the first request calls ``on_ask`` in the running event loop and interrupts nothing.

    If a request came before and was lost in a clean-up, ``on_ask`` is called at once. Only for the main thread.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    if not _requests.is_handled:
        _requests.first = None  # left from an earlier run in this process, which is the user's own program
    before = {
        number: signal.signal(number, _on_signal)
        for number in NUMBERS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    }
    _requests.on_request = lambda number: loop.call_soon_threadsafe(on_ask, number)
    if _requests.first is not None:
        _requests.is_due = False
        on_ask(_requests.first)
    try:
        yield
    finally:
        _requests.on_request = None
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def held() -> Iterator[None]:
    """Delays interrupts: a request during the block interrupts at the block's end.

    For code that starts processes, and for clean-up that takes time. Does nothing where no signal interrupts: in other
    threads and within ``stop_requests_handled_by``.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or _requests.is_held or _requests.on_request is not None or _requests.is_over:
        yield
        return
    if isinstance(sys.exc_info()[1], KeyboardInterrupt) and _requests.first is None:
        # The block cleans up after Ctrl-C, so another Ctrl-C is the second.
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
    if _requests.first is not None and not _requests.is_again:
        if time.monotonic() - _requests.at >= SAME_S:
            os._exit(128 + number)
        return
    _requests.is_again = _requests.is_due = False
    if _requests.first is None:
        _note(signal.Signals(number))
    if _requests.on_request is not None:
        _requests.on_request(signal.Signals(number))
    elif not _requests.is_held:
        _interrupt(frame)


def _interrupt(frame: FrameType | None) -> None:
    """Interrupt as Ctrl-C does at this moment: while asyncio runs a task, it has its own handler for SIGINT."""
    if _postpones(sys._getframe()):  # noqa: SLF001 — documented, the name apart
        _raise_later()
        return
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    if callable(on_ctrl_c) and on_ctrl_c is not _on_signal:
        on_ctrl_c(signal.SIGINT, frame)
    else:
        raise KeyboardInterrupt


def _raise_again(unraisable: "sys.UnraisableHookArgs") -> None:
    if not isinstance(unraisable.exc_value, KeyboardInterrupt) or _requests.is_over:
        sys.__unraisablehook__(unraisable)
        return
    # Not raised here, because Python drops exceptions of this function too.
    _raise_later()


def _raise_later() -> None:
    _requests.is_due = True
    threading.Thread(target=_send_again, args=(_requests.first or signal.SIGINT,), daemon=True).start()


def _send_again(number: int) -> None:
    """Send the signal once the main thread, which a busy machine may delay, is where it can be interrupted."""
    while True:
        time.sleep(AGAIN_S)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 — documented, the name apart
        if not (_runs(frame, _raise_again.__code__) or _postpones(frame)):
            break
    if _requests.is_due:
        _requests.is_again = True
        os.kill(os.getpid(), number)


def _postpones(frame: FrameType | None) -> bool:
    is_importing = any(each.f_code.co_filename.startswith("<frozen importlib") for each in _callers(frame))
    return is_importing and time.monotonic() - _requests.at < IMPORTING_S


def _runs(frame: FrameType | None, code: CodeType) -> bool:
    return any(each.f_code is code for each in _callers(frame))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
