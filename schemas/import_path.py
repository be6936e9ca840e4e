"""Loads a user's function named ``package.module:function``, for any use of the function.

Every process that runs a user's code (rewards, prompt filters, evaluation) loads it here, so that a name means the same
module in all of them. This is the installed module or, if there is none, the one in the user's working directory.

An import may fail by chance because of a race in CPython, and is then retried. Up to 3.11.7, CPython keeps one count of
the depth of syntax trees for all threads. If the garbage collector runs Python code while one thread builds a tree,
another thread may run and build a tree as well. Either thread may then fail with ``SystemError: AST constructor
recursion depth mismatch``. Many libraries parse source code when they are imported.
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
"""Seconds before another attempt: the other thread parses for milliseconds."""

log = structlog.get_logger()


def retry_import(call: Callable[[], T], name: str) -> T:
    """The result of ``call()``, retried after a failure by CPython's race, with at most ``ATTEMPTS`` attempts in all.

    ``name``: the imported module, for the log.

    Raises:
        Exception: the call's own error.
    """
    for attempt in range(1, ATTEMPTS):
        try:
            return call()
        except Exception as error:
            if not is_import_race(error):
                raise
            log.warning("an import failed because of another thread's, trying again", name=name, attempt=attempt)
            time.sleep(PAUSE_S)
    return call()


def is_import_race(error: BaseException | None) -> bool:
    """Whether CPython's race caused this error, directly or further up the chain of causes."""
    return any(
        isinstance(each, SystemError) and "recursion depth mismatch" in str(each)
        for each in causes_of(error, with_context=True)
    )


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of this project with this interpreter.

    ``-P``: a file in the working directory, for example json.py, does not replace a module that the command imports.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def load_function(path: str, error: type[UserError] = SettingsError) -> Callable[..., Any]:
    """The function at an import path; modules in the user's working directory are found last.

    Raises:
        error: the path has the wrong form, the module cannot be imported, or it has no such function.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise error(f"expected an import path such as 'package.module:function', got {path!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        # Appended and not prepended: a user's file must not hide an installed module from this project's imports.
        sys.path.append(here)
    try:
        module = retry_import(lambda: importlib.import_module(module_name), module_name)
    except Exception as cause:
        message = f"expected to import {module_name!r} for {path!r}, got {type(cause).__name__}: {cause}"
        package = module_name.partition(".")[0]
        if isinstance(cause, ModuleNotFoundError) and cause.name == package:
            message += _where_to_start(package)
        raise error(message) from cause
    function: Any = module
    for part in name.split("."):  # a method has the name of its class in front
        function = getattr(function, part, None)
    if not callable(function):
        raise error(f"expected a function {name!r} in {module_name}, got {_found(function)}{_nearest(name, module)}")
    loaded: Callable[..., Any] = function
    return loaded


def _where_to_start(package: str) -> str:
    """Advice for a module that is not found: the directory to start the command in.

    The module is searched one level below the working directory, where it often lies next to the configuration.
    """
    here = Path.cwd()
    found = next((place.parent for name in (f"{package}.py", package) for place in here.glob(f"*/{name}")), None)
    where = f"{found}, where it is" if found else "the directory where it is"
    return f"; your modules are searched where the command is started, which is {here}: start it in {where}"


def _found(value: object) -> str:
    return "none" if value is None else type(value).__name__


def _nearest(name: str, module: object) -> str:
    callables = [other for other in dir(module) if callable(getattr(module, other)) and not other.startswith("_")]
    close = difflib.get_close_matches(name, callables, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
