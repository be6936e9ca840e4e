from streamrl.bus.kafka.subscription import StallDetector
from streamrl.bus.port import TopicPartition

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


def watch(at: int = 5) -> StallDetector:
    made = StallDetector(timeout_s=8.0, max_replacements=2)
    made.observe_positions(0.0, {A: at, B: at}, ())
    return made


def test_a_partition_behind_for_the_whole_time_out_is_stuck() -> None:
    watched = watch()
    assert watched.observe_ends(2.0, {A: 6, B: 5}) == []
    assert watched.observe_ends(9.9, {A: 6, B: 5}) == []
    assert watched.observe_ends(10.0, {A: 6, B: 5}) == [A]


def test_a_partition_that_moves_is_not_stuck_however_far_behind() -> None:
    watched = watch()
    for second in range(1, 30):
        watched.observe_positions(second, {A: 5 + second, B: 5}, ())
        assert watched.observe_ends(second, {A: 1000, B: 5}) == []


def test_movement_of_one_partition_does_not_hide_that_another_is_stuck() -> None:
    watched = watch()
    for second in range(1, 10):
        watched.observe_positions(second, {A: 5 + second, B: 5}, ())
        stuck = watched.observe_ends(second, {A: 1000, B: 6})
    assert stuck == [B]


def test_a_paused_partition_is_never_stuck_and_its_time_starts_again_when_resumed() -> None:
    watched = watch()
    watched.observe_ends(1.0, {A: 6, B: 6})
    watched.observe_positions(20.0, {A: 5, B: 5}, [A, B])
    assert watched.observe_ends(20.0, {A: 6, B: 6}) == []
    assert watched.observe_ends(27.9, {A: 6, B: 6}) == []
    assert watched.observe_ends(28.0, {A: 6, B: 6}) == [A, B]


def test_time_without_an_answer_does_not_count() -> None:
    watched = watch()
    assert watched.observe_ends(100.0, {A: 6, B: 5}) == []


def test_the_broker_is_asked_when_something_is_quiet_and_once_per_time_out_in_any_case() -> None:
    watched = watch()
    assert not watched.should_ask(1.0)
    assert watched.should_ask(2.0)
    watched.observe_ends(2.0, {A: 5, B: 5})
    assert not watched.should_ask(3.0)
    for second in range(3, 10):
        watched.observe_positions(second, {A: second + 10, B: second + 10}, ())
        assert not watched.should_ask(second)
    watched.observe_positions(10.0, {A: 99, B: 99}, ())
    assert watched.should_ask(10.0)


def test_after_the_last_replacement_that_did_not_help_it_is_beyond_help_until_it_moves() -> None:
    watched = watch()
    watched.observe_ends(0.0, {A: 6, B: 5})
    for replacement in range(2):
        assert watched.observe_ends(8.0 * (replacement + 1), {A: 6, B: 5}) == [A]
        assert watched.beyond_help([A]) == []
        watched.consumer_replaced(8.0 * (replacement + 1), [A])
    assert watched.beyond_help([A]) == [A]
    watched.observe_positions(25.0, {A: 6, B: 5}, ())
    assert watched.beyond_help([A]) == []
