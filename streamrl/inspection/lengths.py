"""Reads recorded completions from runs and exports, to train length predictors and to plan with."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvloop

from streamrl.bus.history import History
from streamrl.bus.port import message_of
from streamrl.inspection.export import MANIFEST, SegmentHistory
from streamrl.inspection.source import history_of, open_run
from streamrl.producers.lengths.predictor import ObservedCompletion
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import FinishReason, Trajectory


def recorded_completions(places: Sequence[Path], tell: Callable[[str], None]) -> list[ObservedCompletion]:
    """The completions of all places, in the order in which they finished. Repeats count once.

    Raises:
        UserError: a place is neither a run nor an export, or no broker has the run's topics.
    """
    found: dict[str, tuple[float, ObservedCompletion]] = {}
    for place in places:
        with _opened(place, tell) as (history, run):
            uvloop.run(_read(history, run, found))
    return [completion for _, completion in sorted(found.values(), key=lambda pair: pair[0])]


@contextmanager
def _opened(place: Path, tell: Callable[[str], None]) -> Iterator[tuple[History, str]]:
    if (place / MANIFEST).is_file():
        export = SegmentHistory(place)
        yield export, export.manifest.run
        return
    run = open_run(place)
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-lengths-") as scratch,
        history_of(run, None, Path(scratch), tell) as history,
    ):
        yield history, run.name


async def _read(history: History, run: str, found: dict[str, tuple[float, ObservedCompletion]]) -> None:
    async for record in history.records(TRAJECTORIES.full_name(run)):
        message = message_of(record)
        # The length of an aborted completion is not the length that it would have reached. Ids are unique only within a
        # run.
        if isinstance(message, Trajectory) and message.finish_reason is not FinishReason.ABORT:
            found.setdefault(f"{run}/{message.trajectory_id}", (message.finished_at, ObservedCompletion.of(message)))
