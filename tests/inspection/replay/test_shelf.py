"""Replay and what-if over algorithms with a critic, pairs, a teacher and several updates a step."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamrl.consumers.algorithms.settings import PRESETS, AlgorithmSettings
from streamrl.inspection.replay.command import WhatIfOptions, variation_of
from streamrl.inspection.replay.scratch_policy import StepConfig
from streamrl.schemas.errors import SettingsError, UserError
from streamrl.settings.tree import Settings
from tests.consumers.training.factories import save_tiny_model
from tests.inspection.replay.recorded_run import KEPT, Recorded, record, usual_groups

STEPS = 4
CRITIC = {"learning_rate": 1e-2}
SHELF: dict[str, dict[str, Any]] = {
    "ppo, own critic": {"name": "ppo", "critic": {**CRITIC, "trunk": "own"}},
    "ppo, epochs": {"name": "ppo", "num_iterations": 2, "num_mini_batches": 2, "critic": CRITIC},
    "dpo": {"name": "dpo"},
    "distillation": {"name": "distillation"},
    "decoupled": {"ratio": "proximal", "num_iterations": 2, "num_mini_batches": 2, "beta": 0.1},
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("teacher"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Recorded:
    """One of GRPO, for the tests that only look at it."""
    return asyncio.run(record(tmp_path_factory.mktemp("run"), model_path, usual_groups(STEPS)))


def settings_of(name: str, teacher: Path) -> AlgorithmSettings:
    own = {"teacher": {"path": str(teacher)}} if name == "distillation" else {}
    return AlgorithmSettings.model_validate(SHELF[name] | own)


@pytest.mark.parametrize("name", SHELF)
async def test_every_step_of_a_run_with_a_crash_in_it_replays_bit_equal(
    tmp_path: Path, model_path: Path, teacher: Path, name: str
) -> None:
    training = KEPT.model_copy(update={"checkpoint_every": 2})
    settings = settings_of(name, teacher)
    run = await record(tmp_path, model_path, usual_groups(STEPS), crash_at=3, algorithm=settings, training=training)
    found = await run.replays(1, STEPS)
    assert [each.rebuilt.verdict for each in found] == ["bit-equal"] * STEPS
    assert [each.rebuilt.version for each in found] == ["1-1", "1-2", "2-3", "2-4"]
    assert all(pair.equal for each in found for pair in each.rebuilt.metrics)
    names = {tensor.name for tensor in found[-1].rebuilt.tensors}
    assert ("critic.head" in names) == settings.name.startswith("ppo")
    # The last step by itself: its critic comes out of the checkpoint before it.
    (last,) = await run.replays(STEPS, STEPS)
    assert (last.rebuilt.verdict, last.rebuilt.start) == ("bit-equal", "checkpoint 1-2")
    is_separable = name == "distillation"
    assert bool(last.rebuilt.rows) == is_separable
    if is_separable:
        shares = sum(row.loss for row in last.rebuilt.rows)
        assert shares == pytest.approx(last.rebuilt.metric("loss").rebuilt, abs=1e-5)
    else:
        with pytest.raises(UserError, match="whose gradient is a sum over trajectories"):
            await run.replays(STEPS, STEPS, row_gradients=True)


@pytest.mark.parametrize("name", PRESETS)
async def test_a_what_if_takes_any_algorithm_of_the_shelf(run: Recorded, teacher: Path, name: str) -> None:
    """As `streamrl replay --step 4 --set algorithm.name=…` asks for it."""
    changes = [f"algorithm.name={name}"]
    if name == "distillation":
        changes.append(f"algorithm.teacher.path={teacher}")
    settings = Settings.model_validate({"data": {"path": "prompts.jsonl"}, "model": {"path": "model"}})
    variation = variation_of(WhatIfOptions(tuple(changes)), settings, run.config())
    assert variation is not None
    assert variation.config.algorithm.name == name
    (found,) = await run.replays(STEPS, STEPS, variation=variation)
    assert found.rebuilt.verdict == "bit-equal"
    assert found.what_if is not None
    assert found.what_if.problem == ""
    assert found.what_if.update is not None
    assert found.what_if.update.what_if > 0.0
    # What these two change of GRPO is nothing to this step: no group of equal rewards is in it.
    assert (found.what_if.update.cosine < 0.999) == (name not in ("grpo", "dapo"))


def test_a_what_if_that_lacks_a_teacher_is_one_line() -> None:
    settings = Settings.model_validate({"data": {"path": "prompts.jsonl"}, "model": {"path": "model"}})
    config = StepConfig(settings.algorithm, settings.training, 8, "model")
    wanted = WhatIfOptions(("algorithm.name=distillation",))
    with pytest.raises(SettingsError, match=r"algorithm\.teacher\.path") as caught:
        variation_of(wanted, settings, config)
    assert "\n" not in str(caught.value)


def test_another_algorithm_brings_its_own_defaults_and_keeps_what_the_run_had_set() -> None:
    settings = Settings.model_validate(
        {
            "data": {"path": "prompts.jsonl"},
            "model": {"path": "model"},
            "algorithm": {"name": "grpo", "loss_type": "dr_grpo"},
        }
    )
    config = StepConfig(settings.algorithm, settings.training, 8, "model")
    changed = variation_of(WhatIfOptions(algorithm="gspo"), settings, config)
    assert changed is not None
    found = changed.config.algorithm
    assert (found.name, found.policy_loss, found.epsilon, found.loss_type) == ("gspo", "gspo", 3e-4, "dr_grpo")
    kept = variation_of(WhatIfOptions(("algorithm.beta=0.1",)), settings, config)
    assert kept is not None
    assert (kept.config.algorithm.epsilon, kept.config.algorithm.loss_type) == (0.2, "dr_grpo")
