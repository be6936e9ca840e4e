import ast
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.architecture.sources import FRONT, PACKAGES, ROLES, imports, own_imports, package_of, sources

FLOORS = (
    {"schemas"},
    {"bus"},
    {"weights"},
    {"producers", "consumers", "coordinator"},
    {"policies"},
    {"observability"},
    {"settings"},
    {"inspection"},
    {"planning"},
    {"deploy"},
    {FRONT},
    {ROLES},
)
"""From the ground up. A package imports itself and the floors below; roles of one floor meet on topics only."""

HEAVY = {
    "aiokafka": ("streamrl.bus.kafka", "streamrl.bus.embedded"),
    "torch": (
        "streamrl.weights.export",
        "streamrl.weights.groups",
        "streamrl.weights.tensors",
        "streamrl.consumers.training",
        "streamrl.consumers.algorithms",
        "streamrl.inspection.replay",
        "streamrl.producers.generation.engines",
        "streamrl.producers.lengths.learned.language_model",
        "streamrl.demo",
        "streamrl.datasets",
        "streamrl.init.smollm2",
        "streamrl.init.precision",
    ),
    "vllm": ("streamrl.producers.generation.engines", "streamrl.weights.groups"),
    "transformers": (
        "streamrl.consumers.training",
        "streamrl.producers.generation",
        "streamrl.producers.lengths.learned.language_model",
        "streamrl.demo",
        "streamrl.init.smollm2",
    ),
    "jgo": ("streamrl.bus.embedded",),
    "opentelemetry": ("streamrl.observability.tracing.exporting",),
    "pickle": (),
    "cloudpickle": (),
    "dill": (),
}


def _floor(package: str) -> int:
    return next(number for number, floor in enumerate(FLOORS) if package in floor)


@pytest.mark.parametrize("package", [*PACKAGES, FRONT, ROLES])
def test_imports_run_one_way(package: str) -> None:
    wrong = [
        f"{source.path} imports {name}"
        for source in sources()
        if source.package == package
        for name in own_imports(source)
        if (other := package_of(name)) != package and _floor(other) >= _floor(package)
    ]
    assert not wrong


@pytest.mark.parametrize("library", HEAVY)
def test_a_heavy_or_forbidden_library_stays_in_its_rooms(library: str) -> None:
    wrong = [
        str(source.path)
        for source in sources()
        if any(name.split(".")[0] == library for name in imports(source))
        and not source.module.startswith(HEAVY[library] or ("-",))
    ]
    assert not wrong


def test_no_file_imports_itself_through_others() -> None:
    graph = {source.module: own_imports(source, at_load=True) for source in sources()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' → '.join(error.args[1])}")


def test_no_room_imports_itself_through_others() -> None:
    rooms: dict[str, set[str]] = {}
    room_of = {source.module: source.room for source in sources()}
    for source in sources():
        targets = {room_of[name] for name in own_imports(source)}
        rooms.setdefault(source.room, set()).update(targets - {source.room})
    try:
        TopologicalSorter(rooms).prepare()
    except CycleError as error:
        pytest.fail(f"rooms in a cycle: {' → '.join(error.args[1])}")


THREADS = {"streamrl/bus/waiting.py", "streamrl/planning/virtual_time.py"}
"""Where calls are made in threads, and where a simulated loop pretends to."""


def test_calls_in_threads_wait_when_they_are_cancelled() -> None:
    """Elsewhere ``bus.waiting.in_thread`` is used, which lets no thread outlive its caller."""
    wrong = [
        f"{source.path}:{node.lineno}: {node.attr}"
        for source in sources()
        if str(source.path) not in THREADS
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr in {"to_thread", "run_in_executor"}
    ]
    assert not wrong
