"""An optimizer in the processor's memory takes the same steps, and its checkpoints are the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.training.companions import open_companions
from streamrl.consumers.training.model import load_model
from streamrl.consumers.training.optimizer import MOMENTS, GuardedAdamW
from streamrl.consumers.training.settings import LoraSettings, TrainingSettings
from streamrl.consumers.training.step import PolicyLearner
from tests.consumers.training.factories import make_micro_batch
from tests.consumers.training.ranks.team import kept, opened, step

PPO = AlgorithmSettings.model_validate({"name": "ppo", "critic": {"trunk": "own"}, "num_mini_batches": 2})


def batches(number: int) -> list[Any]:
    return [make_micro_batch(4, seed=2 * number), make_micro_batch(3, seed=2 * number + 1)]


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"max_grad_norm": 1e-3}, {"lora": LoraSettings(rank=4)}, {"algorithm": PPO}],
    ids=["float32", "bfloat16", "clipped", "adapter", "critic"],
)
def test_steps_are_equal_to_the_bit(tmp_path: Path, model_path: Path, options: dict[str, Any]) -> None:
    found = {}
    for offload in (False, True):
        root = tmp_path / str(offload)
        with opened(root, model_path, 1, optimizer_offload=offload, **options) as policy:
            metrics = [step(policy, batches(number)) for number in range(3)]
            found[offload] = metrics, policy.snapshot().digests(), kept(policy, root).state.optimizer
    assert found[True][:2] == found[False][:2]
    ours, theirs = found[True][2], found[False][2]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)


@pytest.mark.parametrize("algorithm", [AlgorithmSettings(), PPO], ids=["grpo", "ppo"])
def test_the_setting_may_change_between_two_starts(
    tmp_path: Path, model_path: Path, algorithm: AlgorithmSettings
) -> None:
    with opened(tmp_path / "whole", model_path, 1, algorithm=algorithm) as policy:
        for number in range(6):
            step(policy, batches(number))
        expected = policy.snapshot().digests()
    checkpoint = None
    for start, offload in enumerate((False, True, False)):
        root = tmp_path / str(start)
        options: dict[str, Any] = {"algorithm": algorithm, "optimizer_offload": offload}
        with opened(root, model_path, 1, checkpoint, **options) as policy:
            assert policy.step == 2 * start
            for number in range(2):
                step(policy, batches(2 * start + number))
            checkpoint = kept(policy, root)
            digests = policy.snapshot().digests()
    assert digests == expected


@pytest.mark.processes
@pytest.mark.parametrize("algorithm", [AlgorithmSettings(), PPO], ids=["grpo", "ppo"])
def test_over_ranks_each_keeps_its_rows_on_the_processor(
    tmp_path: Path, model_path: Path, algorithm: AlgorithmSettings
) -> None:
    with opened(tmp_path, model_path, 2, algorithm=algorithm) as policy:
        step(policy, batches(0))
        checkpoint = kept(policy, tmp_path)
    found = {}
    for offload in (False, True):
        root = tmp_path / str(offload)
        with opened(root, model_path, 2, checkpoint, algorithm=algorithm, optimizer_offload=offload) as policy:
            metrics = [step(policy, batches(number)) for number in (1, 2)]
            found[offload] = metrics, policy.snapshot().digests()
    assert found[True] == found[False]


def test_a_refused_gradient_changes_nothing(model_path: Path) -> None:
    model, training = load_model(model_path, torch.device("cpu")), TrainingSettings(optimizer_offload=True)
    learner = PolicyLearner(
        model, open_companions(model, str(model_path), AlgorithmSettings(), training), AlgorithmSettings(), training, 9
    )
    before = {name: each.clone() for name, each in model.state_dict().items()}
    learner.accumulate(make_micro_batch(3))
    next(model.parameters()).grad[0] = torch.nan
    assert not learner.finish_step(1.0).applied
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert not any(each.grad is not None for each in model.parameters())


def check_places(device: torch.device, *, pinned: bool) -> None:
    """Weights and gradients where the model computes, a copy of the weights and the moments on the processor."""
    parameter = torch.nn.Parameter(torch.ones(3, 2, device=device))
    frozen = torch.nn.Parameter(torch.ones(2, device=device), requires_grad=False)
    unused = torch.nn.Parameter(torch.ones(2, device=device))
    named = [("w", parameter), ("frozen", frozen), ("unused", unused)]
    optimizer = GuardedAdamW(named, TrainingSettings(learning_rate=0.5, optimizer_offload=True), 1.0)
    parameter.grad = torch.ones_like(parameter)
    place = parameter.data_ptr()
    optimizer.apply(optimizer.scale(1.0), 0.5)
    assert parameter.device.type == parameter.grad.device.type == device.type
    assert parameter.data_ptr() == place
    torch.testing.assert_close(parameter.detach().cpu(), torch.full((3, 2), 0.5))
    own, other = (each for group in optimizer._adamw.param_groups for each in group["params"])
    assert other not in optimizer._adamw.state  # without a gradient there is no step
    assert own.data_ptr() != place
    assert own.device.type == "cpu"
    assert own.is_pinned() == pinned
    assert own.grad.is_pinned() == pinned
    assert {optimizer._adamw.state[own][moment].device.type for moment in MOMENTS} == {"cpu"}


def test_moments_and_a_copy_of_the_weights_are_on_the_processor() -> None:
    check_places(torch.device("cpu"), pinned=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: pinned memory, copies to and fro")
def test_from_a_cuda_device_they_are_in_pinned_memory() -> None:
    check_places(torch.device("cuda"), pinned=True)
