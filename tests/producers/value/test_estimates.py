import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.producers.value.estimates import (
    HALF_STEPS,
    LEAST_GROUPS,
    LEAST_PROBABILITY,
    PromptValues,
    alike_name,
    beta_of,
    closeness,
    equal_chance,
    ordering_probability,
)
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import OrderingChance, Prompt, Trajectory
from tests.fakes import messages

SAMPLES = 4


def prompt(number: int, dataset: str = "d", text: str = "question") -> Prompt:
    return Prompt(prompt_id=f"{dataset}/{number}", dataset=dataset, content=text)


def group(
    number: int,
    rewards: Sequence[float | None],
    *,
    data_pass: int = 0,
    step: int = 0,
    chance: OrderingChance | None = None,
) -> list[Trajectory]:
    """All samples of a prompt's group in one pass over the data."""
    return [
        messages.trajectory(
            f"d/{number}/{data_pass}",
            index,
            1,
            version=PolicyVersion(1, step),
            num_generations=len(rewards),
            rewards={"exact": reward},
            chance=chance,
        )
        for index, reward in enumerate(rewards)
    ]


def values(*groups: Iterable[Trajectory], seed: int = 0, run: str = "") -> PromptValues:
    found = PromptValues({}, SAMPLES, seed)
    for samples in groups:
        for sample in samples:
            found.observe(sample, run)
    return found


def chance_of(known: PromptValues, number: int, step: int = 0, text: str = "question") -> OrderingChance:
    """What an order for this prompt would carry."""
    chance = known.decide(0, prompt(number, text=text), step).chance
    assert chance is not None
    return chance


def mixed(first: int, count: int = LEAST_GROUPS) -> list[list[Trajectory]]:
    """Groups of so many other prompts: half all wrong, half half right."""
    return [group(first + n, (0.0, 0.0, n % 2, n % 2)) for n in range(count)]


REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0, None]), min_size=SAMPLES, max_size=SAMPLES)
GROUPS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 300), REWARDS), max_size=60)
Drawn = list[tuple[int, int, int, list[float | None]]]


def samples_of(drawn: Drawn) -> list[Trajectory]:
    """Each of these groups once."""
    unique = {(number, data_pass): (step, rewards) for number, data_pass, step, rewards in drawn}
    chances = [None, OrderingChance(probability=0.05, zero_advantage=0.9, alike="d/13")]
    return [
        sample
        for (number, data_pass), (step, rewards) in unique.items()
        for sample in group(number, rewards, data_pass=data_pass, step=step, chance=chances[number % 2])
    ]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(GROUPS, st.integers(0, 400))
def test_every_prompt_keeps_a_chance(drawn: Drawn, step: int) -> None:
    failed = [group(7, (0.0,) * SAMPLES, data_pass=number, step=step) for number in range(4)]
    known = values(*mixed(100), *failed, samples_of(drawn))
    for number in range(8):
        chance = chance_of(known, number, step)
        assert LEAST_PROBABILITY <= chance.probability <= 1.0
        assert 0.0 <= chance.zero_advantage <= 1.0


def test_a_prompt_that_failed_in_every_group_is_ordered_with_the_least_probability() -> None:
    failed = [group(1, (0.0,) * SAMPLES, data_pass=number) for number in range(4)]
    known = values(*mixed(100), *failed)
    decisions = [known.decide(position, prompt(1), 0) for position in range(4000)]
    assert {one.chance.probability for one in decisions if one.chance} == {LEAST_PROBABILITY}
    assert sum(one.is_ordered for one in decisions) == pytest.approx(4000 * LEAST_PROBABILITY, rel=0.25)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(GROUPS, st.integers(0, 1 << 30), st.integers(0, 5))
def test_recorded_probability_decides(drawn: Drawn, position: int, seed: int) -> None:
    known = values(*mixed(100), samples_of(drawn), seed=seed)
    decision = known.decide(position, prompt(3), 10)
    assert decision.chance is not None
    assert decision.is_ordered == (random.Random(f"{seed}/{position}").random() < decision.chance.probability)


def test_the_share_of_positions_that_are_ordered_is_the_recorded_probability() -> None:
    known = values(*mixed(100), group(1, (0.0, 0.0, 0.0, 0.0)))
    decisions = [known.decide(position, prompt(1), 0) for position in range(4000)]
    probability = decisions[0].chance.probability if decisions[0].chance else 0.0
    assert 0.05 < probability < 0.9
    assert sum(one.is_ordered for one in decisions) / 4000 == pytest.approx(probability, abs=0.03)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(GROUPS, st.randoms(use_true_random=False))
def test_decisions_depend_on_samples_alone(drawn: Drawn, shuffle: random.Random) -> None:
    samples = [sample for one in mixed(100) for sample in one] + samples_of(drawn)
    again = samples + samples[::2] + samples[:20]
    shuffle.shuffle(again)
    first, second = values(samples), values(again)
    for number in range(6):
        one, other = (known.decide(number, prompt(number), 50) for known in (first, second))
        assert one.is_ordered == other.is_ordered
        assert one.chance is not None
        assert other.chance is not None
        # The sums of neighbours are floating-point sums in the order of arrival.
        assert one.chance.probability == pytest.approx(other.chance.probability, rel=1e-9)


def test_every_prompt_is_ordered_until_enough_groups_are_known() -> None:
    known = values(*mixed(100, LEAST_GROUPS - 1))
    decision = known.decide(0, prompt(100), 0)
    assert decision.is_ordered
    assert decision.chance is not None
    assert decision.chance.probability == 1.0


