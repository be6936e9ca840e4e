"""Loads a function named ``package.module:function``. It knows nothing of what the function is for."""

import difflib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schemas.errors import SettingsError, UserError


def load_function(path: str, error: type[UserError] = SettingsError) -> Callable[..., Any]:
    """The function behind an import path; modules in the user's working directory are found last.

    Raises:
        error: the path has another shape, the module cannot be imported, or it has no such function.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise error(f"expected an import path such as 'package.module:function', got {path!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as cause:
        raise error(f"expected to import {module_name!r} for {path!r}, got {type(cause).__name__}: {cause}") from cause
    function = getattr(module, name, None)
    if not callable(function):
        raise error(f"expected a function {name!r} in {module_name}, got {_found(function)}{_nearest(name, module)}")
    loaded: Callable[..., Any] = function
    return loaded


def _found(value: object) -> str:
    return "none" if value is None else type(value).__name__


def _nearest(name: str, module: object) -> str:
    callables = [other for other in dir(module) if callable(getattr(module, other)) and not other.startswith("_")]
    close = difflib.get_close_matches(name, callables, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
