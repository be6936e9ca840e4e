"""The shape of the tree in figures: ``python -m tests.architecture.shape [ROOT]``, or ``make shape``.

Prints a table and, for this tree, writes ``benchmarks/results/shape.json``. What is counted:

* files, lines: Python modules of the product, ``__init__`` included in ``files``;
* one importer: modules (no ``__init__``) that exactly one other module of the product imports, deferred imports too;
* cycles: sets of rooms that import each other, deferred imports counted; a room is a folder of a package;
* comments: comment tokens a hundred lines, without those that only speak to a tool;
* constructors over ten: classes whose constructor, written or of a dataclass, takes more than ten values;
* policies outside: files that name several policies' parts (instances, promotions, splits, arms) outside of
  ``streamrl/policies``;
* settings: rows of ``docs/settings.md``;
* docs by hand: bytes of the pages of ``docs/`` that no program writes, and words a sentence in them and in docstrings;
* base packages: what ``pyproject.toml`` depends on without an extra, directly or not, and their megabytes, as installed
  here;
* a trajectory's way: the files that ``docs/code-map.md`` lists, and the layers of ours that it crosses to be published.
"""

import ast
import io
import json
import re
import statistics
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.conditions import rounded
from tests.architecture.language import language_of
from tests.architecture.sources import FOR_TOOLS, ROOT, files_of, package_of, parsed, room_of

RESULT = ROOT / "benchmarks" / "results" / "shape.json"
OF_POLICIES = re.compile(
    r"\b(attach(ed|ment|ing)?|[Aa]ttachment|promotion|Promotion|served_as|Served|InstanceState|InstanceBeat|PolicySplit|arms?|"
    r"ArmShare|ArmWeights)\b"
)
MANY = 10
ON_THE_WAY = re.compile(r"^\d+\. `([\w/]+\.py)`", re.MULTILINE)


@dataclass(frozen=True)
class Module:
    """One source file; ``name``: dotted, a package by its own name."""

    path: Path
    name: str
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def room(self) -> str:
        return room_of(self.name)


@dataclass(frozen=True)
class Shape:
    """Figures of one tree; shares are 0 to 1."""

    files: int
    modules: int
    lines: int
    lines_a_file: tuple[float, float, int]
    under_60_lines: float
    folders: int
    functions: tuple[float, float, int]
    protocols: int
    one_importer_share: float
    cycles: int
    rooms_in_cycles: int
    comments_per_100: float
    path_files: int
    path_layers: int
    readme_bytes: int
    deploy_lines: int
    deploy_share: float
    inspection_share: float
    largest_room_share: float
    constructors_over_ten: int
    policy_files_outside: int
    features_removable: int
    settings: int
    docs_bytes_by_hand: int
    sentence_words_mean: float
    dialect_words: int
    base_packages: int
    base_mb: float


def modules_of(root: Path) -> list[Module]:
    """Every module of the packages that the tree has."""
    return [Module(path, name, text, parsed(text)) for path, name, text in files_of(root)]


