from collections.abc import Sequence

import pytest

from streamrl.producers.dispatch.fleet import Candidate
from streamrl.producers.dispatch.plans import Item, Plan, WorkerCapacity, WorkerShare
from streamrl.producers.dispatch.progress import Remaining
from streamrl.producers.dispatch.scheduler import WorkerQueues
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.profiles import DEFAULT_CURVE


def _queues(*lengths: Sequence[int], slots: int = 2, concurrency: int = 2, is_static: bool = False) -> WorkerQueues:
    """Queues of a, b, …; items named by place, with these lengths."""
    queues = WorkerQueues(lambda worker_id: DEFAULT_CURVE, 1.0, lambda worker_id: Remaining(), is_static=is_static)
    keys = iter(range(100))
    plan = [
        WorkerShare(WorkerCapacity("abc"[n], slots), concurrency, tuple(Item(next(keys), length) for length in each))
        for n, each in enumerate(lengths)
    ]
    queues.adopt(Plan(tuple(plan)))
    return queues


def _worker(name: str, sequences: int = 0, capacity: int = 2) -> Candidate:
    return Candidate(name, "x", PolicyVersion(1, 0), capacity, sequences, 0)


def _next(queues: WorkerQueues, *workers: Candidate) -> tuple[int, str] | None:
    found = queues.next(workers)
    return None if found is None else (found[0].key, found[1].worker_id)


def test_workers_take_turns_with_what_is_theirs() -> None:
    queues = _queues([5, 5], [5, 5])
    both = (_worker("a"), _worker("b"))
    assert [_next(queues, *both) for _ in range(4)] == [(0, "a"), (2, "b"), (1, "a"), (3, "b")]
    assert (_next(queues, *both), len(queues)) == (None, 0)


def test_a_full_worker_gets_nothing_though_its_queue_is_long() -> None:
    queues = _queues([5, 5], [5])
    assert _next(queues, _worker("a", 2), _worker("b")) == (2, "b")


def test_free_slots_take_from_other_queues() -> None:
    queues = _queues([9, 8, 7, 1], [], [3])
    assert _next(queues, _worker("b"), _worker("a", 2), _worker("c", 2)) == (0, "b")
    assert queues.stolen == 1


def test_orders_that_would_end_later_at_the_other_worker_stay_unless_all_would() -> None:
    queues = _queues([90, 2, 1], [])
    assert _next(queues, _worker("b"), _worker("a", 2)) == (1, "b")
    queues = _queues([90], [])
    assert _next(queues, _worker("b"), _worker("a", 2)) == (0, "b")


def test_a_static_plan_stays_as_it_is() -> None:
    assert _next(_queues([5], [], is_static=True), _worker("b"), _worker("a", 2)) is None


def test_slots_of_a_reserved_worker_stay_empty() -> None:
    queues = _queues([5, 5, 5], slots=8, concurrency=2)
    assert _next(queues, _worker("a", 1, capacity=8)) == (0, "a")
    assert _next(queues, _worker("a", 2, capacity=8)) is None


def test_every_prompt_is_sent_once() -> None:
    queues = _queues([5, 4], [3])
    queues.release("a")
    queues.release("a")
    assert [item.key for item in queues.pool] == [0, 1]
    queues.add([Item(9, 1)])
    assert ([item.key for item in queues.unsent()], len(queues)) == ([0, 1, 2, 9], 4)
    queues.adopt(Plan((WorkerShare(WorkerCapacity("c", 2), 2, tuple(queues.unsent())),)))
    taken = [_next(queues, _worker("c")) for _ in range(5)]
    assert taken == [(0, "c"), (1, "c"), (2, "c"), (9, "c"), None]


@pytest.mark.parametrize("worker", ["z"])
def test_a_worker_without_a_queue_waits_for_a_plan(worker: str) -> None:
    assert _next(_queues([5]), _worker(worker)) is None
