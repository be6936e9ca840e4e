"""The finished completions of a past run or of an export, as a ranker learns them. Writes nothing."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvloop

from deploy.inspection.segments.history import SegmentHistory
from deploy.inspection.segments.manifest import MANIFEST
from deploy.inspection.source import history_of, open_run
from producers.lengths.completion import Completion
from schemas.errors import WireError
from schemas.messages.trajectories import FinishReason, Trajectory
from schemas.ports.history import History
from schemas.wire.topics import TRAJECTORIES


def recorded_completions(places: Sequence[Path], tell: Callable[[str], None]) -> list[Completion]:
    """Of all places, in the order in which they were finished; repeats count once.

    Raises:
        UserError: a place is neither a run nor an export, or nothing has the run's topics.
    """
    found: dict[str, tuple[float, Completion]] = {}
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


async def _read(history: History, run: str, found: dict[str, tuple[float, Completion]]) -> None:
    async for record in history.records(TRAJECTORIES.full_name(run)):
        try:
            message = None if record.value is None else record.message()
        except WireError:
            continue
        if isinstance(message, Trajectory) and message.finish_reason is not FinishReason.ABORT:
            found.setdefault(f"{run}/{message.trajectory_id}", (message.finished_at, Completion.of(message)))
