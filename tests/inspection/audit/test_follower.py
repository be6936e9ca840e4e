"""A follower agrees with the whole audit of all that was ever written, whatever it is fed and however it is cut up."""

import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from streamrl.bus.port import Record, TopicPartition
from streamrl.inspection.audit.follower import TopicsRecreated
from streamrl.inspection.audit.report import AuditReport, ViolationKind
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.topics import DEAD_LETTERS, SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS
from tests.inspection.audit.followed import FollowedHistory, RevealedHistory
from tests.inspection.audit.test_balance import AnyRunBalances, busy_world
from tests.inspection.audit.test_violations import PLANTS, Planted, the_record_changed_its_name
from tests.inspection.audit.written_topics import RUN, WrittenTopics

PARTITIONS = [
    *(TopicPartition(TRAJECTORIES.full_name(RUN), number) for number in range(3)),
    *(TopicPartition(topic.full_name(RUN), 0) for topic in (STEPS, SKIPS, WORK_ORDERS, DEAD_LETTERS)),
]


def records_of(world: WrittenTopics, begin: int = 0) -> list[Record]:
    """All that was written, in that order."""
    counts: Counter[tuple[str, int]] = Counter()
    found = []
    for _, out in world.written:
        tp = out.topic, out.partition or 0
        found.append(Record(out.topic, tp[1], counts[tp], out.key, out.value, out.headers, 0.0))
        counts[tp] += 1
    return found[begin:]


@contextmanager
def following(world: WrittenTopics, segment: int) -> Iterator[FollowedHistory]:
    with TemporaryDirectory() as folder:
        history = RevealedHistory(records_of(world), PARTITIONS)
        followed = FollowedHistory(RUN, history, Path(folder) / "audit.sqlite", segment)
        try:
            yield followed
        finally:
            followed.close()


def reveal(followed: FollowedHistory, world: WrittenTopics, until: int) -> None:
    followed.history.visible = until
    followed.manifests = [saved.manifest for saved in world.saved if saved.after <= until]


