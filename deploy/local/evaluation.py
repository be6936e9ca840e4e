"""Evaluates a model with the configured function, in a separate process, unless the model's directory has the result.

The process keeps the function's memory, threads and failures away from the run. Who makes a model and evaluates it may
write the result next to it (``write_known``). Invariant a_known_evaluation_is_the_same: it is used only for the same
weights, function, seed, source of the function's package, and versions of the libraries.
"""

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from streamrl.deploy.local.forking import ForkServer
from streamrl.schemas.errors import UserError
from streamrl.schemas.fingerprints import files_fingerprint, package_version
from streamrl.schemas.import_path import load_function, module_command
from streamrl.settings.loading import without_settings

TIMEOUT_S = 1800
"""Half an hour. Evaluating a large model takes minutes, and a hanging evaluation must not block the run for ever."""


KNOWN = "evaluation.json"
"""Name of the file in a model's directory with the result of its evaluation."""


class Evaluation(BaseModel):
    """The result of an evaluation function: numbers by name, and samples to show (dictionaries of plain values).

    ``prompts``: the number of held-out prompts that the first number is a share of; a report needs it for intervals.
    """

    model_config = ConfigDict(frozen=True)

    metrics: dict[str, float]
    samples: list[dict[str, JsonValue]] = []
    prompts: Annotated[int, Field(ge=1)] | None = None


def evaluate(function: str, model: str | Path, seed: int, models: ForkServer) -> Evaluation:
    """Call ``function(Path(model), seed)`` in a process that ``models`` forks.

    Raises:
        UserError: it failed, hung, or returned something else; for a failure the text ends with its last line.
    """
    with tempfile.TemporaryDirectory(prefix="streamrl-eval-") as scratch, tempfile.TemporaryFile("w+b") as errors:
        output = Path(scratch) / "evaluation.json"
        # The result is passed in a file, because on standard output it would mix with the function's prints.
        command = module_command("streamrl.deploy.local.evaluation", function, str(model), str(seed), str(output))
        try:
            # The user's code may run what a model wrote, so it gets no password of the broker.
            code = models.run(command, without_settings(os.environ), (None, None, errors), TIMEOUT_S)
        except TimeoutError as error:
            raise UserError(f"expected {function} to return within {TIMEOUT_S} s, got no result") from error
        if code != 0:
            errors.seek(0)
            last = (errors.read().decode(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise UserError(f"evaluation {function} of {model} failed: {last}")
        try:
            return Evaluation.model_validate_json(output.read_text())
        except (OSError, ValidationError) as error:
            raise UserError(
                f"expected {function} to return {{'metrics': ..., 'samples': ...}}, got: {error}"
            ) from error


def write_known(model: Path, function: str, seed: int, result: Mapping[str, Any]) -> None:
    """Write what ``function(model, seed)`` returned into the model's directory."""
    known = {"of": _conditions(model, function, seed), "result": result}
    (model / KNOWN).write_text(json.dumps(known))


def known_evaluation(function: str, model: Path, seed: int) -> Evaluation | None:
    """The result in the model's directory; None if there is none, or if something differs by now."""
    try:
        known = json.loads((model / KNOWN).read_text())
        if known["of"] == _conditions(model, function, seed):
            return Evaluation.model_validate(known["result"])
    except (OSError, ValueError, KeyError, TypeError, ImportError):
        pass
    return None


def _conditions(model: Path, function: str, seed: int) -> dict[str, Any]:
    """Everything that the result depends on."""
    spec = importlib.util.find_spec(function.partition(":")[0])
    source = Path(spec.origin if spec is not None and spec.origin else "").parent
    return {
        "function": function,
        "seed": seed,
        "weights": files_fingerprint({path.name: path for path in model.glob("*.safetensors")}),
        "source": files_fingerprint({path.name: path for path in source.glob("*.py")}),
        "libraries": libraries(),
    }


def libraries() -> list[str | None]:
    """Names and versions of the libraries on which results depend."""
    return [package_version(each) for each in ("torch", "transformers")]


def main(function: str, model: str, seed: str, output: str) -> None:
    """The child process: call the function and write its result to a file."""
    result: Any = load_function(function)(Path(model), int(seed))
    Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
