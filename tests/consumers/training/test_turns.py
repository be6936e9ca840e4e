"""Trajectories of several turns: what nobody sampled has no gradient, and a turn's reward stands at its end."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.algorithms.token_credit import StepTensors, generalised_advantages, token_rewards
from streamrl.consumers.batching.micro_batches import MicroBatch, Sample, TrainingSample, collate
from streamrl.consumers.ingest.filters import sample_of
from streamrl.consumers.training.companions import open_companions
from streamrl.consumers.training.model import load_model
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.consumers.training.step import PolicyLearner
from streamrl.schemas.reports import RecordRef
from streamrl.schemas.trajectories import Trajectory, Turn
from tests.consumers.training.factories import make_trajectory, save_tiny_model

TRAINING = TrainingSettings(learning_rate=1e-2, threads=1, max_steps=10)


def of_turns(index: int = 0, rewards: tuple[float, ...] = (0.0, 0.0)) -> Trajectory:
    """Seven tokens: two sampled, three read, two sampled."""
    made = make_trajectory("p/0/0", index, tokens=[4, 5, 6, 7, 8, 9, 10], reward=float(index) + sum(rewards))
    turns = [Turn(start=0, end=2), Turn(start=5, end=7)]
    given = [{"exact": reward} if reward else {} for reward in rewards]
    return made.replace(
        loss_mask=np.array([1, 1, 0, 0, 0, 1, 1], "<u1"),
        logprobs=np.array([-3, -3, 0, 0, 0, -3, -3], "<f4"),
        session="s",
        turns=tuple(turn.model_copy(update={"rewards": each}) for turn, each in zip(turns, given, strict=True)),
    )


def batch_of(*trajectories: Trajectory, weights: dict[str, float] | None = None) -> MicroBatch:
    def sample(one: Trajectory, row: int) -> Sample:
        reward = one.rewards["exact"] or 0.0
        return sample_of(one, RecordRef(one.trajectory_id, 0, row), reward, weights or {})

    return collate([TrainingSample(sample(one, row), 1.0 - 2 * row) for row, one in enumerate(trajectories)])


def gradient(path: Path, batch: MicroBatch, settings: AlgorithmSettings) -> torch.Tensor:
    model = load_model(path, torch.device("cpu"))
    learner = PolicyLearner(model, open_companions(model, str(path), settings, TRAINING), settings, TRAINING, 8)
    learner.accumulate(batch)
    assert learner.finish_step(1.0).applied
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=False)


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
def test_masked_tokens_have_exactly_no_gradient(path: Path, name: str) -> None:
    batch = batch_of(of_turns(), of_turns(1))
    masked = (batch.loss_mask == 0) & (np.arange(batch.input_ids.shape[1]) < batch.lengths[:, None])
    assert masked.sum() == 2 * (3 + 3), "prompts, and what was read"
    other = replace(batch, behaviour_logprobs=np.where(masked, np.float32(-200), batch.behaviour_logprobs))
    settings = AlgorithmSettings.model_validate({"name": name})
    assert torch.equal(gradient(path, batch, settings), gradient(path, other, settings))


def test_tokens_that_were_only_read_are_never_targets(path: Path) -> None:
    """The last layer's row of a token that was only read has no gradient: nothing made it likelier or less likely."""
    batch = batch_of(of_turns(), of_turns(1))
    model = load_model(path, torch.device("cpu"))
    before = model.lm_head.weight.detach().clone()
    settings = AlgorithmSettings()
    learner = PolicyLearner(model, open_companions(model, str(path), settings, TRAINING), settings, TRAINING, 8)
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_full_backward_hook(lambda _module, _inputs, outputs: seen.append(outputs[0].clone()))
    learner.accumulate(batch)
    hook.remove()
    assert torch.equal(model.lm_head.weight, before)
    rows = sum(int((each.abs().sum(dim=-1) > 0).sum()) for each in seen)
    assert rows == 0 or rows <= int(batch.loss_mask.sum()), "logits have gradients where a sampled token is predicted"


def test_a_turns_reward_is_credited_at_its_end_and_the_rest_at_the_last_token() -> None:
    one = of_turns(0, (0.5, 0.25))
    batch = batch_of(one, of_turns(1), weights={"exact": 2.0})
    assert batch.turn_rewards is not None
    assert batch.turn_rewards[0].tolist() == [0, 0, 0, 0, 1.0, 0, 0, 0, 0, 0.5]
    assert not batch.turn_rewards[1].any()
    scores, mask = torch.tensor([3.0, 7.0]), torch.tensor(batch.loss_mask)
    tensors = StepTensors(scores, mask, turn_rewards=torch.tensor(batch.turn_rewards))
    rewards = token_rewards(tensors, 0.0)
    assert rewards[0].tolist() == [0, 0, 0, 0, 1.0, 0, 0, 0, 0, 0.5 + 3.0 - 1.5]
    assert rewards.sum(dim=1).tolist() == scores.tolist()
    found, _ = generalised_advantages(rewards, torch.zeros_like(rewards), mask, 1.0, 1.0)
    # What comes from each token on: the second turn has nothing of the first one's reward.
    assert found[0].tolist() == [0, 0, 0, 3.0, 3.0, 0, 0, 0, 2.0, 2.0]
    assert batch_of(of_turns(), of_turns(1)).turn_rewards is None
    half = batch.halves()[0]
    assert half.turn_rewards is not None
    assert half.turn_rewards.shape == half.input_ids.shape


@pytest.mark.parametrize(
    ("turns", "mask"),
    [
        ([(0, 2), (1, 3)], [1, 1, 1, 0, 0, 0, 0]),
        ([(0, 8)], [1] * 7),
        ([(2, 2)], [0] * 7),
        ([(0, 2)], [1, 1, 1, 0, 0, 0, 0]),
    ],
)
def test_turns_that_cannot_be_are_refused(turns: list[tuple[int, int]], mask: list[int]) -> None:
    with pytest.raises(ValueError, match=r"expected a (turn|loss mask)"):
        of_turns().replace(
            turns=tuple(Turn(start=start, end=end) for start, end in turns), loss_mask=np.array(mask, "<u1")
        )
    assert of_turns().sampled_tokens == 4
