"""Where a trainer may be killed: at the nth pass of a point that it names itself, or around a call of the real code."""

import functools
import importlib
import inspect
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Literal

BUILD_LEADING = "streamrl.deploy.wiring.trainer:build_leading"
RANK_VARIABLE = "TESTED_RANK"
"""Set in the process of a rank other than 0."""


@dataclass(frozen=True)
class CrashPoint:
    """``target``: a value of ``Failpoint``, or ``module:name`` or ``module:Class.name``.

    ``nth`` counts from 1 those calls of which one argument, as text, contains ``argument`` (a regular expression); the
    state of an object whose method is called is none.
    ``resumed``: of a trainer that goes on after a crash, instead of the first one. ``rank``: whose process dies.
    """

    name: str
    target: str
    moment: Literal["before", "after"] = "after"
    nth: int = 1
    argument: str = ""
    resumed: bool = False
    rank: int = 0

    def __str__(self) -> str:
        return self.name


def arm(point: CrashPoint, may: Callable[[], bool] = lambda: True) -> None:
    """From now on this process kills itself when it comes to the point, or comes there later and then ``may``.

    Raises:
        AttributeError: the code has no such function any more.
        ValueError: the trainer names no such point any more.
    """
    die = _Death(point, may)
    if ":" in point.target:
        _replace(point.target, lambda function: _deadly(function, die))
    else:
        from streamrl.consumers.training.failpoints import Failpoint

        wanted = Failpoint(point.target)

        def failpoint(passed: Failpoint) -> None:
            if passed is wanted:
                die.after(die.is_due(()))

        _replace(BUILD_LEADING, lambda build: _watching(build, failpoint))


def check_target(point: CrashPoint) -> None:
    """Raise, as ``arm`` does, if the code has no such function or failpoint."""
    if ":" in point.target:
        holder, name = _found(point.target)
        getattr(holder, name)
    else:
        from streamrl.consumers.training.failpoints import Failpoint

        Failpoint(point.target)


def _found(target: str) -> tuple[Any, str]:
    """The module or class that has the function, and the function's name."""
    module_name, _, path = target.partition(":")
    holder: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        holder = getattr(holder, parent)
    return holder, name


def _replace(target: str, change: Callable[[Any], Any]) -> None:
    holder, name = _found(target)
    setattr(holder, name, change(getattr(holder, name)))


def _watching(build: Callable[..., Any], failpoint: Callable[[Any], None]) -> Callable[..., Any]:
    def building(*args: Any) -> Any:
        following = build(*args)
        return replace(following, context=replace(following.context, failpoint=failpoint))

    return building


class _Death:
    def __init__(self, point: CrashPoint, may: Callable[[], bool]) -> None:
        self._point = point
        self._may = may
        self._calls = 0

    def is_due(self, args: tuple[Any, ...]) -> bool:
        given = [each for each in args if not is_dataclass(each)]
        if self._point.argument and not any(re.search(self._point.argument, str(each)) for each in given):
            return False
        self._calls += 1
        return self._calls >= self._point.nth

    def before(self, due: bool) -> None:
        self.after(due and self._point.moment == "before")

    def after(self, due: bool) -> None:
        if due and int(os.environ.get(RANK_VARIABLE, "0")) == self._point.rank and self._may():
            os.kill(os.getpid(), signal.SIGKILL)


def _deadly(function: Callable[..., Any], die: _Death) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def waiting(*args: Any, **kwargs: Any) -> Any:
            due = die.is_due(args)
            die.before(due)
            result = await function(*args, **kwargs)
            die.after(due)
            return result

        return waiting

    @functools.wraps(function)
    def calling(*args: Any, **kwargs: Any) -> Any:
        due = die.is_due(args)
        die.before(due)
        result = function(*args, **kwargs)
        die.after(due)
        return result

    return calling
