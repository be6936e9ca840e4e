import random
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.dispatch.admission import AdmissionLedger
from schemas.errors import LifecycleError
from schemas.identifiers import PolicyVersion


def v(number: int, lineage: int = 1) -> PolicyVersion:
    return PolicyVersion(lineage, number)


def _ledger(groups_per_step: int = 2, max_staleness: int = 1, number: int = 0) -> AdmissionLedger:
    ledger = AdmissionLedger(groups_per_step, max_staleness)
    ledger.advance(v(number), [])
    return ledger


@dataclass
class _Group:
    worker: int
    oldest: int | None = None
    done: bool = False


class _World:
    """A trainer that takes groups in any order, workers that lag, and a dispatcher that hears of it all later."""

    def __init__(self, groups_per_step: int, max_staleness: int, workers: int) -> None:
        self.size, self.bound = groups_per_step, max_staleness
        self.ledger = AdmissionLedger(groups_per_step, max_staleness)
        self.version = v(0)
        self.actual = [v(0)] * workers
        self.reported = [v(0)] * workers
        self.groups: dict[str, _Group] = {}
        self.taken: list[tuple[int, str, _Group]] = []
        self.news: deque[tuple[PolicyVersion, tuple[str, ...]] | tuple[str, int]] = deque([(v(0), ())])
        self.admitted = 0
        self.worst = 0

    def admit(self, worker: int) -> bool:
        if not self.ledger.may_admit(self.reported[worker]):
            return False
        self.admitted += 1
        self.ledger.admit(f"g{self.admitted}", self.reported[worker])
        self.groups[f"g{self.admitted}"] = _Group(worker)
        return True

    def adopt(self, worker: int) -> None:
        self.actual[worker] = max(self.actual[worker], self.version)

    def heartbeat(self, worker: int) -> None:
        self.reported[worker] = self.actual[worker]

    def sample(self, choice: int, *, finish: bool) -> None:
        """One group in four is slow: it gets its turn only with choice 0."""
        if running := [self.groups[name] for name in self.groups if self._has_turn(name, choice)]:
            group = running[choice % len(running)]
            number = self.actual[group.worker].number
            group.oldest = number if group.oldest is None else min(group.oldest, number)
            group.done = finish

    def move(self, choice: int, worker: int) -> None:
        if running := [name for name, group in self.groups.items() if not group.done]:
            name = running[choice % len(running)]
            if self.ledger.may_move(name, self.reported[worker]):
                self.ledger.move(name, self.reported[worker])
                self.groups[name].worker = worker

    def skip(self, choice: int) -> None:
        if done := self._done():
            self._take(done[choice % len(done)])
            self.news.append((self.taken[-1][1], self.version.number))

    def step(self, choice: int) -> bool:
        done = self._done()
        if len(done) < self.size:
            return False
        start = choice % len(done)
        names = tuple((done + done)[start : start + self.size])
        number = self.version.number
        ages = [number - (self.groups[name].oldest or 0) for name in names]
        self.worst = max(self.worst, *ages)
        self.version = v(number + 1, self.version.lineage)
        for name in names:
            self._take(name)
        self.news.append((self.version, names))
        return True

    def resume(self, back: int) -> None:
        """The trainer comes back with an older checkpoint and reads everything since then again."""
        number = max(0, self.version.number - back)
        self.version = v(number, self.version.lineage + 1)
        self.groups |= {name: group for at, name, group in self.taken if at > number}
        self.taken = [entry for entry in self.taken if entry[0] <= number]
        self.news.append((self.version, ()))

    def hear(self) -> None:
        if self.news:
            first, second = self.news.popleft()
            if isinstance(first, str):
                self.ledger.end(first, second)  # type: ignore[arg-type]
            else:
                self.ledger.advance(first, second)  # type: ignore[arg-type]

    def settle(self) -> None:
        """Everything that is due happens: news arrive, weights are adopted, samples end, stale groups are skipped."""
        while self.news:
            self.hear()
        for worker in range(len(self.actual)):
            self.adopt(worker)
            self.heartbeat(worker)
            while self.admit(worker):
                pass
        for _ in range(len(self.groups)):
            self.sample(0, finish=True)
        for name in self._done():
            age = self.version.number - (self.groups[name].oldest or 0)
            self.worst = max(self.worst, age)
            if age > self.bound:
                self._take(name)
                self.news.append((name, self.version.number))
        self.step(0)

    def _has_turn(self, name: str, choice: int) -> bool:
        return not self.groups[name].done and (choice == 0 or int(name[1:]) % 4 != 1)

    def _done(self) -> list[str]:
        return [name for name, group in self.groups.items() if group.done]

    def _take(self, name: str) -> None:
        self.taken.append((self.version.number, name, self.groups.pop(name)))


MOVES = ("admit", "admit", "adopt", "heartbeat", "sample", "finish", "finish", "step", "step", "hear", "move", "skip")


def _play(world: _World, moves: list[tuple[str, int]]) -> None:
    workers = len(world.actual)
    for move, choice in moves:
        match move:
            case "admit":
                world.admit(choice % workers)
            case "adopt":
                world.adopt(choice % workers)
            case "heartbeat":
                world.heartbeat(choice % workers)
            case "sample" | "finish":
                world.sample(choice, finish=move == "finish")
            case "step":
                world.step(choice)
            case "hear":
                world.hear()
            case "move":
                world.move(choice, choice % workers)
            case "skip":
                world.skip(choice)
            case "resume":
                world.resume(choice % 4)


