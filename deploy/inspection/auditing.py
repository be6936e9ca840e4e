"""Reads what an audit needs from a run's history, in an order that makes an audit of a living run exact.

Invariant a_live_audit_raises_no_false_alarm: whatever is written refers only to what was written before it. So the
checkpoints are listed first, then the ends of steps, skips and trajectories are fixed, in this order; what a report or
row within these ends refers to lies within them.
"""

import time
from collections.abc import Callable, Sequence

from consumers.audit.balance import balance
from consumers.audit.books.books import Books
from consumers.audit.checks.verdict import Verdict
from consumers.training.persistence.manifest import CheckpointManifest
from schemas.errors import DataError, WireError
from schemas.ports.bus import Record
from schemas.ports.history import Extent, History
from schemas.wire.topics import DEAD_LETTERS, SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS, Topic

Progress = Callable[[str, int, int], None]
"""Told the topic, how many of its offsets were read, and how many there are."""
TELL_EVERY = 500


async def audit(
    history: History,
    run: str,
    list_checkpoints: Callable[[], Sequence[CheckpointManifest]],
    progress: Progress = lambda topic, done, total: None,
) -> Verdict:
    """Audit a run, living or not.

    Args:
        history: where its topics are.
        run: its name.
        list_checkpoints: called once, before anything is read.
        progress: told how far the reading is.

    Raises:
        DataError: there is no such run, or a record of the steps or skips topic does not decode.
        BusUnavailable: the topics cannot be read.
    """
    began = time.monotonic()
    manifests = list_checkpoints()
    ends = {topic: await _extents(history, run, topic) for topic in (STEPS, SKIPS, TRAJECTORIES)}
    if not ends[TRAJECTORIES]:
        raise DataError(
            f"expected the topics of run {run!r}, found none: check the run's name and the broker's address"
        )
    books = Books(steps_begin=_begins(ends[STEPS]), skips_begin=_begins(ends[SKIPS]))
    books.hold(ends[TRAJECTORIES])
    for topic in (WORK_ORDERS, DEAD_LETTERS):
        ends[topic] = await _extents(history, run, topic)
    takers: dict[Topic, Callable[[Record], None]] = {
        STEPS: books.add_step,
        SKIPS: books.add_skip,
        TRAJECTORIES: books.add_trajectory,
        WORK_ORDERS: books.add_order,
        DEAD_LETTERS: books.add_dead_letter,
    }
    for topic, take in takers.items():
        await _read(history, topic.full_name(run), ends[topic], take, progress)
    books.hold(await _extents(history, run, TRAJECTORIES))
    verdict = balance(run, books, [manifest for manifest in manifests if manifest.run == run])
    return verdict.timed(time.monotonic() - began)


async def _extents(history: History, run: str, topic: Topic) -> dict[int, Extent]:
    return {tp.partition: extent for tp, extent in (await history.extents(topic.full_name(run))).items()}


def _begins(extents: dict[int, Extent]) -> bool:
    return all(extent.first == 0 for extent in extents.values())


async def _read(
    history: History, topic: str, extents: dict[int, Extent], take: Callable[[Record], None], progress: Progress
) -> None:
    total = sum(extent.end - extent.first for extent in extents.values())
    done = 0
    progress(topic, 0, total)
    async for record in history.records(topic, extents):
        try:
            take(record)
        except WireError as error:
            place = f"{topic}[{record.partition}]@{record.offset}"
            raise DataError(f"expected a step report or skip row at {place}, got: {error}") from error
        done += 1
        if done % TELL_EVERY == 0:
            progress(topic, done, total)
    progress(topic, total, total)
