import pytest

from observability.run_state.aggregates import STRETCHES, Lane, Stretch


def test_stretches_of_a_kind_join_and_others_follow_without_overlap() -> None:
    lane = Lane()
    lane.extend(0.0, 1.0, "generate", 1)
    lane.extend(0.5, 2.0, "generate", 1)
    lane.extend(1.5, 3.0, "generate", 2)
    lane.extend(5.0, 6.0, "generate", 2)
    lane.extend(0.1, 0.2, "generate", 1)
    assert list(lane.stretches) == [
        Stretch(0.0, 2.0, "generate", 1),
        Stretch(2.0, 3.0, "generate", 2),
        Stretch(5.0, 6.0, "generate", 2),
    ]


def test_seconds_count_what_lies_within() -> None:
    lane = Lane()
    lane.extend(0.0, 4.0, "wait", 1)
    lane.extend(4.0, 10.0, "train", 1)
    assert lane.seconds(3.0, 6.0) == pytest.approx({"wait": 1.0, "train": 2.0})
    assert lane.seconds(20.0, 30.0) == {}


def test_a_lane_holds_only_the_newest() -> None:
    lane = Lane()
    for index in range(5000):
        lane.extend(index, index + 0.5, "generate", index)
    assert len(lane.stretches) == STRETCHES
    assert lane.stretches[-1].tag == 4999
