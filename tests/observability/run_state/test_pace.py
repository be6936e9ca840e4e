import pytest

from streamrl.observability.run_state.pace import OFTEN_S, SELDOM_S, Pace, ProcessorTime, pace_for, spent_by_all


@pytest.mark.parametrize(
    ("free", "seconds"),
    [(1.0, OFTEN_S), (0.3, OFTEN_S), (0.225, (OFTEN_S + SELDOM_S) / 2), (0.15, SELDOM_S), (0.0, SELDOM_S)],
)
def test_displays_update_less_often_on_busy_processors(free: float, seconds: float) -> None:
    assert pace_for(free) == pytest.approx(seconds)


def test_the_pace_follows_what_was_free_since_it_was_last_measured() -> None:
    now, spent = [0.0], [ProcessorTime(0.0, 0.0)]
    pace = Pace(lambda: spent[0], lambda: now[0])
    assert pace.seconds() == OFTEN_S
    for free, expected in ((0.0, SELDOM_S), (4.0, OFTEN_S)):
        now[0] += 2.0
        spent[0] = ProcessorTime(spent[0].free + free, spent[0].total + 4.0)
        assert pace.seconds() == expected
    now[0] += 0.5
    spent[0] = ProcessorTime(spent[0].free, spent[0].total + 1.0)
    assert pace.seconds() == OFTEN_S


def test_the_machine_counts_its_processors() -> None:
    spent = spent_by_all()
    assert 0 < spent.free <= spent.total
