import importlib.util
from pathlib import Path

import pytest

from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed"),
    pytest.mark.processes,
]
SECONDS = 2
MOST_GROWTH_KIB = 64 << 10
"""The fuzzer's own corpus and coverage counted."""


@pytest.mark.parametrize("target", TARGETS)
def test_no_input_that_a_fuzzer_finds_breaks_a_promise(target: str, tmp_path: Path) -> None:
    outcome = fuzz(target, SECONDS, tmp_path)
    assert outcome.failure is None, outcome.failure
    assert outcome.executions > 1000
    assert outcome.growth_kib <= MOST_GROWTH_KIB
