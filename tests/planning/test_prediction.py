from pathlib import Path
from typing import Any

import pytest

from streamrl.planning import planner
from streamrl.planning.planner import Demand, Planner, Site, best_of, lines
from streamrl.planning.prediction import Prediction, StageEstimate, predict
from streamrl.producers.prompts.sources import open_source
from streamrl.schemas.profiles import DecodeSettings, DeviceProfile, TrainingCosts
from streamrl.settings.loading import validated
from streamrl.settings.tree import Settings


def settings(mode: str = "trajectory_async", strategy: str = "lpt", *, train_s: float = 1e-5, **loop: Any) -> Settings:
    return validated(
        {
            "run": {"workers": 2},
            "data": {"dataset": "chain_sum"},
            "loop": {"mode": mode, "groups_per_step": 4, "num_generations": 2, "max_completion_length": 4000}
            | ({"max_staleness": 4} if mode == "trajectory_async" else {})
            | loop,
            "lengths": {"predictor": "trace"},
            "dispatch": {"strategy": strategy},
            "generation": {"engine": "emulated", "max_num_seqs": 4},
            "training": {"backend": "emulated"},
            "batching": {"token_budget": 512},
            "emulation": {
                "time_scale": 1.0,
                "lengths": {"median_tokens": 200.0, "p99_over_median": 6.0, "max_tokens": 4000},
                "training": {"forward_backward_s_per_token": train_s},
            },
        }
    )


@pytest.fixture(autouse=True)
def _short_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "STEPS", 3)


def test_equal_settings_give_equal_simulations() -> None:
    assert predict(settings(), steps=4) == predict(settings(), steps=4)


def test_prompts_that_are_computed_once_take_their_time_once() -> None:
    """Both in the simulation and in the estimate that chooses what to simulate."""
    separate = settings("synchronous", train_s=1e-3, groups_per_step=2, num_generations=8)
    separate = separate.model_copy(update={"training": separate.training.model_copy(update={"packing": "varlen"})})
    shared = separate.model_copy(update={"training": separate.training.model_copy(update={"packing": "shared"})})
    assert predict(shared, steps=2).step_s < predict(separate, steps=2).step_s
    source = open_source(separate.data, run_seed=separate.run.seed)
    one, other = (StageEstimate(each, source, 2).training_s(1) for each in (separate, shared))
    assert other < one


def test_a_step_takes_no_less_than_its_busier_stage() -> None:
    """Generation: all tokens at the rate of full batches, on two workers with four slots."""
    found = predict(settings(), steps=6)
    tokens = found.tokens_per_s * found.step_s * (found.steps - found.warm_up)
    assert tokens <= found.step_ends[-1] * 2 * 4 / (0.01 * (1 + 4 / 64))
    assert found.step_s * found.trajectories_per_s == pytest.approx(8)
    trained = predict(settings(train_s=1e-2, groups_per_step=8), steps=4)
    assert trained.trainer_busy > 0.9
    assert trained.tokens_per_s < 100.0


def test_modes_that_overlap_more_deliver_more() -> None:
    rates = {
        mode: predict(settings(mode, train_s=7e-4), steps=10).trajectories_per_s
        for mode in ("synchronous", "stream", "one_step_async", "trajectory_async")
    }
    assert rates["synchronous"] < rates["stream"] <= 1.02 * rates["one_step_async"]
    assert rates["one_step_async"] <= 1.05 * rates["trajectory_async"]


@pytest.mark.parametrize("siblings", [1, 2])
@pytest.mark.parametrize(("mode", "bound"), [("synchronous", 0), ("stream", 0), ("one_step_async", 1)])
def test_no_predicted_token_is_older_than_the_mode_allows(mode: str, bound: int, siblings: int) -> None:
    assert predict(settings(mode, num_generations=siblings), steps=5).max_staleness <= bound


def test_no_predicted_token_is_older_than_max_staleness() -> None:
    assert predict(settings(max_staleness=3, train_s=1e-3), steps=8).max_staleness <= 3


