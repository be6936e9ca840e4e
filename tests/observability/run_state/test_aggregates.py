import pytest

from streamrl.observability.run_state.aggregates import (
    CLASSES,
    EVENTS_KEPT,
    FADE_EVERY,
    FATES_KEPT,
    INTERVALS,
    MARKS_KEPT,
    Curves,
    EventLog,
    Interval,
    LengthCalibration,
    Rate,
    StalenessHistogram,
    Track,
    TrajectoryFates,
    length_class,
)


def test_a_rate_is_the_mean_of_its_window_and_fades_when_nothing_comes() -> None:
    rate = Rate(window_s=5.0)
    for index in range(500):
        rate.add(1000.0 + index / 100)
    assert rate.per_s(1005.0) == pytest.approx(100, rel=0.03)
    assert rate.per_s(1007.5) == pytest.approx(50, rel=0.06)
    assert rate.per_s(1020.0) == 0
    assert rate.total == 500


def test_every_aggregate_is_bounded_and_late_arrivals_count() -> None:
    rate = Rate(window_s=2.0)
    for index in range(10_000):
        rate.add(1000.0 + index)
        rate.add(900.0)
    assert len(rate._slots) <= 21
    assert rate.per_s(10_999.0) == pytest.approx(2.0)


def test_repeats_are_counted_and_the_log_is_bounded() -> None:
    log = EventLog()
    for index in range(1000):
        log.add(100.0 + index / 1000, "warn", "skipped")
    assert [(event.text, event.times) for event in log.events] == [("skipped", 1000)]
    for index in range(1000):
        log.add(200.0, "info", f"event {index}")
    assert len(log.events) == EVENTS_KEPT
    assert log.events[-1].number == 1001


def test_events_are_in_the_order_of_time_however_they_come() -> None:
    log = EventLog()
    for at in (3.0, 1.0, 9.0, 2.0):
        log.add(at, "info", f"at {at:.0f}")
    assert [event.text for event in log.events] == ["at 1", "at 2", "at 3", "at 9"]


def test_marks_of_curves_are_bounded_and_stand_at_the_step_that_was_the_newest() -> None:
    log = EventLog()
    for step in range(MARKS_KEPT + 5):
        log.step = step
        log.add(float(step), "info", f"event {step}", mark="promotion")
    assert [mark.step for mark in log.marks] == list(range(5, MARKS_KEPT + 5))
    assert log.marks[-1][1:] == (float(MARKS_KEPT + 4), "promotion", f"event {MARKS_KEPT + 4}")


def test_the_last_point_of_a_curve_is_the_newest_step_and_no_mean() -> None:
    curves = Curves(("reward",), most=4)
    for step in range(1, 60):
        curves.add(step, {"reward": float(step)})
        assert curves.columns()["reward"][-1] == step
        steps = [at for at in curves.columns()["step"] if at is not None]
        assert steps == sorted(set(steps))


def test_neighbours_are_joined_so_that_all_of_the_past_stays_in_view() -> None:
    curves = Curves(("reward",), most=10)
    for step in range(1, 1001):
        curves.add(step, {"reward": float(step)})
    columns = curves.columns()
    assert len(columns["step"]) <= 12
    assert columns["step"][-1] == 1000
    assert (columns["reward"][0] or 0) < 200
    assert columns["reward"] == sorted(columns["reward"], key=lambda value: value or 0)


def test_steps_taken_again_replace_the_lost_ones() -> None:
    curves = Curves(("reward",))
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 9.0)):
        curves.add(step, {"reward": reward})
    assert curves.columns() == {"step": [1.0, 2.0], "reward": [0.1, 9.0]}


def test_a_metric_that_a_step_lacks_is_a_gap() -> None:
    curves = Curves(("reward", "loss"))
    curves.add(1, {"reward": 1.0})
    assert curves.columns()["loss"] == [None]


def test_ages_are_those_of_the_trajectories_seen() -> None:
    fates = TrajectoryFates()
    fates.arrived((0, 1), 4)
    fates.arrived((0, 2), 6)
    assert list(fates.trained([(0, 1), (0, 2), (9, 9)], step=8, base=7)) == [3, 1]
    assert fates.of((0, 1)) == "trained in step 8"
    assert fates.of((5, 5)) == "waiting"
    assert fates.of((5, 5), over=True) == "left over"
    assert fates.of((0, 1), over=True) == "trained in step 8"


def test_the_oldest_are_forgotten() -> None:
    fates = TrajectoryFates()
    for offset in range(FATES_KEPT + 50):
        fates.arrived((0, offset), 1)
        fates.settle((0, offset), "skipped: stale")
    assert len(fates.oldest_version) == len(fates.fates) == FATES_KEPT
    assert fates.of((0, 0)) == "waiting"


def test_lengths_fall_into_two_classes_a_doubling() -> None:
    assert [length_class(tokens) for tokens in (0, 1, 2, 4, 1024)] == [0, 0, 2, 4, 20]
    assert length_class(1 << 60) == CLASSES - 1


def test_the_share_of_close_predictions() -> None:
    calibration = LengthCalibration()
    for predicted, actual in ((100, 100), (140, 100), (100, 200), (0, 0)):
        calibration.add(predicted, actual)
    assert calibration.close_share == 0.75
    assert LengthCalibration().close_share is None


def test_old_counts_fade() -> None:
    calibration, staleness = LengthCalibration(), StalenessHistogram()
    for _ in range(100_000):
        calibration.add(10, 10)
    staleness.add([2] * 100_000)
    assert calibration.count < 50_000
    assert sum(staleness.counts.values()) == pytest.approx(50_000)
    staleness.add([-1, 10_000])
    assert set(staleness.counts) == {0, 2, CLASSES - 1}


def test_intervals_of_a_kind_join_and_others_follow_without_overlap() -> None:
    track = Track()
    track.extend(0.0, 1.0, "generate", 1)
    track.extend(0.5, 2.0, "generate", 1)
    track.extend(1.5, 3.0, "generate", 2)
    track.extend(5.0, 6.0, "generate", 2)
    track.extend(0.1, 0.2, "generate", 1)
    assert list(track.intervals) == [
        Interval(0.0, 2.0, "generate", 1),
        Interval(2.0, 3.0, "generate", 2),
        Interval(5.0, 6.0, "generate", 2),
    ]


def test_seconds_count_what_lies_within() -> None:
    track = Track()
    track.extend(0.0, 4.0, "wait", 1)
    track.extend(4.0, 10.0, "train", 1)
    assert track.seconds(3.0, 6.0) == pytest.approx({"wait": 1.0, "train": 2.0})
    assert track.seconds(20.0, 30.0) == {}


def test_a_track_holds_only_the_newest() -> None:
    track = Track()
    for index in range(5000):
        track.extend(index, index + 0.5, "generate", index)
    assert len(track.intervals) == INTERVALS
    assert track.intervals[-1].tag == 4999


def test_counts_that_are_to_be_exact_do_not_fade() -> None:
    calibration, staleness = LengthCalibration(fade_every=None), StalenessHistogram(fade_every=None)
    for _ in range(FADE_EVERY + 1):
        calibration.add(10, 10)
    staleness.add([2] * (FADE_EVERY + 1))
    assert calibration.count == staleness.counts[2] == FADE_EVERY + 1
