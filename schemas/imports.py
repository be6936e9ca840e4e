"""Imports that CPython may break by chance.

Up to 3.11.7, CPython counts how deep the syntax trees that it makes are for all threads together. When the garbage
collector runs Python code while one thread makes a tree, another thread may get its turn and make one as well. Then
either may end in ``SystemError: AST constructor recursion depth mismatch``. Many libraries parse source when they are
imported.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from streamrl.schemas.errors import causes_of

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
