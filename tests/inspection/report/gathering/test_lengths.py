import random

import pytest

from streamrl.inspection.report.gathering import Estimated, length_facts


def completions(count: int, *, knows: bool) -> list[Estimated]:
    dice = random.Random(3)
    found = []
    for at in range(count):
        actual = dice.randint(10, 1000)
        found.append(Estimated(float(at), actual if knows else dice.randint(10, 1000), actual, 500))
    return found


def test_knowing_all_recalls_all_and_knowing_nothing_a_fifth() -> None:
    known, guessed = length_facts(completions(4000, knows=True)), length_facts(completions(4000, knows=False))
    assert known is not None
    assert guessed is not None
    assert known.recall == pytest.approx(1.0)
    assert known.factor == pytest.approx(1.0)
    assert guessed.recall == pytest.approx(0.2, abs=0.05)
    assert guessed.constant == pytest.approx(0.2, abs=0.02)
    assert guessed.coverage == pytest.approx(0.5, abs=0.03)
    assert len(guessed.windows) == 16


def test_order_is_judged_within_windows_so_that_drifting_lengths_do_not_count() -> None:
    """Lengths double half-way and the predictor follows, but within either half it says the same for all."""
    dice = random.Random(1)
    drifting = [
        Estimated(float(at), 100 + 100 * (at >= 512), dice.randint(50, 100) + 100 * (at >= 512), None)
        for at in range(1024)
    ]
    found = length_facts(drifting)
    assert found is not None
    assert found.recall == found.constant
    assert found.coverage is None


def test_few_completions_are_one_window_and_none_is_nothing() -> None:
    found = length_facts(completions(70, knows=True))
    assert found is not None
    assert len(found.windows) == 1
    assert length_facts([]) is None


def test_completions_that_ended_together_need_no_order_though_of_some_the_estimate_is_not_known() -> None:
    twins = [Estimated(1.0, 100, 90, upper) for upper in (None, 120, None, 80)]
    found = length_facts(twins)
    assert found is not None
    assert found.count == 4
    assert found.coverage == 0.5
