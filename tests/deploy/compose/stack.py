"""The compose file as Compose reads it: anchors merged, variables replaced."""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "deploy" / "compose.yaml"
IMAGES = ROOT / "deploy" / "images"
ROLES = ("prepare", "run", "worker", "trainer", "grader", "worker-gpu", "trainer-gpu", "gateway")
OURS = ("task", "prepare", "run", "worker", "trainer", "grader", "ui", "worker-gpu", "trainer-gpu", "gateway", "tools")
_VARIABLE = re.compile(r"\$\{([A-Z_]+):-([^}]*)\}")


def interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    """``${NAME:-default}`` replaced everywhere, as Compose does it; any other use of a dollar is a mistake of ours."""
    match value:
        case dict():
            return {key: interpolated(one, variables) for key, one in value.items()}
        case list():
            return [interpolated(one, variables) for one in value]
        case str():
            replaced = _VARIABLE.sub(lambda found: variables.get(found[1]) or found[2], value)
            assert "$" not in replaced, f"expected only ${{NAME:-default}}, got {value}"
            return replaced
        case _:
            return value


def stack(variables: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The whole file."""
    read: dict[str, Any] = interpolated(yaml.safe_load(FILE.read_text()), variables)
    return read


def services(variables: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """The services by name; without variables, with all defaults."""
    given = variables or {}
    found: dict[str, dict[str, Any]] = stack(given)["services"]
    for service in found.values():
        # A name without a value is the shell's own variable, and not there if the shell has none.
        passed = {name: given.get(name, value) for name, value in service.get("environment", {}).items()}
        service["environment"] = {name: value for name, value in passed.items() if value is not None}
    return found


def task_like_the_trial(folder: Path, changes: Mapping[str, str], more: str = "") -> Path:
    """The images' emulated trial as a task of its own, with changes to its settings."""
    shutil.copytree(IMAGES / "trial", folder)
    config = folder / "streamrl.toml"
    text = config.read_text()
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    config.write_text(f"{text}\n{more}")
    return folder
