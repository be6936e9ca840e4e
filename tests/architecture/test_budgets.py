import ast

from streamrl.schemas.messages import Message
from streamrl.schemas.settings import Section
from tests.architecture.sources import FRONT, PACKAGES, ROLES, ROOT, functions, sources

LOOP_LINES = ("Consumes:", "Produces:", "Waits for:", "On failure:", "On stop:")
BANNED_NAMES = {"utils", "common", "helpers", "misc"}


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_every_module_says_what_it_is() -> None:
    assert not [str(source.path) for source in sources() if not ast.get_docstring(source.tree)]


def test_functions_can_be_read_in_one_sitting() -> None:
    assert not [
        f"{source.path}:{node.name} {_lines(node)}"
        for source in sources()
        for node in functions(source)
        if _lines(node) > 60
    ]


def test_no_file_has_a_name_that_says_nothing() -> None:
    assert not [str(source.path) for source in sources() if source.path.stem in BANNED_NAMES]


def test_every_loop_says_what_it_consumes_and_how_it_ends() -> None:
    wrong = []
    for source in sources():
        for node in functions(source):
            is_loop = isinstance(node, ast.AsyncFunctionDef) and (node.name == "run" or node.name.endswith("_loop"))
            takes_stop = any(argument.arg == "stop" for argument in node.args.args)
            is_port = source.package == "bus" or _is_protocol_stub(node)
            if is_loop and takes_stop and not is_port:
                text = ast.get_docstring(node) or ""
                wrong += [f"{source.path}:{node.name} lacks '{line}'" for line in LOOP_LINES if line not in text]
    assert not wrong


def _is_protocol_stub(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    last = node.body[-1]
    return isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant) and last.value.value is Ellipsis


def test_messages_and_settings_are_frozen() -> None:
    assert Message.model_config["frozen"]
    assert Section.model_config["frozen"]
    assert Section.model_config["extra"] == "forbid"


def test_no_test_patches_what_it_tests() -> None:

    tests = [path for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "architecture"]
    assert not [str(path) for path in tests if "unittest.mock" in path.read_text()]


def test_packages_are_all_checked() -> None:
    assert {source.package for source in sources()} == {*PACKAGES, FRONT, ROLES}


def test_a_class_name_means_one_thing() -> None:
    names = [
        node.name
        for source in sources()
        for node in source.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert not {name for name in names if names.count(name) > 1}
