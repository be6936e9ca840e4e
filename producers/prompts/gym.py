"""The data sets of reasoning-gym, an optional package.

The library imports all its data sets at once. Three packages that one or two data sets need are published without a
wheel, and one of these must be compiled. If such a package is missing, a stand-in replaces it during the import, and
the data sets that need the package are refused by name.

Invariants:
- every_data_set_works_or_is_refused_by_name: a data set that can be opened yields entries and scores answers, with any
  of these packages installed or missing.
"""

import difflib
import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from threading import Lock
from types import ModuleType
from typing import Any, Protocol, cast

from pydantic import JsonValue

from streamrl.schemas.errors import DataError

INSTALL = (
    "run `make setup` in a clone, or `pip install 'streamrl[reasoning-gym]'` "
    "(which compiles a package: it needs a C compiler and Python's headers)"
)
WITHOUT_WHEEL = {
    "cellpylib": ("game_of_life", "game_of_life_halting"),
    "pycosat": ("zebra_puzzles",),
    "zss": ("codeio",),
}
"""Packages that are published without a wheel, and the data sets that need them."""
_import_lock = Lock()


class GymDataset(Protocol):
    """The part of a reasoning-gym data set that StreamRL uses."""

    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Question, answer and metadata at an index below the size."""
        ...

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Score of an answer to an entry, 0 to 1."""
        ...


def import_reasoning_gym() -> ModuleType:
    """The library's module that makes data sets. The first import takes seconds.

    Raises:
        DataError: the library is not installed, or a package that it needs and that has a wheel is not.
    """
    # Some of the library's modules have invalid escape sequences, which Python reports when it compiles them.
    with _import_lock, warnings.catch_warnings(), _stand_ins():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            return importlib.import_module("reasoning_gym.factory")
        except ImportError as error:
            raise DataError(
                f"expected the optional package reasoning-gym, which generates the prompts, got: {error}; {INSTALL}"
            ) from error


def open_dataset(name: str, options: dict[str, JsonValue], *, size: int = 500, seed: int = 0) -> GymDataset:
    """A reasoning-gym data set with these options.

    Raises:
        DataError: reasoning-gym or a package that the data set needs is not installed, there is no such data set, or
            the data set refuses an option.
    """
    factory = import_reasoning_gym()
    known = factory.DATASETS
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)[:3]
        raise DataError(
            f"expected one of the {len(known)} reasoning-gym data sets, got {name!r}; similar names: {close}"
        )
    for package in _missing():
        if name in WITHOUT_WHEEL[package]:
            raise DataError(
                f"expected the package {package}, which data set {name!r} of reasoning-gym needs, got none; "
                f"`pip install {package}` builds it (pycosat: with a C compiler and Python's headers)"
            )
    try:
        return cast(GymDataset, factory.create_dataset(name, **options, size=size, seed=seed))
    except Exception as error:
        raise DataError(f"expected options that data set {name!r} accepts, got {options}: {error}") from error


def _missing() -> list[str]:
    return [package for package in WITHOUT_WHEEL if find_spec(package) is None]


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Replace each missing package by an empty module during the library's import; other imports still fail."""
    missing = _missing()
    sys.modules.update({package: _StandIn(package) for package in missing})
    try:
        yield
    finally:
        for package in missing:
            del sys.modules[package]


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's import system looks at these
            raise AttributeError(name)
        raise ModuleNotFoundError(f"No module named {self.__name__!r}; `pip install {self.__name__}` builds it")
