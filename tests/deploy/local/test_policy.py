from functools import partial

import pytest

from streamrl.deploy.local.supervisor import RestartDecision, RestartPolicy


def test_a_crash_loop_ends() -> None:
    policy = RestartPolicy(max_restarts=3)
    assert [policy.decide(-9, 1.0) for _ in range(4)] == [RestartDecision.RESTART] * 3 + [RestartDecision.GIVE_UP]


def test_a_healthy_minute_clears_earlier_crashes() -> None:
    policy = RestartPolicy(max_restarts=1)
    for _ in range(10):
        assert policy.decide(1, 61.0) is RestartDecision.RESTART
    assert policy.decide(1, 1.0) is RestartDecision.GIVE_UP


def test_the_delay_doubles_up_to_a_limit() -> None:
    policy = RestartPolicy(max_restarts=100, rng=lambda: 0.5)
    delays = []
    for _ in range(8):
        policy.decide(1, 0.0)
        delays.append(policy.delay_s())
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


def test_the_delay_is_a_quarter_more_or_less_at_random() -> None:
    for draw, factor in ((0.0, 0.75), (1.0, 1.25)):
        policy = RestartPolicy(max_restarts=1, rng=partial(float, draw))
        policy.decide(1, 0.0)
        assert policy.delay_s() == 0.5 * factor


@pytest.mark.parametrize(
    ("code", "decision"),
    [
        (0, RestartDecision.DONE),
        (2, RestartDecision.GIVE_UP),
        (3, RestartDecision.GIVE_UP),
        (4, RestartDecision.GIVE_UP),
        (5, RestartDecision.GIVE_UP),
        (70, RestartDecision.RESTART),
    ],
)
def test_a_good_end_a_user_error_a_superseded_process_and_refused_loss_are_final(
    code: int, decision: RestartDecision
) -> None:
    assert RestartPolicy(max_restarts=5).decide(code, 1.0) is decision


def test_a_superseded_process_stays_away() -> None:
    policy = RestartPolicy(max_restarts=5)
    assert policy.decide(-9, 100.0) is RestartDecision.RESTART
    assert policy.decide(3, 100.0) is RestartDecision.GIVE_UP


def test_the_first_fence_of_a_process_that_is_there_once_is_doubted_the_second_is_not() -> None:
    policy = RestartPolicy(max_restarts=0, rng=lambda: 0.5, doubts_first_fence=True)
    assert policy.decide(3, 100.0) is RestartDecision.RESTART
    assert policy.delay_s() >= 6.0
    assert policy.decide(3, 10.0) is RestartDecision.GIVE_UP
    assert policy.decide(3, 100.0) is RestartDecision.RESTART


def test_a_user_error_after_the_first_start_is_restarted() -> None:
    policy = RestartPolicy(max_restarts=2, rng=lambda: 0.5)
    assert policy.decide(1, 1.0) is RestartDecision.RESTART
    assert policy.decide(2, 1.0) is RestartDecision.RESTART
    assert policy.delay_s() >= 6.0
    assert policy.decide(2, 1.0) is RestartDecision.GIVE_UP
