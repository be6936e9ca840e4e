"""Seeds make plans: always the same ones, and all faults in turn."""

from tests.chaos.faults.schedule import BY_NAME, FAULTS, plan_of, plans
from tests.chaos.runs.setting import MAX_STEPS


def test_the_same_seed_always_makes_the_same_plan() -> None:
    assert [str(plan_of(seed)) for seed in range(50)] == [str(plan_of(seed)) for seed in range(50)]
    assert len({str(plan_of(seed)) for seed in range(200)}) == 200


def test_as_many_seeds_as_there_are_faults_cover_all_of_them() -> None:
    assert {plan.fault.name for plan in plans(len(FAULTS))} == set(BY_NAME)
    assert len(BY_NAME) == len(FAULTS)


def test_every_event_comes_while_the_run_is_under_way() -> None:
    for seed in range(200):
        for event in plan_of(seed).events:
            assert 3 <= event.at_step < MAX_STEPS
            assert event.target in event.fault.targets
            assert event.fault.lasts[0] <= event.lasts_s <= event.fault.lasts[1]


def test_a_plan_names_the_command_that_repeats_it() -> None:
    plan = plan_of(7, "broker-kill")
    assert "--only broker-kill --seed 7" in plan.command
    assert plan_of(7, "broker-kill") == plan
