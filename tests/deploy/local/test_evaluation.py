"""The evaluation of a model before and after a run, and what its user reads if the function fails."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.deploy.local import evaluation
from streamrl.deploy.local.evaluation import KNOWN, Evaluation, evaluate, known_evaluation, write_known
from streamrl.deploy.local.forking import ForkServer
from streamrl.schemas.errors import UserError

FUNCTIONS = """
import sys, time
def right(model, seed): return {"metrics": {"accuracy": 0.25, "seed": seed}, "samples": [{"model": model.name}]}
def failing(model, seed): raise ValueError("no such question")
def silent(model, seed): sys.exit(1)
def wrong(model, seed): return 0.25
def hanging(model, seed): time.sleep(600)
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with the functions, in the directory where the run was started."""
    (tmp_path / "my_evaluation.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return "my_evaluation"


@pytest.fixture
def models() -> Iterator[ForkServer]:
    """Forks processes that have imported nothing yet."""
    with ForkServer(()) as server:
        yield server


@pytest.mark.processes
def test_a_function_gets_model_and_seed(functions: str, models: ForkServer) -> None:
    found = evaluate(f"{functions}:right", "some/model", 7, models)
    assert found == Evaluation(metrics={"accuracy": 0.25, "seed": 7.0}, samples=[{"model": "model"}])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("failing", "evaluation my_evaluation:failing of m failed: ValueError: no such question"),
        ("silent", "evaluation my_evaluation:silent of m failed: no output"),
        ("wrong", r"expected my_evaluation:wrong to return \{'metrics': ..., 'samples': ...\}, got: "),
    ],
)
def test_a_failing_evaluation_is_named_with_its_reason(
    functions: str, models: ForkServer, function: str, message: str
) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        evaluate(f"{functions}:{function}", "m", 0, models)


@pytest.mark.processes
def test_a_hanging_evaluation_ends_at_its_time_out(
    functions: str, models: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "TIMEOUT_S", 0.5)
    with pytest.raises(UserError, match=r"expected my_evaluation:hanging to return within 0\.5 s, got no result"):
        evaluate(f"{functions}:hanging", "m", 0, models)


def test_a_known_evaluation_is_the_same(functions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    model, function = tmp_path / "model", f"{functions}:right"
    model.mkdir()
    weights = model / "model.safetensors"
    weights.write_bytes(b"weights")
    assert known_evaluation(function, model, 7) is None
    write_known(model, function, 7, {"metrics": {"accuracy": 0.25}})
    assert known_evaluation(function, model, 7) == Evaluation(metrics={"accuracy": 0.25})
    assert known_evaluation(function, model, 8) is None
    assert known_evaluation(f"{functions}:wrong", model, 7) is None
    weights.write_bytes(b"others")
    assert known_evaluation(function, model, 7) is None
    weights.write_bytes(b"weights")
    (tmp_path / "my_evaluation.py").write_text(FUNCTIONS + "# changed")
    assert known_evaluation(function, model, 7) is None
    (model / KNOWN).write_text("{")
    assert known_evaluation(function, model, 7) is None
