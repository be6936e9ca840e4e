"""Loads a user's function named ``package.module:function``. It knows nothing of what the function is for.

Every process that runs a user's code (rewards, prompt filters, evaluation) loads it here, so that the same name means
the same module in all of them: the installed one, and if there is none, the one in the user's working directory.

CPython may break an import by chance, which is then made again. Up to 3.11.7, CPython counts how deep the syntax trees
that it makes are for all threads together. When the garbage collector runs Python code while one thread makes a tree,
another thread may get its turn and make one as well. Then either may end in ``SystemError: AST constructor recursion
depth mismatch``. Many libraries parse source when they are imported.
"""

import difflib
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import structlog

from streamrl.schemas.errors import SettingsError, UserError, causes_of

T = TypeVar("T")

ATTEMPTS = 5
PAUSE_S = 0.2
"""Before another attempt: what the other thread parses takes milliseconds."""

log = structlog.get_logger()


def import_again(call: Callable[[], T], name: str) -> T:
    """The result of ``call()``, called again, at most ``ATTEMPTS`` times in all, where CPython broke it by chance.

    ``name``: what it imports, for the log.

    Raises:
        Exception: what the call raises.
    """
    for attempt in range(1, ATTEMPTS):
        try:
            return call()
        except Exception as error:
            if not is_by_chance(error):
                raise
            log.warning("an import failed beside another thread's, trying again", name=name, attempt=attempt)
            time.sleep(PAUSE_S)
    return call()


def is_by_chance(error: BaseException | None) -> bool:
    """Whether this error, or one that it comes from, is the one that CPython raises by chance."""
    return any(
        isinstance(each, SystemError) and "recursion depth mismatch" in str(each)
        for each in causes_of(error, with_context=True)
    )


def own_command(module: str, *arguments: str) -> list[str]:
    """A command that runs a module of ours with this interpreter.

    ``-P``: a file in the working directory, such as a json.py, does not stand in for what we import.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def load_function(path: str, error: type[UserError] = SettingsError) -> Callable[..., Any]:
    """The function behind an import path; modules in the user's working directory are found last.

    Raises:
        error: the path has another shape, or the module cannot be imported or has no such function.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise error(f"expected an import path such as 'package.module:function', got {path!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        # Appended, not put in front: a file of the user's must not hide an installed module from our own imports.
        sys.path.append(here)
    try:
        module = import_again(lambda: importlib.import_module(module_name), module_name)
    except Exception as cause:
        told = f"expected to import {module_name!r} for {path!r}, got {type(cause).__name__}: {cause}"
        package = module_name.partition(".")[0]
        if isinstance(cause, ModuleNotFoundError) and cause.name == package:
            told += _where_to_start(package)
        raise error(told) from cause
    function = getattr(module, name, None)
    if not callable(function):
        raise error(f"expected a function {name!r} in {module_name}, got {_found(function)}{_nearest(name, module)}")
    loaded: Callable[..., Any] = function
    return loaded


def _where_to_start(package: str) -> str:
    """What to do about a module that is not found. Its place may be that of the configuration, which each process of a
    run has from elsewhere, and is looked for one level down.
    """
    here = Path.cwd()
    found = next((place.parent for name in (f"{package}.py", package) for place in here.glob(f"*/{name}")), None)
    where = f"{found}, where it is" if found else "the directory where it is"
    return f"; modules of your own are found where the command is started, which is {here}: start it in {where}"


def _found(value: object) -> str:
    return "none" if value is None else type(value).__name__


def _nearest(name: str, module: object) -> str:
    callables = [other for other in dir(module) if callable(getattr(module, other)) and not other.startswith("_")]
    close = difflib.get_close_matches(name, callables, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
