import ast
import gc
import inspect
import sys
from pathlib import Path

import pytest

from streamrl.schemas import import_path
from streamrl.schemas.import_path import ATTEMPTS, is_import_race, load_function, retry_import

BROKEN = "AST constructor recursion depth mismatch (before=228, after=281)"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_path, "PAUSE_S", 0.0)


class Breaking:
    """Fails so often, then returns."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error, self.calls = failures, error, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return "imported"


def test_an_import_that_fails_by_chance_is_repeated() -> None:
    breaking = Breaking(2, SystemError(BROKEN))
    assert retry_import(breaking, "library") == "imported"
    assert breaking.calls == 3


def test_an_import_that_always_fails_raises_its_error() -> None:
    breaking = Breaking(100, SystemError(BROKEN))
    with pytest.raises(SystemError, match="recursion depth"):
        retry_import(breaking, "library")
    assert breaking.calls == ATTEMPTS


@pytest.mark.parametrize("error", [ImportError("no such module"), SystemError("another")])
def test_other_errors_are_raised_at_once(error: Exception) -> None:
    breaking = Breaking(1, error)
    with pytest.raises(type(error)):
        retry_import(breaking, "library")
    assert breaking.calls == 1


def test_an_error_that_comes_from_it_counts_as_it() -> None:
    wrapped = RuntimeError("cannot start")
    wrapped.__cause__ = SystemError(BROKEN)
    assert retry_import(Breaking(1, wrapped), "library") == "imported"


def test_a_function_of_a_user_s_module_that_was_broken_by_chance_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "broken_imports", 2, raising=False)
    (tmp_path / "broken_by_chance.py").write_text(
        "import sys\n"
        "sys.broken_imports -= 1\n"
        f"if sys.broken_imports >= 0:\n    raise SystemError({BROKEN!r})\n"
        "def reward(): return 1.0\n"
    )
    assert load_function("broken_by_chance:reward")() == 1.0


@pytest.mark.skipif(sys.version_info >= (3, 11, 8), reason="CPython counts for each thread from 3.11.8 on")
def test_the_parsers_error_from_a_nested_parse_is_recognised() -> None:
    """What another thread does by chance, a garbage collection within the parser does here each time."""

    def parse(_phase: str, _info: object) -> None:
        ast.parse("x = 1")

    threshold = gc.get_threshold()
    gc.callbacks.append(parse)
    gc.set_threshold(1)
    try:
        with pytest.raises(SystemError) as broken:
            ast.parse(inspect.getsource(inspect))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(parse)
    assert is_import_race(broken.value)
