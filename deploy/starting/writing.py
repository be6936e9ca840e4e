"""Writes the files of an example into a directory. Never writes over anything."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from deploy.starting.examples import CONFIG, MODEL_DIRECTORY, PROMPTS, REWARDS, ExampleName, example
from deploy.starting.template import as_commented_toml
from schemas.errors import UserError

Progress = Callable[[str], None]


def write_example(directory: Path, name: ExampleName, progress: Progress) -> list[Path]:
    """Write configuration, prompts, rewards and, for the tiny example, the model; returns what was written.

    Raises:
        UserError: a file is there already, or the directory cannot be written.
    """
    made = example(name, plain_run_name(directory))
    contents = {
        CONFIG: as_commented_toml(made.head, made.entries),
        PROMPTS: made.prompts,
        REWARDS: made.rewards,
    }
    written = [directory / file for file in contents]
    if made.needs_model:
        written.append(directory / MODEL_DIRECTORY)
    for path in written:
        if path.exists():
            raise UserError(f"expected to write {path}, which is there already; name another directory or remove it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if made.needs_model:
            _put_model(directory / MODEL_DIRECTORY, progress)
        for file, text in contents.items():
            with (directory / file).open("x") as opened:
                opened.write(text)
    except OSError as error:
        raise UserError(f"expected a directory that can be written, got {directory}: {error.strerror}") from error
    return written


def _put_model(target: Path, progress: Progress) -> None:
    from deploy.broker.runtime import cache_root
    from deploy.demo.cache import ensure_warm_started_model

    shutil.copytree(ensure_warm_started_model(cache_root(), 0, progress), target)


def plain_run_name(directory: Path) -> str:
    """The directory's name as a run may be called."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", directory.absolute().resolve().name.lower()).strip("._-")
    return plain[:64] or "my-run"