def test_a_prompt_with_both_successes_and_failures_is_ordered_more_often_than_others() -> None:
    known = values(
        *mixed(100), group(1, (1.0,) * SAMPLES), group(2, (0.0, 1.0, 0.0, 1.0)), group(3, (0.0, 0.0, 0.0, 0.0))
    )
    right, both, wrong = (chance_of(known, number) for number in (1, 2, 3))
    assert both.probability > 1.5 * right.probability
    assert both.probability > 1.5 * wrong.probability
    assert both.zero_advantage < min(right.zero_advantage, wrong.zero_advantage)


def test_a_new_prompt_is_judged_by_those_that_are_alike() -> None:
    long = alike_name(prompt(0, text="q" * 200))
    hard = OrderingChance(probability=1.0, zero_advantage=0.5, alike=long)
    known = values(*mixed(100), *(group(number, (0.0,) * SAMPLES, chance=hard) for number in range(40)))
    short, of_long = chance_of(known, 90), chance_of(known, 91, text="r" * 205)
    assert of_long.alike == long
    assert of_long.zero_advantage > short.zero_advantage + 0.1


def test_groups_that_were_unlikely_to_be_ordered_count_as_much_as_the_others() -> None:
    rare = OrderingChance(probability=0.1, zero_advantage=0.9, alike="")
    ordered = [group(number, (0.0, 1.0, 0.0, 1.0)) for number in range(40)]
    hard = [group(100 + number, (0.0,) * SAMPLES, chance=rare) for number in range(4)]
    chance = chance_of(values(*ordered, *hard), 999)
    # 4 groups that stand for 40 are half of all.
    assert chance.zero_advantage == pytest.approx(0.5, abs=0.1)


def test_an_earlier_runs_groups_count_as_this_runs_do() -> None:
    failed = [group(1, (0.0,) * SAMPLES, data_pass=number) for number in range(4)]
    now, earlier = values(*mixed(100), *failed), values(*mixed(100), *failed, run="earlier")
    assert now.decide(7, prompt(1), 0) == earlier.decide(7, prompt(1), 0)


def test_groups_of_the_same_name_in_two_runs_are_two_groups() -> None:
    known = values(*mixed(100), group(1, (0.0, 1.0, 0.0, 1.0)), run="earlier")
    before = chance_of(known, 1)
    for sample in group(1, (0.0, 0.0, 0.0, 0.0)):
        known.observe(sample)
    after = chance_of(known, 1)
    assert after.zero_advantage > before.zero_advantage


def test_rewards_that_are_equal_count_as_without_advantage_wherever_they_lie() -> None:
    # The data set's rewards lie between 0 and 1; these are equal and in the middle.
    known = values(*mixed(100), group(1, (0.4,) * SAMPLES), group(2, (0.3, 0.5, 0.4, 0.4)))
    equal, near = chance_of(known, 1), chance_of(known, 2)
    assert equal.zero_advantage > near.zero_advantage


def test_rewards_on_another_scale_give_the_same_decisions() -> None:
    def scaled(samples: list[Trajectory]) -> list[Trajectory]:
        return [one.replace(rewards={"exact": 40.0 - 60.0 * (one.rewards["exact"] or 0.0)}) for one in samples]

    groups = [*mixed(100), group(1, (0.0, 0.0, 0.0, 1.0))]
    plain, other = values(*groups), values(*map(scaled, groups))
    one, two = chance_of(plain, 1), chance_of(other, 1)
    assert one.zero_advantage == pytest.approx(two.zero_advantage)


def test_a_group_counts_less_the_more_steps_have_passed() -> None:
    assert closeness(0) == 1.0
    assert closeness(HALF_STEPS) == closeness(-HALF_STEPS) == 0.5
    known = values(*mixed(100), group(1, (0.0,) * SAMPLES))
    soon, late = chance_of(known, 1, 1), chance_of(known, 1, 500)
    assert soon.zero_advantage > late.zero_advantage


def test_groups_whose_rewards_failed_and_requests_are_not_counted() -> None:
    requests = [one.replace(source="request") for one in group(2, (0.0,) * SAMPLES)]
    known = values(group(1, (None, None, None, 1.0)), requests)
    assert known.prompts == 0


@pytest.mark.parametrize(("mean", "equal"), [(0.5, 0.5), (0.1, 0.8), (0.9, 0.7), (0.3, 0.4)])
def test_a_prior_has_the_mean_and_the_share_of_equal_groups_that_were_seen(mean: float, equal: float) -> None:
    right, wrong = beta_of(mean, equal, 8)
    assert right / (right + wrong) == pytest.approx(mean)
    assert equal_chance(right, wrong, 8) == pytest.approx(equal, abs=0.01)


def test_equal_chance_is_that_of_a_beta_binomial() -> None:
    # Beta(1, 1) makes every number of successes equally likely.
    assert equal_chance(1.0, 1.0, 4) == pytest.approx(2 / 5)
    assert equal_chance(1e6, 1e6, 3) == pytest.approx(0.25, abs=1e-4)


def test_prompts_are_compared_with_each_other() -> None:
    assert ordering_probability(0.2, 0.2) == 1.0
    assert ordering_probability(0.1, 0.2) == 0.25
    assert ordering_probability(0.0, 0.9) == LEAST_PROBABILITY
