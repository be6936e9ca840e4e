import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamrl.bus.port import Outgoing, Record
from streamrl.inspection.audit.checks import check_balance
from streamrl.inspection.audit.report import ViolationKind
from streamrl.inspection.audit.state import _dumped_index, _loaded_index
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.topics import UNGRADED
from streamrl.schemas.trajectories import Prompt, UngradedTrajectory
from tests.inspection.audit.written_topics import ALGORITHM, RUN, WrittenTopics
from tests.schemas.examples import trajectory

REASONS = [reason for reason in SkipReason if reason not in (SkipReason.RETENTION_EXPIRED, SkipReason.OTHER)]


class AnyRunBalances(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = WrittenTopics(partitions=3)
        self.names = 0

    @rule(count=st.integers(1, 5), partition=st.integers(0, 2))
    def produce(self, count: int, partition: int) -> None:
        for _ in range(count):
            self.names += 1
            self.world.produce(f"d/{self.names}/0/0", partition)

    @rule(partition=st.integers(0, 2))
    def produce_poison(self, partition: int) -> None:
        self.world.produce(None, partition)

    @rule(partition=st.integers(0, 2), data=st.data())
    def produce_a_duplicate_and_skip_it(self, partition: int, data: st.DataObject) -> None:
        known = sorted({name for names in self.world.log.values() for name in names if name})
        if known:
            position = self.world.produce(data.draw(st.sampled_from(known)), partition)
            self.world.skip(position, SkipReason.DUPLICATE)

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        world = self.world
        used = {world.log[p][o] for p, o in world.current.trained | world.current.carried}
        fresh = {world.log[p][o]: (p, o) for p, o in world.pending() if world.log[p][o] not in (None, *used)}
        positions = sorted(fresh.values())
        if positions:
            chosen = data.draw(st.lists(st.sampled_from(positions), unique=True, min_size=1, max_size=6))
            world.step(chosen)
            if data.draw(st.booleans()):
                world.checkpoint()
            if data.draw(st.integers(0, 9)) == 0:  # a crash between checkpoint and announcement
                self.crash(data)
            else:
                world.announce()

    @rule(data=st.data(), reason=st.sampled_from(REASONS))
    def skip(self, data: st.DataObject, reason: SkipReason) -> None:
        positions = self.world.pending()
        if positions:
            self.world.skip(data.draw(st.sampled_from(positions)), reason)

    @rule(partition=st.integers(0, 2))
    def accept_a_hole(self, partition: int) -> None:
        mine = [offset for p, offset in self.world.pending() if p == partition]
        if mine:
            self.world.skip((partition, mine[0]), SkipReason.RETENTION_EXPIRED, mine[-1] + 1)

    @rule(data=st.data())
    def write_something_again(self, data: st.DataObject) -> None:
        again = [written for written in self.world.written if written[1].partition == 0 and written[0].partitions]
        if again:
            self.world.written.append(data.draw(st.sampled_from(again)))

    @precondition(lambda self: self.world.current.step > 0)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        saved = self.world.saved
        survivors = [each for each in saved if self._survives(each.manifest.policy_version)]
        self.world.restart(data.draw(st.sampled_from([None, *survivors])))

    @precondition(lambda self: self.world.saved)
    @rule(data=st.data(), elsewhere=st.booleans())
    def restore(self, data: st.DataObject, elsewhere: bool) -> None:
        self.world.roll_back(data.draw(st.sampled_from(self.world.saved)), elsewhere=elsewhere)

    @precondition(lambda self: self.world.saved)
    @rule(data=st.data())
    def move_to_another_cluster(self, data: st.DataObject) -> None:
        survivors = [each for each in self.world.saved if self._survives(each.manifest.policy_version)]
        if survivors:
            self.world.restart(data.draw(st.sampled_from(survivors)), elsewhere=True)

    def _survives(self, version: object) -> bool:
        newest = self.world.audit().algorithms[0]
        return version[0] in newest.lineages  # type: ignore[index]

    @invariant()
    def it_balances(self) -> None:
        verdict = self.world.audit()
        (own,) = verdict.algorithms
        assert verdict.violations == ()
        assert verdict.is_balanced
        announced = self.world.last_report is None or own.steps == self.world.current.step
        if announced:
            current = self.world.current
            assert own.trained == len(current.trained)
            assert own.skipped_in_all == len(current.skipped)
            assert own.carried_over == len(current.carried)
            assert own.pending == len(self.world.pending())
            assert own.produced == sum(map(len, self.world.log.values()))

    @invariant()
    def an_old_beginning_deleted_by_retention_is_no_violation(self) -> None:
        verdict = self.world.audit(first=4)
        assert verdict.violations == ()
        assert verdict.is_balanced


AnyRunBalances.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None, derandomize=True)
TestAnyRunBalances = AnyRunBalances.TestCase


def test_a_run_without_a_trainer_is_pending() -> None:
    world = WrittenTopics()
    world.written.clear()
    world.produce("a/0/0/0", 0)
    verdict = world.audit()
    assert verdict.algorithms == ()
    assert verdict.produced == 1
    assert verdict.to_json()["total"] == {"produced": 1, "trained": 0, "skipped": 0, "pending": 1}


