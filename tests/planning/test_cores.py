import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planning.cores import SharedCores
from streamrl.planning.prediction import CachedPrompts, Prediction, simulate
from streamrl.planning.virtual_time import VirtualLoop, sweeping
from streamrl.producers.prompts.sources import open_source
from streamrl.schemas.profiles import CoreCosts
from streamrl.settings.loading import validated


def ends(costs: CoreCosts, works: Sequence[tuple[float, float]], scale: float = 1.0) -> list[float]:
    """Virtual seconds until each work is done; given as (start, seconds), each on a core of its own if there is one."""

    async def run() -> list[float]:
        loop = asyncio.get_running_loop()
        cores, start = SharedCores(costs, loop.time, scale), loop.time()

        async def work(at: float, seconds: float) -> float:
            await asyncio.sleep(at)
            end = cores.now() + seconds
            cores.compute(object(), 1.0, end)
            while (left := end - cores.now()) > 1e-9:
                await asyncio.sleep(max(left, 1e-6))
            return loop.time() - start

        return await asyncio.gather(*(work(*each) for each in works))

    with sweeping(VirtualLoop()) as loop:
        return loop.run_until_complete(run())


def near(*seconds: float) -> object:
    return pytest.approx(list(seconds), abs=1e-4)


def test_processes_take_turns_if_there_are_more_than_cores() -> None:
    one = CoreCosts(number=1)
    assert ends(one, [(0.0, 1.0)]) == near(1.0)
    assert ends(one, [(0.0, 1.0), (0.0, 1.0)]) == near(2.0, 2.0)
    assert ends(one, [(0.0, 3.0), (0.0, 1.0)]) == near(4.0, 2.0)
    assert ends(one, [(0.0, 3.0), (1.0, 1.0)]) == near(4.0, 3.0)
    assert ends(CoreCosts(number=2), [(0.0, 1.0), (0.0, 2.0)]) == near(1.0, 2.0)
    assert ends(CoreCosts(number=2), [(0.0, 1.0)] * 3) == near(1.5, 1.5, 1.5)


def test_cores_that_are_all_busy_are_slower() -> None:
    costs = CoreCosts(number=2, full_speed=0.5)
    assert ends(costs, [(0.0, 1.0), (0.0, 1.0)]) == near(2.0, 2.0)
    assert ends(costs, [(0.0, 1.0), (0.0, 2.0)]) == near(2.0, 3.0)


def test_what_a_run_always_takes_is_taken_from_all() -> None:
    assert ends(CoreCosts(number=1, cores_per_run=1.0), [(0.0, 1.0)]) == near(2.0)


@given(st.floats(0.1, 64), st.floats(0.1, 1), st.floats(0, 200), st.floats(0, 10))
def test_more_demand_is_never_faster_and_no_core_does_two_seconds_in_one(
    number: float, full_speed: float, demand: float, more: float
) -> None:
    costs = CoreCosts(number=number, full_speed=full_speed)
    assert 0 < costs.speed(demand + more) <= costs.speed(demand) + 1e-12 <= 1 + 1e-12
    assert demand * costs.speed(demand) <= max(number, min(demand, 1.0)) + 1e-9


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 3)), min_size=1, max_size=5), st.sampled_from([1, 2, 3]))
def test_equal_work_takes_the_same_time_in_any_order(works: list[tuple[float, float]], number: int) -> None:
    costs = CoreCosts(number=number, full_speed=0.8)
    found = ends(costs, works)
    assert sorted(found) == pytest.approx(sorted(ends(costs, works[::-1])), abs=1e-3)
    for (start, seconds), end in zip(works, found, strict=True):
        assert end >= start + seconds - 1e-4
    assert max(found) >= sum(seconds for _, seconds in works) / number - 1e-3


def predicted(cores: CoreCosts | None, workers: int = 2) -> Prediction:
    settings = validated(
        {
            "run": {"workers": workers},
            "data": {"dataset": "chain_sum"},
            "loop": {"groups_per_step": 4, "num_generations": 2, "max_completion_length": 400},
            "generation": {"engine": "emulated", "max_num_seqs": 8},
            "training": {"backend": "emulated"},
            "emulation": {
                "time_scale": 1.0,
                "lengths": {"median_tokens": 50.0, "p99_over_median": 6.0},
                "training": {"forward_backward_s_per_token": 1e-3},
            },
        }
    )
    source = CachedPrompts(open_source(settings.data, run_seed=settings.run.seed))
    return simulate(settings, source, steps=8, cores=cores)


def test_free_cores_change_nothing() -> None:
    alone, shared = predicted(None), predicted(CoreCosts(number=8))
    assert shared.step_ends == pytest.approx(alone.step_ends, rel=1e-3)
    assert shared.trainer_busy == pytest.approx(alone.trainer_busy, rel=0.02)


def test_fewer_cores_and_dearer_trajectories_deliver_less() -> None:
    rates = [
        predicted(cores).trajectories_per_s
        for cores in (
            CoreCosts(number=8),
            CoreCosts(number=2),
            CoreCosts(number=2, full_speed=0.7),
            CoreCosts(number=2, full_speed=0.7, cpu_s_per_trajectory=0.05),
            CoreCosts(number=1, full_speed=0.7, cpu_s_per_trajectory=0.05),
        )
    ]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.6 * rates[0]
