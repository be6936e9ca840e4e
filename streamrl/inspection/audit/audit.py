"""Reads what an audit needs from a run's history, in an order that makes an audit of a living run exact.

Invariant a_live_audit_raises_no_false_alarm: a record refers only to records that were written before it. So the audit
lists the checkpoints first, and then fixes the ends of steps, skips and trajectories, in this order. Every record that
a report or row within these ends refers to lies within them.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing

from streamrl.bus.history import Extent, History
from streamrl.bus.port import Record, TopicPartition
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.inspection.audit.checks import check_balance
from streamrl.inspection.audit.index import AuditIndex
from streamrl.inspection.audit.report import AuditReport
from streamrl.inspection.scopes import scopes_of
from streamrl.schemas.errors import DataError, WireError
from streamrl.schemas.topics import DEAD_LETTERS, SKIPS, STEPS, TRAJECTORIES, UNGRADED, WORK_ORDERS, Topic

Progress = Callable[[str, int, int], None]
"""Called with the topic, how many of its offsets were read, and how many there are."""
PROGRESS_EVERY = 500
"""Records between two calls: at the usual 10,000 records/s and more, a progress bar moves several times a second."""
Handler = Callable[[Record], None]
TOPICS = (STEPS, SKIPS, UNGRADED, TRAJECTORIES, WORK_ORDERS, DEAD_LETTERS)
"""The topics of a run that are audited, in the order in which their ends are fixed."""
AUDITED_OF_INSTANCES = (STEPS, SKIPS)
"""An attached instance's own topics that are audited. They come before the run's topics, because their records refer to
the run's trajectories."""


def audited_topics(run: str, scopes: Sequence[str]) -> list[str]:
    """Full names of the audited topics, in the order in which their ends are fixed."""
    return [topic.full_name(scope) for scope in scopes for topic in AUDITED_OF_INSTANCES] + [
        topic.full_name(run) for topic in TOPICS
    ]


async def audit(
    history: History,
    run: str,
    list_checkpoints: Callable[[], Sequence[CheckpointManifest]],
    progress: Progress = lambda topic, done, total: None,
) -> AuditReport:
    """Audit a run, running or ended.

    Args:
        history: where to read its topics.
        run: its name.
        list_checkpoints: called once, before any topic is read.
        progress: called every ``PROGRESS_EVERY`` records.

    Raises:
        DataError: there is no such run, or a record of the steps or skips topic does not decode.
        BusUnavailable: the topics cannot be read.
    """
    began = time.monotonic()
    manifests = list_checkpoints()
    # In this order: checkpoints, then the topics in the order of TOPICS (see the invariant).
    scopes = await scopes_of(history, run)
    held = await history.extents(*audited_topics(run, scopes))
    ends = {topic: _of(topic, run, held) for topic in TOPICS}
    if not ends[TRAJECTORIES]:
        raise DataError(
            f"expected the topics of run {run!r}, found none: check the run's name and the broker's address"
        )
    steps, skips = ([_of(topic, scope, held) for scope in (run, *scopes)] for topic in (STEPS, SKIPS))
    index = AuditIndex(steps_begin=all(map(_begins, steps)), skips_begin=all(map(_begins, skips)))
    index.trajectories.set_extents(ends[TRAJECTORIES])
    await _read(history, held, handlers_of(run, index, scopes), progress)
    # Retention may have deleted records during the reading: records that are deleted by now count as expired, not as
    # unknown.
    index.trajectories.set_extents(_of(TRAJECTORIES, run, await history.extents(TRAJECTORIES.full_name(run))))
    report = check_balance(run, index, [each for each in manifests if each.run in (run, *scopes)])
    return report.timed(time.monotonic() - began)


def _of(topic: Topic, run: str, held: Mapping[TopicPartition, Extent]) -> dict[int, Extent]:
    return {tp.partition: extent for tp, extent in held.items() if tp.topic == topic.full_name(run)}


def _begins(extents: dict[int, Extent]) -> bool:
    return all(extent.first == 0 for extent in extents.values())


def handlers_of(run: str, index: AuditIndex, scopes: Sequence[str] = ()) -> dict[str, Handler]:
    """The method that indexes a record of each topic, by the topic's full name. ``scopes``: the attached instances'."""
    handlers: dict[Topic, Handler] = {
        STEPS: index.add_step,
        SKIPS: index.add_skip,
        TRAJECTORIES: index.trajectories.add_record,
        UNGRADED: index.add_ungraded,
        WORK_ORDERS: index.orders.add_record,
        DEAD_LETTERS: index.add_dead_letter,
    }
    own = {topic.full_name(run): handler for topic, handler in handlers.items()}
    return own | {topic.full_name(scope): handlers[topic] for scope in scopes for topic in AUDITED_OF_INSTANCES}


def unreadable(record: Record, error: WireError) -> DataError:
    """The error that ends an audit. If the report or row were skipped, the records that it names would look lost."""
    where = f"{record.topic}[{record.partition}]@{record.offset}"
    return DataError(f"expected a step report or skip row at {where}, got: {error}")


async def _read(
    history: History, held: Mapping[TopicPartition, Extent], handlers: Mapping[str, Handler], progress: Progress
) -> None:
    totals = Counter(dict.fromkeys(handlers, 0))
    for tp, extent in held.items():
        totals[tp.topic] += extent.end - extent.first
    for topic, total in totals.items():
        progress(topic, 0, total)
    done: Counter[str] = Counter()
    # Also closed if a record ends the audit: an open connection would keep the event loop from closing.
    async with aclosing(history.within(held)) as records:
        async for record in records:
            try:
                handlers[record.topic](record)
            except WireError as error:
                raise unreadable(record, error) from error
            done[record.topic] += 1
            if done[record.topic] % PROGRESS_EVERY == 0:
                progress(record.topic, done[record.topic], totals[record.topic])
    for topic, total in totals.items():
        progress(topic, total, total)