class AnyRunIsFollowed(AnyRunBalances):
    """a_followed_audit_equals_a_whole_audit."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        history = RevealedHistory([], PARTITIONS)
        self.followed = FollowedHistory(RUN, history, Path(self.folder.name) / "audit.sqlite", 1)

    @rule(segment=st.integers(1, 6), share=st.sampled_from([0.0, 0.0, 0.5, 1.0]))
    def follow(self, segment: int, share: float) -> None:
        self.followed.history.records = records_of(self.world)
        self.followed.follower.segment = segment
        reveal(self.followed, self.world, len(self.world.written))
        assert self.followed.advance() == self.followed.whole()
        self.followed.delete_what_was_read(share)

    @rule(saving=st.booleans())
    def restart_the_follower(self, saving: bool) -> None:
        # What was not saved is read again; then nothing of it may have been deleted meanwhile.
        self.followed.restart(saving=saving or bool(self.followed.history.first))
        assert self.followed.said == ""

    @invariant()
    def it_balances(self) -> None:
        """Others look at that."""

    @invariant()
    def an_old_beginning_deleted_by_retention_is_no_violation(self) -> None:
        """Others look at that."""

    def teardown(self) -> None:
        self.followed.close()
        self.folder.cleanup()


AnyRunIsFollowed.TestCase.settings = settings(max_examples=12, stateful_step_count=50, deadline=None, derandomize=True)
TestAnyRunIsFollowed = AnyRunIsFollowed.TestCase


def renamed(world: WrittenTopics) -> Planted:
    """``the_record_changed_its_name``, with the bytes on the topic changed and not only what an audit made of them."""
    planted = the_record_changed_its_name(world)
    at = next(at for at, (topic, out) in enumerate(world.written) if topic is TRAJECTORIES and out.key == planted.name)
    topic, out = world.written[at]
    other = WrittenTopics(partitions=world.partitions)
    other.produce("other/0/0/0", out.partition or 0)
    world.written[at] = topic, out._replace(value=other.written[-1][1].value)
    return planted


@pytest.mark.parametrize("plant", [*PLANTS, renamed], ids=lambda plant: plant.__name__)
def test_a_followed_audit_equals_a_whole_audit(
    plant: Callable[[WrittenTopics], Planted],
) -> None:
    """Fed in portions, the follower says at every moment what the whole audit says, restarts and retention or not."""
    world = busy_world(1)
    planted = plant(world)
    rng = random.Random(plant.__name__)
    with following(world, segment=15) as followed:
        until, report = 0, None
        while until < len(world.written):
            until = min(until + rng.randint(40, 120), len(world.written))
            reveal(followed, world, until)
            report = followed.advance()
            assert report == followed.whole()
            followed.delete_what_was_read(rng.choice([0.0, 0.3, 1.0]))
            if rng.random() < 0.3:
                followed.restart()
        assert report is not None
        if plant is not the_record_changed_its_name:  # which leaves the topic as it was
            assert planted.kind in {violation.kind for violation in report.violations}


def test_settling_changes_no_verdict_and_a_crash_unpacks_what_it_undid() -> None:
    world = WrittenTopics(partitions=3)
    names = iter(range(10_000))
    saved = []
    for _ in range(6):
        world.step([world.produce(f"d/{next(names)}/0/0", number % 3) for number in range(10)])
        world.checkpoint()
        world.announce()
        saved.append(world.saved[-1])
    with following(world, segment=1) as followed:
        for each in (*saved, None):
            reveal(followed, world, len(world.written) if each is None else each.after)
            followed.advance()
        known = followed.follower.known
        # The last checkpoint is announced by the last record, and packs what it contains.
        assert len(known.index.trajectories.records) == 0
        assert known.settled.records == 60
        before = len(known.settled.segments)
        world.restart(saved[1])
        followed.history.records = records_of(world)
        reveal(followed, world, len(world.written))
        report = followed.advance()
        assert report == followed.whole()
        assert report.algorithms[0].trained == 20
        assert report.algorithms[0].waiting == {"undone": 40}
        assert 0 < len(known.settled.segments) < before


def test_a_restore_unpacks_what_it_undid_and_another_cluster_all_of_it() -> None:
    world, saved = WrittenTopics(partitions=3), []
    for step in range(6):
        world.step([world.produce(f"d/{step}-{number}/0/0", number % 3) for number in range(10)])
        world.checkpoint()
        world.announce()
        saved.append(world.saved[-1])
    with following(world, segment=1) as followed:

        def advance() -> AuditReport:
            followed.history.records = records_of(world)
            reveal(followed, world, len(world.written))
            report = followed.advance()
            assert report == followed.whole()
            return report

        for each in saved:
            reveal(followed, world, each.after)
            followed.advance()
        advance()
        known = followed.follower.known
        before = len(known.settled.segments)
        world.roll_back(saved[1])
        own = advance().algorithms[0]
        assert (own.rolled_back.steps, own.rolled_back.trained, own.undone.steps) == (4, 40, 0)
        assert 0 < len(known.settled.segments) < before
        # Trained once more, they are settled with what was undone of them, and it is still told by whom.
        world.step(world.pending())
        world.checkpoint()
        world.announce()
        own = [advance() for _ in range(2)][-1].algorithms[0]
        assert known.settled.records == 60
        assert (own.rolled_back.steps, own.rolled_back.trained, own.undone.steps) == (4, 40, 0)
        followed.restart()
        world.restart(world.saved[-1], elsewhere=True)
        own = advance().algorithms[0]
        assert (own.carried_over, own.trained, own.rolled_back.steps) == (60, 0, 0)
        world.step([world.produce("d/new/0/0", 0)])
        world.checkpoint()
        world.announce()
        followed.restart()
        own = [advance() for _ in range(2)][-1].algorithms[0]
        assert (own.carried_over, own.trained) == (60, 1)
        assert followed.follower.known.settled.records == 61


def test_two_records_of_one_name_that_came_together_are_not_settled() -> None:
    world = WrittenTopics(partitions=3)
    world.step([world.produce("d/0/0/0", 0), world.produce("d/1/0/0", 1), world.produce("d/0/0/0", 2)])
    world.checkpoint()
    world.announce()
    with following(world, segment=1) as followed:
        reveal(followed, world, len(world.written))
        for _ in range(2):
            assert followed.advance() == followed.whole()
        assert followed.follower.known.settled.records == 1
        assert [each.kind for each in followed.advance().violations] == [ViolationKind.TRAINED_TWICE]


def test_records_trained_after_a_missing_step_are_not_settled() -> None:
    world = WrittenTopics(partitions=3)
    for number in range(4):
        world.step([world.produce(f"d/{number}/0/0", 0)])
        if number != 1:
            world.checkpoint()
            world.announce()
    with following(world, segment=1) as followed:
        reveal(followed, world, len(world.written))
        for _ in range(2):
            report = followed.advance()
            assert report == followed.whole()
        gap = next(each for each in report.violations if each.kind is ViolationKind.STEP_GAP)
        assert gap.trajectory_id == "d/2/0/0"
        assert followed.follower.known.settled.records == 1


def test_unread_records_are_reported() -> None:
    """Deleted before it came to them: trajectories count as expired, and lost steps prove nothing any more."""
    world = busy_world(2)
    with following(world, segment=20) as followed:
        half = len(world.written) // 2
        reveal(followed, world, half)
        followed.advance()
        reveal(followed, world, len(world.written))
        partition = PARTITIONS[0]
        seen = followed.follower.known.positions[partition]
        followed.history.first[partition] = seen + 5
        report = followed.advance()
        assert report.expired == 5
        assert report.violations == ()
        assert followed.follower.known.since == [f"{partition.topic}[0]: offsets {seen} to {seen + 4} deleted unread"]


@pytest.mark.parametrize("harm", ["flipped", "cut", "other run", "no database"])
def test_a_damaged_state_is_rebuilt_from_the_topics_and_that_is_said(harm: str) -> None:
    world = busy_world(0)
    with following(world, segment=20) as followed:
        reveal(followed, world, len(world.written))
        whole = followed.advance()
        assert followed.follower.known.settled.segments
        assert followed.file is not None
        followed.file.save(followed.follower.known)
        followed.file.close()
        path = followed.path
        if harm == "flipped":
            with sqlite3.connect(path) as database:
                row = database.execute("SELECT name, content FROM part WHERE name LIKE 'segment/%'").fetchone()
                flipped = bytes([row[1][0] ^ 1]) + row[1][1:]
                database.execute("UPDATE part SET content = ? WHERE name = ?", (flipped, row[0]))
            database.close()
        elif harm == "cut":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
        elif harm == "other run":
            followed.run = "other"
        else:
            path.write_bytes(b"this is no database" * 1000)
        followed.start()
        assert "rebuilt from the topics" in followed.said
        if harm != "other run":
            assert followed.advance() == whole == followed.whole()
            followed.restart()
            assert followed.said == ""


def test_recreated_topics_are_not_taken_for_the_old_ones() -> None:
    world, other = busy_world(0), busy_world(1)
    with following(world, segment=20) as followed:
        reveal(followed, world, 200)
        followed.advance()
        followed.restart()
        followed.history.records = records_of(other)
        reveal(followed, other, len(other.written))
        with pytest.raises(TopicsRecreated, match="recreated"):
            followed.advance()


def test_a_second_follower_leaves_the_state_to_the_first() -> None:
    world = busy_world(0)
    with following(world, segment=20) as first:
        second = FollowedHistory(RUN, first.history, first.path, 20)
        assert second.file is None
        assert "another audit uses it" in second.said
        reveal(second, world, len(world.written))
        second.manifests = [saved.manifest for saved in world.saved]
        assert second.advance() == second.whole()


def waiting_of(report: AuditReport) -> dict[str, int]:
    (own,) = report.algorithms
    assert sum(own.waiting.values()) == own.pending
    return own.waiting


def test_pending_records_are_explained() -> None:
    world = WrittenTopics(partitions=2)
    for sample in range(2):
        world.order("d/0/0", sample)
        world.order("d/1/0", sample)
    trained = [world.produce(f"d/0/0/{sample}", 0) for sample in range(2)]
    world.produce("d/1/0/0", 0)
    world.produce("d/9/0/0", 0)
    world.step([*trained, world.produce("d/2/0/0", 0)])
    world.checkpoint()
    world.announce()
    world.produce("d/3/0/0", 0)
    world.produce("d/0/0/0", 1)
    assert waiting_of(world.audit()) == {"copy": 1, "unfinished_group": 1, "read": 1, "behind": 1}
    world.step([(0, 5)])
    world.announce()
    world.skip((0, 3), SkipReason.STALE)
    world.restart(world.saved[0])
    assert waiting_of(world.audit()) == {"undone": 2, "copy": 1, "unfinished_group": 1}
