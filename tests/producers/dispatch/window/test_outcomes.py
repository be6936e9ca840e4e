from producers.dispatch.window import Outcomes


def test_a_window_is_over_with_its_last_group() -> None:
    outcomes = Outcomes()
    outcomes.begin(["a", "b"], 10.0)
    outcomes.planned(5.0)
    outcomes.planned(9.0)
    outcomes.begin(["c"], 12.0)
    outcomes.over("a", 13.0)
    outcomes.over("a", 14.0)
    before = outcomes.actual_s
    outcomes.over("b", 16.0)
    assert (before, outcomes.predicted_s, outcomes.actual_s) == (None, 5.0, 6.0)
    outcomes.over("never begun", 17.0)