def _moves(names: tuple[str, ...], seed: int) -> list[tuple[str, int]]:
    rng = random.Random(seed)
    return [(rng.choice(names), rng.randint(0, 30)) for _ in range(400)]


SHAPES = st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(1, 3))
SEEDS = st.integers(0, 1 << 32)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SHAPES, SEEDS)
def test_no_consumed_token_is_older_than_max_staleness(shape: tuple[int, int, int], seed: int) -> None:
    world = _World(*shape)
    _play(world, _moves(MOVES, seed))
    for _ in range(6):
        world.settle()
    assert world.worst <= world.bound


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SHAPES, SEEDS)
def test_admission_never_deadlocks(shape: tuple[int, int, int], seed: int) -> None:
    world = _World(*shape)
    _play(world, _moves((*MOVES, "resume"), seed))
    before = world.version.number
    for _ in range(20):
        world.settle()
    assert world.version.number >= before + 5


def test_the_bound_is_used_in_full() -> None:
    """A slow worker holds version 0 while the others train on: its group ends exactly at the bound."""
    world = _World(groups_per_step=1, max_staleness=2, workers=2)
    world.hear()
    assert world.admit(0)
    world.sample(0, finish=False)
    for _ in range(5):
        world.adopt(1)
        world.heartbeat(1)
        if world.admit(1):
            world.sample(1, finish=True)
            world.step(0)
        while world.news:
            world.hear()
    assert world.version.number == 2
    world.sample(0, finish=True)
    world.step(0)
    assert world.worst == 2


def test_nothing_is_admitted_before_the_trainer_is_known() -> None:
    assert not AdmissionLedger(1, 1).may_admit(v(0))


def test_the_room_is_the_bound_less_what_is_under_way() -> None:
    ledger = _ledger(groups_per_step=2, max_staleness=1)
    assert ledger.room(v(0)) == 4
    ledger.admit("a", v(0))
    assert (ledger.room(v(0)), ledger.in_flight, ledger.oldest) == (3, 1, 0)
    ledger.advance(v(1), ["a", "b"])
    assert (ledger.room(v(0)), ledger.room(v(1))) == (2, 4)


def test_without_staleness_a_worker_must_hold_the_newest_weights() -> None:
    ledger = _ledger(groups_per_step=1, max_staleness=0)
    ledger.advance(v(1), [])
    assert not ledger.may_admit(v(0))
    assert ledger.may_admit(v(1))


def test_illegal_moves_are_refused() -> None:
    ledger = _ledger(groups_per_step=1, max_staleness=0)
    ledger.admit("a", v(0))
    with pytest.raises(LifecycleError, match="in flight"):
        ledger.admit("a", v(0))
    with pytest.raises(LifecycleError, match="expected room"):
        ledger.admit("b", v(0))
    with pytest.raises(LifecycleError, match="group in flight"):
        ledger.move("b", v(0))


def test_a_group_moves_only_to_weights_that_are_new_enough() -> None:
    ledger = _ledger(groups_per_step=1, max_staleness=1)
    ledger.advance(v(1), [])
    ledger.admit("a", v(1))
    ledger.admit("b", v(1))
    assert ledger.may_move("a", v(1))
    assert not ledger.may_move("a", v(0))
    ledger.end("b", 1)
    ledger.move("a", v(0))
    assert ledger.oldest == 0


def test_a_skipped_group_frees_its_place() -> None:
    ledger = _ledger(groups_per_step=1, max_staleness=0)
    ledger.admit("a", v(0))
    assert ledger.end("a", 0)
    assert not ledger.end("a", 0)
    assert ledger.may_admit(v(0))


def test_a_resumed_trainer_gets_back_the_groups_it_will_read_again() -> None:
    ledger = _ledger(groups_per_step=1, max_staleness=3)
    for name in ("a", "b", "c"):
        ledger.admit(name, v(0))
    for number, name in ((1, "a"), (2, "b"), (3, "c")):
        ledger.advance(v(number), [name])
    ledger.admit("d", v(3))
    assert ledger.advance(v(1, lineage=2), [])
    assert {name for name in "abcd" if ledger.is_in_flight(name)} == {"b", "c", "d"}
    assert ledger.oldest == 0
    ledger.advance(v(2, lineage=2), ["b"])
    ledger.advance(v(3, lineage=2), ["c"])
    assert ledger.oldest == 1


def test_repeats_and_orphaned_lineages_change_nothing() -> None:
    ledger = _ledger(groups_per_step=1, max_staleness=3)
    ledger.admit("a", v(0))
    ledger.advance(v(1, lineage=2), [])
    assert not ledger.advance(v(1, lineage=2), ["a"])
    assert not ledger.advance(v(9, lineage=1), ["a"])
    assert ledger.is_in_flight("a")


def test_a_group_nobody_will_end_is_forgotten_for_good() -> None:
    ledger = _ledger(groups_per_step=1, max_staleness=0)
    ledger.admit("a", v(0))
    ledger.forget("a")
    ledger.advance(v(0, lineage=2), [])
    assert ledger.in_flight == 0
