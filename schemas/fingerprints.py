"""Fingerprints of files, hub repositories and source code: short texts that differ if the content differs.

They are compared with those of an earlier start, to notice what a user has changed. Source code is only read.
"""

import ast
import importlib.machinery
import importlib.util
import site
import sysconfig
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal

import xxhash

WHOLE_BYTES = 256 << 20
"""Most bytes, of all files together, that are read completely. A slow disk takes a second or two for them."""
END_BYTES = 64 << 10
"""Bytes that are read at both ends of each file if the files are larger together."""
CHUNK_BYTES = 1 << 20
DIGITS = 12
"""Hex digits of a fingerprint: enough to notice a change, and short enough for a console."""
MOST_MODULES = 500
"""Modules of a project whose source is read: the source of a large project takes about a second."""
HUB_PATIENCE_S = 5.0
"""Seconds to wait for the hub's answer."""


def files_fingerprint(files: Mapping[str, Path]) -> str:
    """The fingerprint of files by their names.

    The content counts. Of files that are larger than ``WHOLE_BYTES`` together, sizes, times of change and both ends do.

    Raises:
        OSError: a file cannot be read.
    """
    sizes = {name: path.stat().st_size for name, path in files.items()}
    reads_all = sum(sizes.values()) <= WHOLE_BYTES
    digest = xxhash.xxh3_128()
    for name, path in sorted(files.items()):
        times = "" if reads_all else path.stat().st_mtime_ns
        digest.update(f"{name}\0{sizes[name]}\0{times}\0".encode())
        with path.open("rb") as file:
            if reads_all:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
            else:
                digest.update(file.read(END_BYTES))
                file.seek(max(0, sizes[name] - END_BYTES))
                digest.update(file.read(END_BYTES))
    return digest.hexdigest()[:DIGITS]


def text_fingerprint(text: str) -> str:
    """The fingerprint of a text."""
    return xxhash.xxh3_128_hexdigest(text.encode())[:DIGITS]


def hub_revision(repository: str, kind: Literal["model", "dataset"]) -> str | None:
    """The commit of a hub repository that would be read now; None if neither hub nor cache knows it."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        revision: str | None = HfApi().repo_info(repository, repo_type=kind, timeout=HUB_PATIENCE_S).sha
        return revision
    except Exception:  # no network, no access, or no such repository: the process that reads it says which
        names = ("config.json",) if kind == "model" else ("README.md",)
        found = (try_to_load_from_cache(repository, name, repo_type=kind) for name in names)
        # A file in the cache is at snapshots/<commit>/<name>.
        return next((Path(path).parent.name for path in found if isinstance(path, str)), None)


def package_version(package: str) -> str | None:
    """Name and version of an installed package; None if it is not installed."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return None


def code_fingerprint(import_path: str) -> str | None:
    """The fingerprint of the source of ``package.module:name``, with the modules of its project that it imports.

    None if no source is found, as for a module that does not exist.
    """
    try:
        sources = project_sources(import_path.partition(":")[0])
        return files_fingerprint(sources) if sources else None
    except OSError:
        return None


def project_sources(module: str) -> dict[str, Path]:
    """The source files of a module and of the modules of its project that it imports, by module name.

    A project is all modules next to the top-level package. Of an installed package it is that package only. Modules
    that are found only in the working directory count as they do in ``load_function``.
    """
    if (project := _Project.of(module)) is None:
        return {}
    found: dict[str, Path] = {}
    waiting = [module, *_parents(module)]
    while waiting and len(found) < MOST_MODULES:
        name = waiting.pop()
        if name in found or (source := project.source_of(name)) is None:
            continue
        found[name] = source
        for imported in _imports(source, name, is_package=source.name == "__init__.py"):
            waiting += [imported, *_parents(imported)]
    return found


class _Project:
    """The modules in one folder. ``only``: the top-level name that counts; empty: all names do."""

    def __init__(self, folder: Path, only: str) -> None:
        self._folder = folder
        self._only = only

    @classmethod
    def of(cls, module: str) -> "_Project | None":
        top = module.partition(".")[0]
        try:
            spec = importlib.util.find_spec(top)
        except ValueError:  # the module of this process itself
            spec = None
        spec = spec or importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd())])
        if spec is None or spec.origin is None or not Path(spec.origin).is_file():
            return None
        origin = Path(spec.origin)
        folder = origin.parent.parent if origin.name == "__init__.py" else origin.parent
        return cls(folder, top if folder.resolve() in _installed_folders() else "")

    def source_of(self, name: str) -> Path | None:
        """The source file of a module; None if it is not one of the project."""
        if self._only and name.partition(".")[0] != self._only:
            return None
        place = self._folder.joinpath(*name.split("."))
        candidates = (place.with_name(f"{place.name}.py"), place / "__init__.py")
        return next((path for path in candidates if path.is_file()), None)


def _installed_folders() -> set[Path]:
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return {Path(path).resolve() for path in (*(paths[name] for name in names), site.getusersitepackages())}


def _parents(name: str) -> list[str]:
    """The packages around a module: ``a.b`` and ``a`` around ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _imports(source: Path, name: str, *, is_package: bool) -> Iterator[str]:
    """Names of modules that a source file may import, wherever in the file."""
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError):  # it is not Python of this version; its own bytes count all the same
        return
    package = name.split(".") if is_package else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*around, *([node.module] if node.module else [])])
            if base:
                yield base
            # A name may be a module of the package.
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)
