"""What the user gave, layer by layer, and where each key came from. Knows no setting by name."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from deploy.settings.layers import ENV_PREFIX, Tree, from_arguments, from_environment, from_toml

_HEADER = re.compile(r"\s*\[+\s*([^\]]+?)\s*\]+")
_KEY = re.compile(r"\s*([A-Za-z0-9_.\"'-]+)\s*=")
Key = tuple[str, ...]


@dataclass(frozen=True)
class Given:
    """TOML file, environment and command line as nested dictionaries; later ones win."""

    config: Path | None
    toml: Tree
    environment: Tree
    arguments: Tree

    @classmethod
    def read(cls, config: Path | None, arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> Self:
        """Read all three.

        Raises:
            SettingsError: one of them cannot be read.
        """
        return cls(config, from_toml(config) if config else {}, from_environment(environ), from_arguments(arguments))

    @property
    def layers(self) -> tuple[Tree, ...]:
        """In the order in which they replace each other."""
        return self.toml, self.environment, self.arguments

    def rank(self, key: Key) -> int:
        """The number of the last layer that gives a key, from 0; -1: none does."""
        return max((rank for rank, tree in enumerate(self.layers) if _has(tree, key)), default=-1)

    def origin(self, key: Key) -> str:
        """Where a key's value came from, in brackets and with a space in front; empty where that is not known."""
        match self.rank(key):
            case 2:
                return f" (--{'.'.join(key)})"
            case 1:
                return f" ({ENV_PREFIX}{'__'.join(key).upper()})"
            case 0 if self.config is not None:
                line = line_of(self.config.read_text(), key)
                return f" ({self.config}, line {line})" if line else f" ({self.config})"
            case _:
                return ""


def line_of(text: str, key: Key) -> int | None:
    """The line of a TOML text, from 1, that sets a key or opens the table of that name; None: not found so simply."""
    section: Key = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            section = _parts(header[1])
            if section == key:
                return number
        elif (found := _KEY.match(line)) and section + _parts(found[1]) == key:
            return number
    return line_of(text, key[:-1]) if len(key) > 1 else None


def _parts(name: str) -> Key:
    return tuple(part.strip().strip("\"'") for part in name.split("."))


def _has(tree: Any, key: Key) -> bool:
    for part in key:
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True
