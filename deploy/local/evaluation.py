"""Evaluates a model with the function that the settings name, in a process of its own.

So its memory, threads and failures are not those of the run.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from streamrl.bus.embedded.process import die_with_parent
from streamrl.schemas.errors import UserError
from streamrl.schemas.import_path import load_function, own_command
from streamrl.settings.loading import without_settings

TIMEOUT_S = 1800
"""Half an hour: an evaluation of a large model takes minutes; one that hangs must not hold the run up for ever."""


class Evaluation(BaseModel):
    """What an evaluation function returns: numbers by name, and samples to show (dictionaries of plain values)."""

    model_config = ConfigDict(frozen=True)

    metrics: dict[str, float]
    samples: list[dict[str, JsonValue]] = []


def evaluate(function: str, model: str | Path, seed: int) -> Evaluation:
    """Call ``function(Path(model), seed)`` in a fresh process.

    Raises:
        UserError: it failed, hung, or returned something else; the text ends with its last line.
    """
    with tempfile.TemporaryDirectory(prefix="streamrl-eval-") as scratch:
        output = Path(scratch) / "evaluation.json"
        # The result travels in a file: whatever the user's function prints would mix with it on standard output.
        command = own_command("streamrl.deploy.local.evaluation", function, str(model), str(seed), str(output))
        # The user's code judges what a model wrote: it gets no password of the broker.
        how: dict[str, Any] = {"env": without_settings(os.environ), "timeout": TIMEOUT_S}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, preexec_fn=die_with_parent, **how
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(f"expected {function} to return within {TIMEOUT_S} s, got nothing") from error
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
    """The child's side."""
    result: Any = load_function(function)(Path(model), int(seed))
    Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