def test_longest_first_ends_a_synchronous_batch_earlier_than_round_robin() -> None:
    longest_first = predict(settings("synchronous", "lpt"), steps=4).step_s
    assert longest_first < predict(settings("synchronous", "round_robin"), steps=4).step_s


def test_a_plan_gives_the_longer_stage_more_devices() -> None:
    heavy = Planner(Demand(settings(train_s=5e-3), Site(3, price=2.0), most_trainers=None)).choices(
        ["trajectory_async"]
    )[0]
    light = Planner(Demand(settings(train_s=1e-6), Site(3, price=2.0))).choices(["trajectory_async"])[0]
    assert heavy.split.trainers > light.split.trainers == 1
    assert light.cost == pytest.approx(1e6 / light.prediction.trajectories_per_s * (light.split.workers + 1) * 2 / 3600)


def test_a_slow_link_costs_synchronous_steps_and_not_asynchronous_ones() -> None:
    profile = DeviceProfile(
        device="cheap", model="m", engine="vllm", max_num_seqs=4, decode=DecodeSettings(), training=TrainingCosts()
    )
    near = Demand(settings(), Site(3, profile, 1.0), Site(2, profile, 2.85))
    far = Demand(settings(), Site(3, profile, 1.0), Site(2, profile, 2.85), link_gbps=80.0, weights_gb=20.0)

    def rate(demand: Demand, mode: Any) -> float:
        return Planner(demand).choices([mode])[0].prediction.trajectories_per_s

    assert rate(far, "synchronous") < 0.95 * rate(near, "synchronous")
    assert rate(far, "trajectory_async") > 0.9 * rate(near, "trajectory_async")


@pytest.mark.processes
def test_the_advice_is_the_least_stale_of_the_best_and_reads_as_settings(tmp_path: Path) -> None:
    demand = Demand(settings(train_s=7e-4), Site(3))
    choices = Planner(demand).choices()
    best = best_of(choices)
    assert best.prediction.trajectories_per_s >= 0.96 * max(choice.prediction.trajectories_per_s for choice in choices)
    text = "\n".join(lines(demand, choices))
    assert f'mode = "{best.mode}"' in text
    assert f"workers = {best.split.workers}" in text
    assert isinstance(best.prediction, Prediction)


def test_recorded_lengths_take_the_place_of_emulated_ones() -> None:
    (choice,) = Planner(Demand(settings(), Site(2), recorded=[100, 100, 100])).choices(["synchronous"])
    assert choice.prediction.tokens_per_s == pytest.approx(100 * choice.prediction.trajectories_per_s)


def test_a_large_pipeline_is_simulated_in_part_and_the_output_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MOST_TRAJECTORIES", 24)
    demand = Demand(settings("synchronous", groups_per_step=48), Site(6))
    (choice,) = Planner(demand).choices(["synchronous"])
    assert 0 < choice.simulated_share < 1
    # Per step all groups of the whole are trained, and not those of the part.
    per_step = choice.prediction.trajectories_per_s * choice.prediction.step_s
    assert per_step == pytest.approx(48 * 2)
    text = "\n".join(lines(demand, [choice]))
    assert f"simulated with {choice.simulated_share:.0%} of the workers" in text


def test_only_what_a_trainer_can_use_is_recommended() -> None:
    demand = Demand(settings(train_s=1e-2), Site(4), most_trainers=1)
    (choice,) = Planner(demand).choices(["trajectory_async"])
    assert choice.split.trainers == 1
    assert "devices are not needed (a trainer may use 1)" in "\n".join(lines(demand, [choice]))
    assert "ranks" not in "\n".join(lines(demand, [choice]))
    apart = Demand(settings(train_s=1e-2), Site(2), Site(3))
    (choice,) = Planner(apart).choices(["stream"])
    assert choice.split.trainers == 3
    assert "[training]\nranks = 3" in "\n".join(lines(apart, [choice]))
