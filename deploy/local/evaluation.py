"""Evaluates a model with the configured function, in a separate process.

The process keeps the function's memory, threads and failures away from the run.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from streamrl.bus.embedded.process import die_with_parent
from streamrl.schemas.errors import UserError
from streamrl.schemas.import_path import load_function, module_command
from streamrl.settings.loading import without_settings

TIMEOUT_S = 1800
"""Half an hour. Evaluating a large model takes minutes, and a hanging evaluation must not block the run for ever."""


class Evaluation(BaseModel):
    """The result of an evaluation function: numbers by name, and samples to show (dictionaries of plain values).

    ``prompts``: the number of held-out prompts that the first number is a share of; a report needs it for intervals.
    """

    model_config = ConfigDict(frozen=True)

    metrics: dict[str, float]
    samples: list[dict[str, JsonValue]] = []
    prompts: Annotated[int, Field(ge=1)] | None = None


def evaluate(function: str, model: str | Path, seed: int) -> Evaluation:
    """Call ``function(Path(model), seed)`` in a fresh process.

    Raises:
        UserError: it failed, hung, or returned something else; for a failure the text ends with its last line.
    """
    with tempfile.TemporaryDirectory(prefix="streamrl-eval-") as scratch:
        output = Path(scratch) / "evaluation.json"
        # The result is passed in a file, because on standard output it would mix with the function's prints.
        command = module_command("streamrl.deploy.local.evaluation", function, str(model), str(seed), str(output))
        # The user's code may run what a model wrote, so it gets no password of the broker.
        how: dict[str, Any] = {"env": without_settings(os.environ), "timeout": TIMEOUT_S}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, preexec_fn=die_with_parent, **how
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(f"expected {function} to return within {TIMEOUT_S} s, got no result") from error
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise UserError(f"evaluation {function} of {model} failed: {last}")
        try:
            return Evaluation.model_validate_json(output.read_text())
        except (OSError, ValidationError) as error:
            raise UserError(
                f"expected {function} to return {{'metrics': ..., 'samples': ...}}, got: {error}"
            ) from error


def main(function: str, model: str, seed: str, output: str) -> None:
    """The child process: call the function and write its result to a file."""
    result: Any = load_function(function)(Path(model), int(seed))
    Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