def test_trajectories_that_another_worker_went_on_with_are_counted() -> None:
    """And a continued one is one: it is trained once, and what the lost worker still delivers is a copy of it."""
    world = WrittenTopics()
    names = [f"d/{n}/0/0" for n in range(9)]
    positions = [world.produce(name, 0) for name in names]
    world.step(positions)
    late = world.produce(names[1], 1)
    world.skip(late, SkipReason.DUPLICATE)
    world.checkpoint()
    world.announce()
    verdict = world.audit()
    assert verdict.is_balanced
    assert (verdict.produced, verdict.distinct) == (10, 9)
    times = [sum(name.encode()) % 3 for name in [*names, names[1]]]
    assert (verdict.continued, verdict.continuations) == (sum(map(bool, times)), sum(times))
    assert verdict.continuations > verdict.continued > 0


def test_samples_at_the_graders_are_counted_also_by_a_follower() -> None:
    world = WrittenTopics()
    names = [f"d/{n}/0/0" for n in range(6)]
    world.step([world.produce(name, 0) for name in names[:4]])
    world.checkpoint()
    world.announce()
    index = world.index()
    topic = UNGRADED.full_name(RUN)
    for offset, name in enumerate([*names, names[0]]):
        made = UngradedTrajectory.of(trajectory(trajectory_id=name), Prompt(prompt_id="d", dataset="d", content="?"))
        record = Outgoing.of(topic, made, key=None)
        index.add_ungraded(Record(topic, 0, offset, None, record.value, record.headers, 0.0))
    verdict = check_balance(RUN, index, world.manifests())
    assert verdict.is_balanced
    assert (verdict.sampled, verdict.in_grading) == (6, 2)
    assert (verdict.to_json()["sampled"], verdict.to_json()["in_grading"]) == (6, 2)
    assert _loaded_index(_dumped_index(index)).sampled == index.sampled


def test_steps_undone_by_a_crash_are_reported() -> None:
    world = WrittenTopics()
    positions = [world.produce(f"d/{n}/0/0", n % 2) for n in range(10)]
    world.step(positions[:3])
    world.checkpoint()
    world.announce()
    world.step(positions[3:5])
    world.announce()
    world.skip(positions[5], SkipReason.STALE)
    world.restart(world.saved[0])
    world.step(positions[3:6])
    world.announce()
    (own,) = world.audit().algorithms
    assert own.algorithm == ALGORITHM
    assert own.is_balanced
    assert (own.trained, own.skipped_in_all, own.pending) == (6, 0, 4)
    assert (own.undone.steps, own.undone.trained, own.undone.rows, own.undone.lineages) == (1, 2, 1, 0)
    assert own.lineages == (1, 2)
    assert own.checkpoint == "1-1"


def test_steps_undone_by_an_operator_are_counted_apart_from_those_undone_by_a_crash() -> None:
    world = WrittenTopics()
    positions = [world.produce(f"d/{n}/0/0", n % 2) for n in range(10)]
    for first in (0, 2, 4):
        world.step(positions[first : first + 2])
        world.checkpoint()
        world.announce()
    world.step(positions[6:8])
    world.announce()
    world.restart(world.saved[2])  # a crash: step 4 is undone
    world.roll_back(world.saved[0])
    world.skip(positions[9], SkipReason.STALE)
    world.restart(world.saved[0])  # another one, after which the choice still holds
    (own,) = world.audit().algorithms
    assert own.is_balanced
    assert (own.trained, own.pending, own.lineages) == (2, 8, (1, 5))
    by_crash, by_operator = own.undone, own.rolled_back
    assert (by_crash.steps, by_crash.trained, by_crash.rows, by_crash.lineages) == (1, 2, 1, 1)
    assert (by_operator.steps, by_operator.trained, by_operator.rows, by_operator.lineages) == (2, 4, 0, 1)


def test_records_finished_on_another_cluster_are_neither_trained_nor_pending() -> None:
    world = WrittenTopics()
    positions = [world.produce(f"d/{n}/0/0", n % 2) for n in range(10)]
    world.step(positions[:3])
    world.skip(positions[3], SkipReason.STALE)
    world.checkpoint()
    world.announce()
    world.step(positions[4:6])
    world.announce()
    world.restart(world.saved[0], elsewhere=True)
    world.step(positions[4:5])
    world.checkpoint()
    world.announce()
    (own,) = world.audit().algorithms
    assert own.is_balanced
    assert (own.carried_over, own.trained, own.skipped_in_all, own.pending, own.lineages) == (4, 1, 0, 5, (2,))
    assert own.undone.steps == own.rolled_back.steps == 0
    assert own.waiting.get("undone") is None
    told = next(each for each in world.written if b"carried-over" in dict(each[1].headers).values())
    world.written.remove(told)
    assert {each.kind for each in world.audit().violations} >= {ViolationKind.BROKEN_CHAIN, ViolationKind.LOST}


def busy_world(seed: int) -> WrittenTopics:
    """A run of some hundred records with crashes in it, ending with a checkpoint and a step after it."""
    rng, world, names = random.Random(seed), WrittenTopics(partitions=3), 0
    for turn in range(40):
        for _ in range(rng.randint(2, 9)):
            names += 1
            world.produce(f"d/{names}/0/0", rng.randrange(3))
        pending = [(p, o) for p, o in world.pending() if o < len(world.log[p]) - 2]
        rng.shuffle(pending)
        for position in pending[:2]:
            world.skip(position, rng.choice(REASONS))
        world.step(pending[2:6])
        if turn % 5 == 4:
            world.checkpoint()
        world.announce()
        if turn in (13, 27):
            world.restart(world.saved[-1])
    rest = world.pending()
    world.step(rest[:3])
    world.announce()
    world.skip(rest[3], SkipReason.STALE)
    return world


def test_a_busy_run_balances() -> None:
    for seed in range(5):
        verdict = busy_world(seed).audit()
        assert verdict.is_balanced
        assert verdict.algorithms[0].undone.steps > 0
