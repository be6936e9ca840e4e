"""Lists the optional features of this tree. Each is a folder that can be deleted together with its line here.

A feature's folder has a ``role.py`` with a ``FEATURE`` (see ``streamrl.settings.features``). A feature with settings
also has a ``settings.py`` with ``SECTIONS``.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamrl.schemas.settings import Section

FOLDERS = (
    "policies",
    "consumers.standby",
    "weights.sending",
    "producers.grading",
    "producers.evaluation",
    "producers.lengths.learned",
    "producers.value",
    "producers.gateway",
    "producers.environments",
)
"""Packages below ``streamrl``, one for each optional feature."""


@cache
def feature_sections() -> dict[str, "tuple[type[Section], ...]"]:
    """The sections that features add, by name. A class that extends a section of the core adds its keys to it."""
    found: dict[str, tuple[type[Section], ...]] = {}
    for folder in FOLDERS:
        if find_spec(f"streamrl.{folder}.settings") is None:
            continue
        sections: dict[str, type[Section]] = import_module(f"streamrl.{folder}.settings").SECTIONS
        for name, section in sections.items():
            found[name] = (*found.get(name, ()), section)
    return found
