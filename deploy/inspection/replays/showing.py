"""Carries out `streamrl show`: opens the run, traces the trajectory, prints its life."""

import asyncio
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from consumers.replay.lives.life import Life
from consumers.replay.lives.tracing import Tracer
from deploy.inspection.replays.show import life_text, pieces_of
from deploy.inspection.replays.values import as_json
from deploy.inspection.source import history_of, open_run
from schemas.ports.history import History


def show(name: str, run_path: Path, export: Path | None, *, json: bool) -> None:
    """Print a trajectory's life.

    Raises:
        UserError: there is no such trajectory, or no such run.
    """
    run = open_run(run_path)
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-show-") as scratch,
        history_of(run, export, Path(scratch), lambda line: print(line, file=sys.stderr)) as history,
    ):
        life = asyncio.run(_trace(history, run.name, run.settings.algorithm.name, name))
    if json:
        print(as_json(life))
    else:
        Console(soft_wrap=True, highlight=False).print(life_text(life, pieces_of(run.settings.model.path)))


async def _trace(history: History, run: str, algorithm: str, name: str) -> Life:
    try:
        return await Tracer(history, run, algorithm).trace(name)
    finally:
        await history.close()
