"""Several ranks train like one, continue from a checkpoint of any number of ranks, and end together."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.training.policy import TrainedPolicy
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weights import WEIGHTS
from tests.consumers.training.factories import make_micro_batch
from tests.consumers.training.ranks.team import difference, kept, opened, step

STEPS = 4
NEAR = 1e-6
"""Tolerance for float32 sums that are computed in another order."""
LONG_S = 20.0


def batches_of(number: int) -> list[Any]:
    # A group, five rows, then one row: with several ranks, some get no row.
    return [grouped(10 * number + 1), make_micro_batch(5, seed=10 * number + 1), make_micro_batch(1, 10 * number + 2)]


def grouped(seed: int) -> MicroBatch:
    """Four rows with one prompt."""
    batch = make_micro_batch(4, seed=seed, advantages=[1.0, -1.0, 1.0, -0.5])
    ids = batch.input_ids.copy()
    ids[:, :3] = ids[0, :3]
    return replace(batch, input_ids=ids)


def gradients(moments: Any) -> dict[str, Any]:
    """The first moments. After a first step without clipping, they are the gradient times 1 - beta1."""
    return {name: moments[name] for name in moments if name.endswith(".exp_avg")}


def exported(policy: TrainedPolicy, root: Path) -> dict[str, Any]:
    version = PolicyVersion(1, policy.step)
    policy.snapshot().export(version, 0.0)
    return load_file(root / "weights" / str(version) / WEIGHTS)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, {}), (4, {}), (2, {"packing": "varlen", "optimizer_offload": True}), (4, {"packing": "shared"})],
    ids=["two", "four", "two, packed, optimizer on the processor", "four, prompts once"],
)
def test_a_step_does_not_depend_on_the_number_of_ranks_and_every_rank_makes_the_same_calls(
    tmp_path: Path, model_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    found: dict[int, Any] = {}
    for number in (1, ranks):
        root = tmp_path / str(number)
        # One rank uses the default options.
        with opened(root, model_path, number, **({} if number == 1 else options)) as policy:
            first = step(policy, batches_of(0))
            moments = gradients(kept(policy, root).state.optimizer)
            losses = [step(policy, batches_of(later))["loss"] for later in range(1, STEPS)]
            digests = policy.snapshot().digests()
            found[number] = first, moments, losses, exported(policy, root), digests
    one, several = found[1], found[ranks]
    assert several[0] == pytest.approx(one[0], rel=1e-5, abs=1e-7)
    assert difference(one[1], several[1]) <= NEAR
    assert several[2] == pytest.approx(one[2], rel=1e-4, abs=1e-6)
    # AdamW divides by the size of the gradient. Where it is nearly 0, the order of a sum changes a weight.
    assert difference(one[3], several[3]) <= 1e-3
    assert one[4].keys() == several[4].keys()


ALGORITHMS: dict[str, dict[str, Any]] = {
    "a critic of its own": {"name": "ppo", "critic": {"trunk": "own"}, "num_mini_batches": 2},
    "a critic on the policy's states": {
        "name": "ppo",
        "critic": {"trunk": "policy"},
        "kl_in_reward": True,
        "beta": 0.1,
    },
    "pairs, twice": {"name": "dpo", "num_iterations": 2},
    "whitened returns": {"name": "reinforce_plus_plus"},
    "a reference": {"name": "grpo", "beta": 0.1},
    "deviation of the batch": {"name": "grpo", "scale_rewards": "batch"},
    "a teacher": {"name": "distillation"},
}


@pytest.mark.parametrize("packing", ["padded", "varlen", "shared"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_and_metrics_are_the_same_over_ranks(
    tmp_path: Path, model_path: Path, name: str, packing: str
) -> None:
    chosen = ALGORITHMS[name]
    if chosen["name"] == "distillation":
        chosen = chosen | {"teacher": {"path": str(model_path)}}
    algorithm, found = AlgorithmSettings.model_validate(chosen), {}
    for ranks in (1, 2):
        with opened(tmp_path / str(ranks), model_path, ranks, algorithm=algorithm, packing=packing) as policy:
            batches = [grouped(seed) for seed in (1, 2)]
            metrics = step(policy, batches, 0.7)
            moments = kept(policy, tmp_path / str(ranks)).state.optimizer
            found[ranks] = metrics, {each: moments[each] for each in moments}
    assert found[2][0] == pytest.approx(found[1][0], rel=1e-4, abs=1e-6)
    # If there are several updates, the later ones start from weights that differ in their last bits.
    assert difference(gradients(found[1][1]), gradients(found[2][1])) <= 1e-4
    assert difference(found[1][1], found[2][1]) <= 1e-2


def test_any_number_of_ranks_goes_on_from_what_another_kept(tmp_path: Path, model_path: Path) -> None:
    with opened(tmp_path, model_path, 2) as policy:
        for number in range(2):
            step(policy, batches_of(number))
        checkpoint = kept(policy, tmp_path)
        going_on = [step(policy, batches_of(number))["loss"] for number in (2, 3)]
        weights = policy.snapshot().digests()
    parts = sorted(file.path for file in checkpoint.state.manifest.files if "optimizer" in file.path)
    assert [path.rpartition("/")[2] for path in parts] == [
        "optimizer-00000-of-00002.safetensors",
        "optimizer-00001-of-00002.safetensors",
    ]
    for ranks in (1, 2, 4):
        with opened(tmp_path / str(ranks), model_path, ranks, checkpoint) as policy:
            assert policy.step == 2
            assert [step(policy, batches_of(number))["loss"] for number in (2, 3)] == pytest.approx(going_on, rel=1e-4)
            if ranks == 2:
                assert policy.snapshot().digests() == weights
            if ranks == 1:
                alone = kept(policy, tmp_path / "1")
                third = step(policy, batches_of(4))["loss"]
    with opened(tmp_path / "again", model_path, 2, alone) as policy:
        assert step(policy, batches_of(4))["loss"] == pytest.approx(third, rel=1e-4)


def test_bfloat16_with_checkpointed_activations_learns_the_same(tmp_path: Path, model_path: Path) -> None:
    losses = {}
    for ranks in (1, 2):
        options: dict[str, Any] = {"dtype": "bfloat16", "gradient_checkpointing": True}
        with opened(tmp_path / str(ranks), model_path, ranks, **options) as policy:
            losses[ranks] = [step(policy, batches_of(number))["loss"] for number in range(2)]
            assert {tensor.dtype for tensor in exported(policy, tmp_path / str(ranks)).values()} == {torch.bfloat16}
    assert losses[2] == pytest.approx(losses[1], rel=2e-2, abs=2e-3)
