"""Tails are put together on few workers: the plan on any fleet, and what becomes of it in the dispatcher's state."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from math import ceil, inf

from hypothesis import given
from hypothesis import strategies as st

from streamrl.producers.dispatch.dispatcher import build_reorder
from streamrl.producers.dispatch.repack import (
    Move,
    Repacker,
    TailGroup,
    TailWorker,
    is_worth_moving,
    repack,
    tail_limit,
)
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.state import DispatchState
from streamrl.producers.lengths.predictor import ConstantLength
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.profiles import DecodeCurve, DecodeSettings
from tests.producers.dispatch.dispatcher_harness import LOOP, heartbeat, order, step_report, version

CURVE = DecodeCurve(DecodeSettings(step_s=0.01, batch_scale=64.0, prefill_s_per_token=1e-4))
PAYBACK = 16.0


@st.composite
def fleets(draw: st.DrawFn) -> list[TailWorker]:
    """Workers of up to two versions and speeds, with up to 12 completions each, some near their limits."""
    names = st.sampled_from("abcdefgh")
    workers = []
    for name in draw(st.lists(names, unique=True, max_size=8)):
        sizes = draw(st.lists(st.integers(1, 4), max_size=3))
        groups = tuple(
            TailGroup(
                f"{name}/{number}",
                tuple(draw(st.lists(st.integers(1, 20_000), min_size=size, max_size=size))),
                tuple(draw(st.lists(st.integers(1, 5_000), min_size=size, max_size=size))),
            )
            for number, size in enumerate(sizes)
        )
        workers.append(
            TailWorker(
                name,
                PolicyVersion(1, draw(st.integers(1, 2))),
                CURVE.times(draw(st.sampled_from((1.0, 2.0)))),
                slots=64,
                limit=draw(st.sampled_from((4, 12, 16))),
                kv_tokens=draw(st.sampled_from((None, 10_000, 100_000))),
                groups=groups,
            )
        )
    return workers


def carried_out(workers: Iterable[TailWorker], moves: Iterable[Move]) -> list[TailWorker]:
    """The fleet once everything was moved."""
    to = {move.group_id: move.target for move in moves}
    groups = [(to.get(group.group_id, worker.worker_id), group) for worker in workers for group in worker.groups]
    return [
        replace(worker, groups=tuple(group for name, group in groups if name == worker.worker_id)) for worker in workers
    ]


@given(fleets())
def test_no_trajectory_is_lost_or_duplicated(fleet: list[TailWorker]) -> None:
    moves = repack(fleet, PAYBACK, inf)
    at = {group.group_id: worker for worker in fleet for group in worker.groups}
    versions = {worker.worker_id: worker.version for worker in fleet}
    assert len({move.group_id for move in moves}) == len(moves)
    for move in moves:
        assert at[move.group_id].worker_id == move.source != move.target
        assert at[move.group_id].version == versions[move.target]
    before, after = (Counter(group for w in one for group in w.groups) for one in (fleet, carried_out(fleet, moves)))
    assert before == after


@given(fleets())
def test_targets_stay_within_their_limits(fleet: list[TailWorker]) -> None:
    moves = repack(fleet, PAYBACK, inf)
    targets = {move.target for move in moves}
    for worker in carried_out(fleet, moves):
        if worker.worker_id in targets:
            assert worker.samples <= worker.limit
            # Each context as long as it will be when it ends is an upper bound of what is held then.
            assert worker.is_within_limits
            if worker.kv_tokens is not None:
                ends = [left for group in worker.groups for left in group.left]
                for end in ends:
                    held = [
                        context + end
                        for group in worker.groups
                        for left, context in zip(group.left, group.contexts, strict=True)
                        if left >= end
                    ]
                    assert sum(held) <= worker.kv_tokens


@given(
    st.lists(st.integers(1, 4), max_size=4),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 12),
    st.sampled_from((None, 40, 100)),
)
def test_targets_stay_within_their_limits_when_a_move_is_made(
    held: list[int], moved: list[int], capacity: int, kv_tokens: int | None
) -> None:
    """Whatever the target has by then, and as many groups come to it one after the other."""
    loop = LOOP.model_copy(update={"groups_per_step": 16})
    state = DispatchState(loop, DispatchSettings(repack=True), ConstantLength(loop))
    state.observe(step_report(0), 0.0)
    beats = {
        name: heartbeat(name, capacity=capacity, released=(), awaits=version(1)).replace(kv_tokens=kv_tokens)
        for name in ("w0", "w1")
    }
    for beat in beats.values():
        state.observe(beat, 0.0)
    for number, (worker, size) in enumerate([*(("w1", size) for size in held), *(("w0", size) for size in moved)]):
        state.admit(order(f"toy/{number}/0", worker, samples=size), state.candidate(beats[worker]), 0.0)
    repacker = Repacker(state, PAYBACK)
    flights = list(state.flights.carried("w0").values())
    repacker._pending = {one.order.group_id: (Move(one.order.group_id, "w0", "w1"), 0.0) for one in flights}
    for flight in flights:
        flight.is_released = True
        state.flights.release(flight)
        if (target := repacker.target(flight, 0.0)) is None:
            continue
        state.reassign(build_reorder(flight, target), target, 0.0)
        contexts = [one.context + one.left for one in state.progress.held("w1", 0.0)]
        assert len(contexts) <= capacity
        if kv_tokens is not None and len(set(contexts)) == 1:
            assert sum(contexts) <= kv_tokens
    assert not state.moved or sum(held) < capacity


@given(fleets())
def test_sources_are_emptied(fleet: list[TailWorker]) -> None:
    moves = repack(fleet, PAYBACK, inf)
    sources, targets = {move.source for move in moves}, {move.target for move in moves}
    assert not sources & targets
    after = carried_out(fleet, moves)
    assert all(not worker.groups for worker in after if worker.worker_id in sources)
    busy = [sum(1 for worker in one if worker.groups) for one in (fleet, after)]
    assert busy[1] == busy[0] - len(sources)


@given(fleets())
def test_a_completed_plan_is_followed_by_an_empty_one(fleet: list[TailWorker]) -> None:
    moves = repack(fleet, PAYBACK, inf)
    assert repack(carried_out(fleet, moves), PAYBACK, inf) == ()
    assert repack(list(reversed(fleet)), PAYBACK, inf) == moves


@given(fleets(), st.integers(0, 400))
def test_no_worker_is_emptied_without_need(fleet: list[TailWorker], room: int) -> None:
    """As many as have the slots for what may begin, of these workers with 64 each."""
    moves, unbound = repack(fleet, PAYBACK, room), repack(fleet, PAYBACK, inf)
    sources = {move.source for move in moves}
    assert len(sources) == min(ceil(room / 64), len({move.source for move in unbound}))


def tail(name: str, left: int, context: int = 1000, count: int = 1, **changes: object) -> TailWorker:
    group = TailGroup(f"{name}/0", (left,) * count, (context,) * count)
    worker = TailWorker(name, PolicyVersion(1, 1), CURVE, slots=64, limit=16, groups=(group,))
    return replace(worker, **changes)  # type: ignore[arg-type]


def test_the_smallest_goes_into_the_fullest_that_has_room() -> None:
    fleet = [tail("a", 5000, 900), tail("b", 5000, 800, count=15), tail("c", 5000, 700), tail("d", 5000, 100)]
    assert repack(fleet, PAYBACK, inf) == (Move("c/0", "c", "a"), Move("d/0", "d", "b"))


def test_a_move_that_does_not_pay_is_not_made() -> None:
    """A step takes 10.2 ms and leaves 63 slots of 64 empty; 1000 tokens of context are prefilled in 0.1 s."""
    gain_s = 0.01 * (1 + 1 / 64) * 63 / 64
    enough = int(PAYBACK * 0.1 / gain_s) + 1
    for left, expected in ((enough, True), (enough - 2, False)):
        short, long = tail("a", left), tail("b", 9000, 90_000)  # whose cache is too much to be prefilled anew
        assert is_worth_moving(short, long.with_all_of(short), PAYBACK) is expected
        assert bool(repack([short, long], PAYBACK, inf)) is expected


def test_the_limit_of_a_tail_is_where_steps_take_twice_as_long() -> None:
    assert tail_limit(CURVE, 256) == 66  # (1 + 66 / 64) / (1 + 1 / 64) = 2
    assert tail_limit(CURVE, 8) == 8
    assert tail_limit(DecodeCurve(DecodeSettings(table=((1, 0.01), (64, 0.01)))), 64) == 64
