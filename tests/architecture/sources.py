"""The project's own source files, parsed once, and the imports between them."""

import ast
import gc
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from streamrl.settings.feature_folders import FOLDERS

ROOT = Path(__file__).parents[2]
FOR_TOOLS = re.compile(r"#\s*(noqa|type:|pragma|ruff:|mypy:|fmt:)")
"""A comment that only speaks to a tool."""
PACKAGES = (
    "schemas",
    "bus",
    "weights",
    "producers",
    "consumers",
    "coordinator",
    "policies",
    "observability",
    "settings",
    "inspection",
    "planning",
    "deploy",
)
"""Of ``streamrl``; some lie at the top of the repository, where ``streamrl`` has a link to them."""
FRONT = "front"
"""What lies in ``streamrl`` itself, and in folders of it that are none of these."""

ROLES = "roles"
"""``role.py`` and ``role_*.py`` in the folder of an optional feature: they know the whole tree, and no module imports
them by name.
"""


@dataclass(frozen=True)
class Source:
    path: Path
    module: str
    tree: ast.Module
    text: str

    @property
    def package(self) -> str:
        """One of ``PACKAGES``, or ``FRONT``."""
        return package_of(self.module)

    @property
    def room(self) -> str:
        """A folder of a package, however deep its files lie; a file right in a package is a room of its own."""
        return room_of(self.module)


def package_of(module: str) -> str:
    """Of a module of ours."""
    parts = module.split(".")
    if ".".join(parts[1:-1]) in FOLDERS and parts[-1].partition("_")[0] == "role":
        return ROLES
    return parts[1] if len(parts) > 1 and parts[1] in PACKAGES else FRONT


def room_of(module: str) -> str:
    """Of a module of ours, as ``package.folder``."""
    parts, package = module.split("."), package_of(module)
    if package == ROLES:
        return ".".join([package, parts[-2]])
    return ".".join([package, *parts[1 if package == FRONT else 2 :][:1]])


@cache
def sources() -> tuple[Source, ...]:
    return tuple(Source(path, module, parsed(text), text) for path, module, text in files_of(ROOT))


def files_of(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Path in a tree, name and text of each module of its product; also of a tree whose packages all lie at its top."""
    top = root / "streamrl"
    for folder in (*(root / package for package in PACKAGES), top):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield path.relative_to(root), name if parts[0] == "streamrl" else f"streamrl.{name}", path.read_text()


def parsed(text: str) -> ast.Module:
    # Python before 3.11.8 fails where a parse begins within another, as when garbage that is collected in the middle
    # of it has a traceback printed.
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imports(source: Source, *, at_load: bool = False) -> set[str]:
    """Modules that a source imports, also those it imports when a function is called.

    ``at_load``: only those imported when the module is.
    """
    nodes = _load_time_nodes(source.tree) if at_load else ast.walk(source.tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_imports(source: Source, *, at_load: bool = False) -> set[str]:
    modules = {other.module for other in sources()}
    return {name for name in imports(source, at_load=at_load) if name in modules and name != source.module}


def _load_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from _load_time_nodes(node)
