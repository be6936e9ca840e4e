"""A missing optional package ends in one line that names the extra to install."""

import importlib.util
import re
import tomllib
from importlib import metadata
from typing import Any

import pytest

from streamrl.schemas.errors import SettingsError
from streamrl.schemas.extras import EXTRAS, missing_package, require_extra
from tests.architecture.sources import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
APART = {"reasoning-gym", "tracking"}
"""Extras that name their own packages in their own messages, and that `all` leaves out."""


def _names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=~; ]", one)[0].lower() for one in requirements}


def test_every_extra_has_its_modules_and_all_is_their_sum() -> None:
    extras = dict(PROJECT["optional-dependencies"])
    (everything,) = extras.pop("all")
    assert set(extras) - APART == set(EXTRAS)
    assert everything == f"streamrl[{','.join(name for name in extras if name not in APART)}]"


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_modules_of_an_extra_come_from_its_packages(extra: str) -> None:
    wanted = _names(PROJECT["optional-dependencies"][extra])
    installed_by = metadata.packages_distributions()
    for module in EXTRAS[extra]:
        packages = {name.lower() for name in installed_by[module]}
        assert packages & wanted or module == "starlette", f"{module} comes from {packages}"  # starlette by fastapi


def test_the_base_has_no_package_of_an_extra_and_no_exact_version() -> None:
    base = PROJECT["dependencies"]
    assert not _names(base) & {name for extra in EXTRAS for name in _names(PROJECT["optional-dependencies"][extra])}
    assert not [one for one in base if "==" in one]
    assert all(re.search(r"[>~]=", one) for one in base), "each has a lower bound"


def test_a_missing_module_names_what_needs_it_and_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require_extra("gateway", "gateway.enabled")
    find = importlib.util.find_spec
    monkeypatch.setattr("streamrl.schemas.extras.find_spec", lambda name: None if name == "fastapi" else find(name))
    with pytest.raises(
        SettingsError,
        match=r"^expected the package fastapi for gateway.enabled, found none; "
        r"run: pip install 'streamrl\[gateway\]'$",
    ):
        require_extra("gateway", "gateway.enabled")
    require_extra("gateway", "gateway.enabled", "uvicorn")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'textual.app'", name="textual.app"), r"textual.*streamrl\[inspect\]"),
        (ModuleNotFoundError("No module named 'mine'", name="mine"), None),
        (ImportError("libgomp.so.1"), None),
    ],
)
def test_only_the_import_of_an_extra_becomes_a_users_error(error: Any, words: str | None) -> None:
    found = missing_package(error)
    assert (found is None) == (words is None)
    if found is not None:
        assert re.search(str(words), str(found))
        assert found.exit_code == 2
