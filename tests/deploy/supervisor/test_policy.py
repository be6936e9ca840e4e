import pytest

from deploy.supervisor.policy import RestartPolicy, Verdict


def test_a_crash_loop_ends() -> None:
    policy = RestartPolicy(max_restarts=3)
    assert [policy.judge(-9, 1.0) for _ in range(4)] == [Verdict.RESTART] * 3 + [Verdict.GIVE_UP]


def test_a_healthy_minute_forgives_earlier_crashes() -> None:
    policy = RestartPolicy(max_restarts=1)
    for _ in range(10):
        assert policy.judge(1, 61.0) is Verdict.RESTART
    assert policy.judge(1, 1.0) is Verdict.GIVE_UP


def test_the_delay_doubles_up_to_a_limit() -> None:
    policy = RestartPolicy(max_restarts=100)
    delays = []
    for _ in range(8):
        policy.judge(1, 0.0)
        delays.append(policy.delay_s())
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


@pytest.mark.parametrize(("code", "verdict"), [(0, Verdict.DONE), (2, Verdict.GIVE_UP), (3, Verdict.GIVE_UP)])
def test_a_good_end_a_user_error_and_a_superseded_process_are_final(code: int, verdict: Verdict) -> None:
    assert RestartPolicy(max_restarts=5).judge(code, 1.0) is verdict
