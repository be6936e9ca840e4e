"""The layers that settings come from, as nested dictionaries: TOML file, environment, command line. Later ones win."""

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from schemas.errors import SettingsError

ENV_PREFIX = "STREAMRL_"
Tree = dict[str, Any]


def from_toml(path: Path) -> Tree:
    """Read a TOML file.

    Raises:
        SettingsError: there is no such file, or it is not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise SettingsError(f"expected a configuration file, got {path}, which does not exist") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"expected TOML in {path}, got: {error}") from error


def from_environment(environ: Mapping[str, str] = os.environ) -> Tree:
    """Read ``STREAMRL_SECTION__KEY=value``; variables without a double underscore are not settings."""
    tree: Tree = {}
    for name, text in environ.items():
        if name.startswith(ENV_PREFIX) and "__" in name:
            _put(tree, name.removeprefix(ENV_PREFIX).lower().split("__"), text)
    return tree


def from_arguments(arguments: Iterable[str]) -> Tree:
    """Read ``--section.key value`` and ``--section.key=value``.

    Raises:
        SettingsError: something else stands there, or a value is missing.
    """
    tree: Tree = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--") or "." not in argument.split("=")[0]:
            raise SettingsError(f"expected --section.key value, got {argument!r}; see --help for the other options")
        path, equals, text = argument.removeprefix("--").partition("=")
        if not equals:
            following = next(rest, None)
            if following is None:
                raise SettingsError(f"expected a value after {argument}, got the end of the line")
            text = following
        _put(tree, path.replace("-", "_").split("."), text)
    return tree


def merged(*layers: Tree) -> Tree:
    """All layers in one tree; a later layer's value replaces an earlier one's, section by section."""
    result: Tree = {}
    for layer in layers:
        for key, value in layer.items():
            before = result.get(key)
            result[key] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return result


def _put(tree: Tree, path: list[str], text: str) -> None:
    for part in path[:-1]:
        node = tree.setdefault(part, {})
        if not isinstance(node, dict):
            raise SettingsError(f"expected a section at {'.'.join(path)}, got a value")
        tree = node
    tree[path[-1]] = _value(text)


def _value(text: str) -> Any:
    """A TOML value if it reads as one, else the text itself: ``3``, ``true``, ``[1, 2]``, ``some/path``."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
