import ast
import statistics

from tests.architecture.shape import shape_of
from tests.architecture.sources import PACKAGES, ROOT, functions, sources

LOOP_LINES = ("Consumes:", "Produces:", "Waits for:", "On failure:", "On stop:")
LONG = {
    "consumers/training/checkpoints/storage.py": "two kinds of place behind one protocol",
    "planning/simulation.py": "all that stands between the real roles and virtual time, of which no part is used alone",
    "producers/generation/engines/emulated.py": "the timeline of a batch and the engine that keeps to it",
    "consumers/training/step.py": "one optimizer step of a learner: scores, credit, gradients, what is held, metrics",
    "producers/dispatch/state.py": "what each message changes in ledger, flights, fleet and positions: they must agree",
    "producers/generation/worker.py": "the driver of one process: its orders, weights, hand-overs and how it ends",
    "producers/generation/weights.py": "a version's way from an announcement into the engine, and what stays of it",
    "producers/generation/engines/slots.py": "what one decode step does: slots, the model over its cache, the sampler",
}
"""Files of over 500 lines, and why."""
FEW = {
    "inspection/charts": "the page's and the report's JavaScript, styles and uPlot; Python only says where they lie",
    "consumers/batching": "one mechanism, read as a whole: samples in, micro-batches out; and its settings",
    "deploy/images": "what runs inside a container, beside the files it is built of",
    "streamrl/init": "the templates and the checks have nothing in common but the moment they are for",
}
"""Folders of fewer than three modules, and why."""
BANNED_NAMES = {"utils", "common", "helpers", "misc"}


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_every_module_says_what_it_is() -> None:
    assert not [str(source.path) for source in sources() if not ast.get_docstring(source.tree)]


def test_files_and_functions_can_be_read_in_one_sitting() -> None:
    files = {str(source.path): source.text.count("\n") for source in sources()}
    long_files = {path: lines for path, lines in files.items() if lines > 800 or (lines > 500 and path not in LONG)}
    long_functions = [
        f"{source.path}:{node.name} {_lines(node)}"
        for source in sources()
        for node in functions(source)
        if _lines(node) > 60
    ]
    assert not long_files
    assert not long_functions
    assert statistics.median(_lines(node) for source in sources() for node in functions(source)) <= 12


def test_a_folder_holds_more_than_a_file_could() -> None:
    folders: dict[str, int] = {}
    for source in sources():
        if source.path.name != "__init__.py" and len(source.path.parts) > 2:
            folders[str(source.path.parent)] = folders.get(str(source.path.parent), 0) + 1
    assert not {folder: count for folder, count in folders.items() if count < 3 and folder not in FEW}
    assert not [str(source.path) for source in sources() if len(source.path.parts) > 4]


def test_no_file_has_a_name_that_says_nothing() -> None:
    assert not [str(source.path) for source in sources() if source.path.stem in BANNED_NAMES]


def test_every_loop_says_what_it_consumes_and_how_it_ends() -> None:
    wrong = []
    for source in sources():
        for node in functions(source):
            is_loop = isinstance(node, ast.AsyncFunctionDef) and (node.name == "run" or node.name.endswith("_loop"))
            takes_stop = any(argument.arg == "stop" for argument in node.args.args)
            is_port = source.module.startswith("bus") or _is_protocol_stub(node)
            if is_loop and takes_stop and not is_port:
                text = ast.get_docstring(node) or ""
                wrong += [f"{source.path}:{node.name} lacks '{line}'" for line in LOOP_LINES if line not in text]
    assert not wrong


def _is_protocol_stub(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    last = node.body[-1]
    return isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant) and last.value.value is Ellipsis


def test_messages_and_settings_are_frozen() -> None:
    import schemas.messages
    import schemas.settings

    assert schemas.messages.Message.model_config["frozen"]
    assert schemas.settings.Section.model_config["frozen"]
    assert schemas.settings.Section.model_config["extra"] == "forbid"


def test_no_test_patches_what_it_tests() -> None:

    tests = [path for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "architecture"]
    assert not [str(path) for path in tests if "unittest.mock" in path.read_text()]


def test_packages_are_all_checked() -> None:
    assert {source.module.split(".")[0] for source in sources()} == set(PACKAGES)


def test_a_class_name_means_one_thing() -> None:
    names = [
        node.name
        for source in sources()
        for node in source.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert not {name for name in names if names.count(name) > 1}


def test_the_shape_is_kept() -> None:
    shape = shape_of(ROOT)
    assert shape.cycles == 0
    assert shape.comments_per_100 >= 3
    assert shape.one_importer_share <= 1 / 3
    assert shape.readme_bytes <= 12_000
    # What looks at runs is not to outgrow what makes them; of those, producers hold four kinds of process.
    assert shape.inspection_share <= 0.25
    assert shape.largest_room_share <= 0.3
