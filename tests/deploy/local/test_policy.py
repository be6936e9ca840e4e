import pytest

from deploy.local.supervisor import RestartPolicy, Verdict


def test_a_crash_loop_ends() -> None:
    policy = RestartPolicy(max_restarts=3)
    assert [policy.judge(-9, 1.0) for _ in range(4)] == [Verdict.RESTART] * 3 + [Verdict.GIVE_UP]


def test_a_healthy_minute_forgives_earlier_crashes() -> None:
    policy = RestartPolicy(max_restarts=1)
    for _ in range(10):
        assert policy.judge(1, 61.0) is Verdict.RESTART
    assert policy.judge(1, 1.0) is Verdict.GIVE_UP


def test_the_delay_doubles_up_to_a_limit() -> None:
    policy = RestartPolicy(max_restarts=100, chance=lambda: 0.5)
    delays = []
    for _ in range(8):
        policy.judge(1, 0.0)
        delays.append(policy.delay_s())
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


def test_the_delay_is_a_quarter_more_or_less_by_chance() -> None:
    for chance, factor in ((0.0, 0.75), (1.0, 1.25)):
        policy = RestartPolicy(max_restarts=1, chance=lambda chance=chance: chance)
        policy.judge(1, 0.0)
        assert policy.delay_s() == 0.5 * factor


@pytest.mark.parametrize(
    ("code", "verdict"),
    [(0, Verdict.DONE), (2, Verdict.GIVE_UP), (3, Verdict.GIVE_UP), (4, Verdict.GIVE_UP), (70, Verdict.RESTART)],
)
def test_a_good_end_a_user_error_a_superseded_process_and_refused_loss_are_final(code: int, verdict: Verdict) -> None:
    assert RestartPolicy(max_restarts=5).judge(code, 1.0) is verdict


def test_a_superseded_process_stays_away() -> None:
    policy = RestartPolicy(max_restarts=5)
    assert policy.judge(-9, 100.0) is Verdict.RESTART
    assert policy.judge(3, 100.0) is Verdict.GIVE_UP


def test_what_looks_like_a_user_error_in_a_later_life_may_pass() -> None:
    policy = RestartPolicy(max_restarts=2, chance=lambda: 0.5)
    assert policy.judge(1, 1.0) is Verdict.RESTART
    assert policy.judge(2, 1.0) is Verdict.RESTART
    assert policy.delay_s() >= 6.0
    assert policy.judge(2, 1.0) is Verdict.GIVE_UP
