"""Which directories are runs. A run is known by its settings or its metrics; a report needs the latter."""

import os
from collections.abc import Sequence
from pathlib import Path

from deploy.inspection.living import RUNS
from deploy.inspection.source import no_run
from deploy.runs.directory import RunDirectory
from schemas.errors import UserError


def find_runs(paths: Sequence[Path]) -> list[RunDirectory]:
    """All of them.

    Raises:
        UserError: one or more are no runs, or took no step yet; each is named.
    """
    found, problems = [], []
    for path in paths:
        try:
            found.append(find_run(path))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("; and ".join(problems))
    return found


def find_run(path: Path) -> RunDirectory:
    """A run by its directory, its name under ``runs/``, or a file in its directory.

    Raises:
        UserError: there is no such run, or it took no step yet.
    """
    given = path.parent if path.is_file() else path
    candidates = [given] if given.is_dir() else [RUNS / given]
    for candidate in map(RunDirectory, candidates):
        if candidate.metrics.is_file():
            return candidate
        if candidate.config.is_file():
            raise UserError(
                f"expected {candidate.metrics.name} in {candidate.path}, which the trainer writes with its first step, "
                "got none yet; `streamrl status` says where a run stands"
            )
    if given.is_dir():
        name = RunDirectory(given).config.name
        raise UserError(f"expected a run's directory, with {name}, got {no_run(given)}")
    raise UserError(f"expected a run's directory or its name under {RUNS}/, got {no_run(path)}")


def names_of(paths: Sequence[Path]) -> list[str]:
    """Last parts of the paths; where these are alike, as many more as it takes to tell them apart."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError(f"expected different runs, got {paths[0]} twice")
