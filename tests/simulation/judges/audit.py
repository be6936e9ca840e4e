"""Puts what a world left behind before the production audit, which must find the books in balance, and its follower.

The follower is shown the world as it came about, in portions, and must agree with the audit at the end of each.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from streamrl.bus.history import Extent
from streamrl.bus.port import Record
from streamrl.consumers.training.checkpoints.catalogue import read_manifests
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.inspection.audit.checks import check_balance
from streamrl.inspection.audit.index import AuditIndex
from streamrl.schemas.topics import DEAD_LETTERS, SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS, Topic
from tests.inspection.audit.followed import FollowedHistory, RevealedHistory
from tests.simulation.bus.broker import Broker, Log, committed
from tests.simulation.history import Problem
from tests.simulation.worlds.crew import RUN, SCOPE
from tests.simulation.worlds.world import World

PORTIONS = 4
SEGMENT = 10
"""Records that are packed together: few, so that a short run has several to unpack."""


def audit(world: World) -> list[Problem]:
    """What the audit objects to."""
    broker = world.bus.broker
    books = AuditIndex(steps_begin=True, skips_begin=True)
    books.trajectories.set_extents(
        {log.tp.partition: Extent(log.first, len(log.slots)) for log in _logs(broker, TRAJECTORIES)}
    )
    takers = {
        STEPS: books.add_step,
        SKIPS: books.add_skip,
        TRAJECTORIES: books.trajectories.add_record,
        WORK_ORDERS: books.orders.add_record,
        DEAD_LETTERS: books.add_dead_letter,
    }
    scopes = [SCOPE] if world.setup.attached_from else []
    for topic, take in takers.items():
        for log in [*_logs(broker, topic), *(log for scope in scopes for log in _own_logs(broker, topic, scope))]:
            for record in committed(log):
                if record.offset >= log.first:
                    take(record)
    manifests = [*read_manifests(world.crew.directory.place), *read_manifests(world.crew.instance.place)]
    verdict = check_balance(RUN, books, manifests)
    found = [Problem("audit", str(each)) for balanced in verdict.algorithms for each in balanced.violations]
    if not found and not verdict.is_balanced:
        found.append(Problem("audit", f"not in balance: {verdict}"))
    # The follower finds an instance by the control topic, which is compacted: it has tests of its own.
    return found if scopes else found + _followed(broker, manifests, list(takers))


def _followed(broker: Broker, manifests: list[CheckpointManifest], topics: list[Topic]) -> list[Problem]:
    logs = [log for topic in topics for log in _logs(broker, topic)]
    # An audit that begins after the deletion knows less than one that has followed from the beginning.
    if any(log.first for log in logs):
        return []
    # By the latest stamp so far in the partition: a writer's clock may be set back, and a partition keeps its order.
    stamped = [pair for log in logs for pair in _stamped(committed(log))]
    records = [record for _, record in sorted(stamped, key=lambda pair: pair[0])]
    history = RevealedHistory(records, [log.tp for log in logs])
    with TemporaryDirectory() as folder:
        followed = FollowedHistory(RUN, history, Path(folder) / "audit.sqlite", SEGMENT)
        for work_of_rows in range(1, PORTIONS + 1):
            history.visible = len(records) * work_of_rows // PORTIONS
            now = records[history.visible - 1].timestamp if history.visible else 0.0
            # Of those that are left; what else there was then, nobody knows.
            followed.manifests = [each for each in manifests if each.created_at <= now or work_of_rows == PORTIONS]
            if followed.advance() != followed.whole():
                return [Problem("audit", f"the follower disagrees after {history.visible} of {len(records)} records")]
            followed.delete_what_was_read(1.0)
            if work_of_rows == PORTIONS // 2:
                followed.restart()
        followed.close()
    return []


def _stamped(records: Iterable[Record]) -> Iterator[tuple[float, Record]]:
    latest = 0.0
    for record in records:
        latest = max(latest, record.timestamp)
        yield latest, record


def _own_logs(broker: Broker, topic: Topic, scope: str) -> list[Log]:
    return broker.logs(topic.full_name(scope)) if topic in (STEPS, SKIPS) else []


def _logs(broker: Broker, topic: Topic) -> list[Log]:
    return broker.logs(topic.full_name(RUN))
