"""The catalogue names texts and tests that are there: otherwise a mutant would stop being planted unnoticed."""

import ast
from functools import cache

import pytest

from tests.architecture.sources import parsed
from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.runner import ROOT


@cache
def decorators_by_test(file: str) -> dict[str, str]:
    """Source of every test function's decorators, by the function's name."""
    nodes = parsed((ROOT / file).read_text()).body
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: "\n".join(map(ast.unparse, node.decorator_list)) for node in functions}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_each_mutant_can_be_planted_and_its_tests_exist(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text()
    assert source.count(mutant.old) == 1
    assert ast.dump(parsed(source.replace(mutant.old, mutant.new))) != ast.dump(parsed(source))
    assert mutant.tests
    for node_id in mutant.tests:
        file, _, test = node_id.partition("::")
        name, _, case = test.removesuffix("]").partition("[")
        assert name in decorators_by_test(file)
        assert case in decorators_by_test(file)[name]


def test_ids_are_unique() -> None:
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)
