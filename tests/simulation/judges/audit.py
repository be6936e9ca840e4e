"""Puts what a world left behind before the production audit, which must find the books in balance."""

from bus.history import Extent
from consumers.training.checkpoints.catalogue import read_manifests
from inspection.audit.checks import check_balance
from inspection.audit.index import AuditIndex
from schemas.topics import DEAD_LETTERS, SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS, Topic
from tests.simulation.bus.broker import Broker, Log, committed
from tests.simulation.history import Problem
from tests.simulation.worlds.crew import RUN
from tests.simulation.worlds.world import World


def audit(world: World) -> list[Problem]:
    """What the audit objects to."""
    broker = world.bus.broker
    books = AuditIndex(steps_begin=True, skips_begin=True)
    books.hold({log.tp.partition: Extent(log.first, len(log.slots)) for log in _logs(broker, TRAJECTORIES)})
    takers = {
        STEPS: books.add_step,
        SKIPS: books.add_skip,
        TRAJECTORIES: books.add_trajectory,
        WORK_ORDERS: books.add_order,
        DEAD_LETTERS: books.add_dead_letter,
    }
    for topic, take in takers.items():
        for log in _logs(broker, topic):
            for record in committed(log):
                if record.offset >= log.first:
                    take(record)
    verdict = check_balance(RUN, books, read_manifests(world.crew.place))
    found = [Problem("audit", str(each)) for balanced in verdict.algorithms for each in balanced.violations]
    if not found and not verdict.is_balanced:
        found.append(Problem("audit", f"not in balance: {verdict}"))
    return found


def _logs(broker: Broker, topic: Topic) -> list[Log]:
    return broker.logs(topic.full_name(RUN))
