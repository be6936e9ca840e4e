from observability.run_state.aggregates import Curves


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
