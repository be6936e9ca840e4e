from streamrl.producers.dispatch.progress import PlanAccuracy


def test_a_window_is_over_with_its_last_group() -> None:
    accuracy = PlanAccuracy()
    accuracy.begin(["a", "b"], 10.0)
    accuracy.planned(5.0)
    accuracy.planned(9.0)
    accuracy.begin(["c"], 12.0)
    accuracy.over("a", 13.0)
    accuracy.over("a", 14.0)
    before = accuracy.actual_s
    accuracy.over("b", 16.0)
    assert (before, accuracy.predicted_s, accuracy.actual_s) == (None, 5.0, 6.0)
    accuracy.over("never begun", 17.0)
