"""An algorithm of the user's own: the manual's example, from its file to a loss; and what may go wrong with one."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.algorithms.shelf import algorithm_of
from streamrl.schemas.errors import SettingsError
from tests.architecture.sources import ROOT
from tests.consumers.algorithms.test_trl import RECORDED, errors

MANUAL = ROOT / "docs" / "algorithms.md"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's, with the manual's example in it."""
    (example,) = re.findall(r"```python\n(# my_algorithms.py\n.*?)```", MANUAL.read_text(), re.DOTALL)
    (tmp_path / "my_algorithms.py").write_text(example + "\n\ndef not_a_class():\n    pass\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("my_algorithms", None)


def test_the_manuals_example_computes_what_trl_does(directory: Path) -> None:
    (row,) = (row for row in RECORDED["rows"] if row["settings"]["name"] == "my_algorithms:SoftAdaptive")
    value, gradient = errors(row)
    assert value < 1e-6
    assert gradient < 1e-6


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"name": "my_algorithms:SoftAdaptiv"}, "did you mean 'SoftAdaptive'?"),
        ({"name": "not_there:Algorithm"}, "expected to import 'not_there'"),
        ({"name": "my_algorithms:not_a_class"}, "a class that extends streamrl.Algorithm, got function"),
        (
            {"name": "my_algorithms:SoftAdaptive", "options": {"temperature": 0.0}},
            "expected algorithm.options.temperature",
        ),
        (
            {"name": "my_algorithms:SoftAdaptive", "options": {"tau": 1.0}},
            "its options: temperature, temperature_below",
        ),
        ({"name": "grpo", "options": {"tau": 1.0}}, "its options: none"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(directory: Path, given: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError) as refused:
        algorithm_of(AlgorithmSettings.model_validate(given))
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
