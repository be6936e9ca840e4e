from bus.kafka.subscription import StallWatch
from bus.port import TopicPartition

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


def watch(at: int = 5) -> StallWatch:
    made = StallWatch(timeout_s=8.0, rebuilds=2)
    made.note(0.0, {A: at, B: at}, ())
    return made


def test_a_partition_behind_for_the_whole_time_out_is_stuck() -> None:
    watched = watch()
    assert watched.told(2.0, {A: 6, B: 5}) == []
    assert watched.told(9.9, {A: 6, B: 5}) == []
    assert watched.told(10.0, {A: 6, B: 5}) == [A]


def test_a_partition_that_moves_is_not_stuck_however_far_behind() -> None:
    watched = watch()
    for second in range(1, 30):
        watched.note(second, {A: 5 + second, B: 5}, ())
        assert watched.told(second, {A: 1000, B: 5}) == []


def test_movement_of_one_partition_does_not_hide_that_another_is_stuck() -> None:
    watched = watch()
    for second in range(1, 10):
        watched.note(second, {A: 5 + second, B: 5}, ())
        stuck = watched.told(second, {A: 1000, B: 6})
    assert stuck == [B]


def test_a_paused_partition_is_never_stuck_and_begins_anew_when_resumed() -> None:
    watched = watch()
    watched.told(1.0, {A: 6, B: 6})
    watched.note(20.0, {A: 5, B: 5}, [A, B])
    assert watched.told(20.0, {A: 6, B: 6}) == []
    assert watched.told(27.9, {A: 6, B: 6}) == []
    assert watched.told(28.0, {A: 6, B: 6}) == [A, B]


def test_time_without_an_answer_does_not_count() -> None:
    watched = watch()
    assert watched.told(100.0, {A: 6, B: 5}) == []


def test_the_broker_is_asked_when_something_is_quiet_and_once_per_time_out_in_any_case() -> None:
    watched = watch()
    assert not watched.should_ask(1.0)
    assert watched.should_ask(2.0)
    watched.told(2.0, {A: 5, B: 5})
    assert not watched.should_ask(3.0)
    for second in range(3, 10):
        watched.note(second, {A: second + 10, B: second + 10}, ())
        assert not watched.should_ask(second)
    watched.note(10.0, {A: 99, B: 99}, ())
    assert watched.should_ask(10.0)


def test_after_the_last_rebuild_that_did_not_help_it_is_hopeless_and_movement_forgives() -> None:
    watched = watch()
    watched.told(0.0, {A: 6, B: 5})
    for rebuild in range(2):
        assert watched.told(8.0 * (rebuild + 1), {A: 6, B: 5}) == [A]
        assert watched.hopeless([A]) == []
        watched.rebuilt(8.0 * (rebuild + 1), [A])
    assert watched.hopeless([A]) == [A]
    watched.note(25.0, {A: 6, B: 5}, ())
    assert watched.hopeless([A]) == []