def shape_of(root: Path) -> Shape:
    """Measure a tree."""
    everything = modules_of(root)
    modules = [module for module in everything if not module.is_package]
    lengths = [module.text.count("\n") for module in modules]
    total = sum(module.text.count("\n") for module in everything)
    functions = sorted(_function_lengths(everything))
    rooms_in_cycles = [rooms for rooms in _cycles(_room_graph(everything)) if len(rooms) > 1]
    by_package = Counter[str]()
    for module in everything:
        by_package[package_of(module.name)] += module.text.count("\n")
    way, layers = code_map(root)
    language = language_of(root)
    packages = base_packages(tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"])
    return Shape(
        files=len(everything),
        modules=len(modules),
        lines=total,
        lines_a_file=(statistics.median(lengths), statistics.mean(lengths), max(lengths)),
        under_60_lines=sum(length < 60 for length in lengths) / len(lengths),
        folders=len({module.path.parent for module in everything}),
        functions=(statistics.median(functions), functions[len(functions) * 9 // 10], functions[-1]),
        protocols=sum(_is_abstract(node) for module in everything for node in ast.walk(module.tree)),
        one_importer_share=_one_importer(modules),
        cycles=len(rooms_in_cycles),
        rooms_in_cycles=sum(map(len, rooms_in_cycles)),
        comments_per_100=100 * sum(_comments(module.text) for module in everything) / total,
        path_files=len(way),
        path_layers=len(layers),
        readme_bytes=(root / "README.md").stat().st_size,
        deploy_lines=by_package["deploy"],
        deploy_share=by_package["deploy"] / total,
        inspection_share=by_package["inspection"] / total,
        largest_room_share=max(by_package.values()) / total,
        constructors_over_ten=sum(
            _values_taken(node) > MANY for module in everything for node in ast.walk(module.tree)
        ),
        policy_files_outside=sum(
            not module.name.startswith("streamrl.policies") and any(map(OF_POLICIES.search, _code_of(module)))
            for module in everything
        ),
        features_removable=sum(module.name.endswith(".role") for module in everything),
        settings=len(re.findall(r"^\| `", (root / "docs" / "settings.md").read_text(), re.MULTILINE)),
        docs_bytes_by_hand=language.docs_bytes_by_hand,
        sentence_words_mean=language.sentence_words_mean,
        dialect_words=language.dialect_words,
        base_packages=len(packages),
        base_mb=sum(map(_installed_bytes, packages)) / 1e6,
    )


def base_packages(dependencies: Iterable[str]) -> set[str]:
    """The names of the packages that these requirements install on this machine, directly or through others."""
    found: set[tuple[str, str]] = set()
    waiting = [Requirement(line) for line in dependencies]
    while waiting:
        wanted = waiting.pop()
        for extra in ("", *wanted.extras):
            name = canonicalize_name(wanted.name)
            if (name, extra) in found:
                continue
            found.add((name, extra))
            for each in map(Requirement, metadata.requires(name) or ()):
                if each.marker is None or each.marker.evaluate({"extra": extra}):
                    waiting.append(each)
    return {name for name, _ in found}


def _installed_bytes(package: str) -> int:
    """Of its files on this machine; 0 if it is not installed."""
    try:
        files = metadata.distribution(package).files or ()
    except metadata.PackageNotFoundError:
        return 0
    return sum(file.size or 0 for file in files)


def code_map(root: Path) -> tuple[list[str], list[str]]:
    """The files on a trajectory's way, in order, and the classes it crosses to be published; none without a map."""
    page = root / "docs" / "code-map.md"
    if not page.exists():
        return [], []
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL))
    way = ON_THE_WAY.findall(sections.get("The way of one trajectory", ""))
    layers = re.findall(r"^\d+\. `(\w+)`", sections.get("Publishing one trajectory", ""), re.MULTILINE)
    return way, layers


def _function_lengths(modules: list[Module]) -> Iterator[int]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                yield node.end_lineno - node.lineno + 1


def _is_abstract(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(
        re.match(r"(Protocol|ABC)\b", ast.unparse(base)) is not None for base in node.bases
    )


def _values_taken(node: ast.AST) -> int:
    """By the constructor of a class that is no message or settings, whose fields are data; 0 for anything else."""
    if not isinstance(node, ast.ClassDef):
        return 0
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            taken = (*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs)
            return len(taken) - 1
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return 0
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    return sum(
        "ClassVar" not in ast.unparse(each.annotation)
        and (each.value is None or "init=False" not in ast.unparse(each.value))
        for each in fields
    )


def _code_of(module: Module) -> Iterator[str]:
    """Names in a module's code, not in its texts."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def _comments(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT and not FOR_TOOLS.match(token.string) for token in tokens)


def _imported(module: Module, known: set[str]) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return (names & known) - {module.name}


def _one_importer(modules: list[Module]) -> float:
    known = {module.name for module in modules}
    importers = Counter(name for module in modules for name in _imported(module, known))
    return sum(importers[name] == 1 for name in known) / len(known)


def _room_graph(modules: list[Module]) -> dict[str, set[str]]:
    rooms = {module.name: module.room for module in modules}
    graph: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for module in modules:
        graph[module.room] |= {rooms[name] for name in _imported(module, set(rooms))} - {module.room}
    return graph


def _cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected rooms: each reaches the other."""
    reach = {room: _reached(graph, room) for room in graph}
    found: list[set[str]] = []
    for room in graph:
        together = {other for other in reach[room] if room in reach[other]} | {room}
        if together not in found:
            found.append(together)
    return found


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        room = waiting.pop()
        if room not in seen:
            seen.add(room)
            waiting += graph[room]
    return seen


def table(shape: Shape) -> str:
    """The figures, one a line."""
    median, mean, longest = shape.lines_a_file
    rows = (
        ("files (modules) / lines", f"{shape.files} ({shape.modules}) / {shape.lines / 1000:.1f}k"),
        ("lines a file: median, mean, max", f"{median:.0f}, {mean:.0f}, {longest}"),
        ("files under 60 lines", f"{shape.under_60_lines:.0%}"),
        ("folders", f"{shape.folders}"),
        ("functions: median, p90, max lines", "{:.0f}, {:.0f}, {}".format(*shape.functions)),
        ("protocols and abstract classes", f"{shape.protocols}"),
        ("modules with one importer", f"{shape.one_importer_share:.0%}"),
        ("cycles of rooms (rooms in them)", f"{shape.cycles} ({shape.rooms_in_cycles})"),
        ("comments a hundred lines", f"{shape.comments_per_100:.2f}"),
        ("one trajectory's way: files", f"{shape.path_files or '?'}"),
        ("one trajectory published: layers", f"{shape.path_layers or '?'}"),
        ("README, bytes", f"{shape.readme_bytes}"),
        ("deploy/, lines", f"{shape.deploy_lines}"),
        ("constructors over ten values", f"{shape.constructors_over_ten}"),
        ("files that name several policies", f"{shape.policy_files_outside}"),
        ("optional features", f"{shape.features_removable}"),
        ("settings", f"{shape.settings}"),
        ("docs by hand, bytes", f"{shape.docs_bytes_by_hand:,}"),
        ("words a sentence (odd words in all)", f"{shape.sentence_words_mean:.1f} ({shape.dialect_words})"),
        ("base packages (MB)", f"{shape.base_packages} ({shape.base_mb:,.0f})"),
        ("largest package's share", f"{shape.largest_room_share:.0%}"),
    )
    return "\n".join(f"{name:<36}{figure}" for name, figure in rows)


WRITTEN = (
    "files",
    "modules",
    "lines",
    "lines_a_file",
    "folders",
    "path_files",
    "path_layers",
    "one_importer_share",
    "cycles",
    "rooms_in_cycles",
    "comments_per_100",
    "readme_bytes",
    "deploy_lines",
    "deploy_share",
    "constructors_over_ten",
    "policy_files_outside",
    "features_removable",
    "settings",
    "docs_bytes_by_hand",
    "sentence_words_mean",
    "dialect_words",
    "base_packages",
    "base_mb",
)


def main() -> None:
    """Print the table; write the figures of this tree."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    shape = shape_of(root)
    print(table(shape))
    if root == ROOT:
        figures = {name: getattr(shape, name) for name in WRITTEN} | {"lines_a_file": list(shape.lines_a_file)}
        RESULT.write_text(json.dumps(rounded(figures), indent=1) + "\n")


if __name__ == "__main__":
    main()
