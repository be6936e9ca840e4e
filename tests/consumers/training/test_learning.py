"""Every algorithm of the shelf teaches a tiny model something: to say one token, in place of any."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamrl.consumers.algorithms.advantages import ModelLimits, credit_group, skip_reason_of
from streamrl.consumers.algorithms.estimators import deviation
from streamrl.consumers.algorithms.settings import PRESETS, AlgorithmSettings
from streamrl.consumers.batching.micro_batches import Group, Sample, TrainingSample, collate
from streamrl.consumers.training.companions import open_companions
from streamrl.consumers.training.model import load_model
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.consumers.training.step import PolicyLearner
from streamrl.schemas.reports import RecordRef
from tests.consumers.training.factories import make_trajectory, save_tiny_model

VOCABULARY, PROMPT, LENGTH, WANTED = 9, (1, 2), 3, 5
GROUPS, SIZE, STEPS = 4, 6, 12
LIMITS = ModelLimits(vocabulary=VOCABULARY, positions=64)
TRAINING = TrainingSettings(learning_rate=2e-2, threads=1, max_steps=STEPS)


def save_bandit(directory: Path) -> Path:
    """A policy of some 3,000 parameters."""
    return save_tiny_model(directory, vocab_size=VOCABULARY, num_hidden_layers=1, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def bandit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bandit(tmp_path_factory.mktemp("bandit"))


@torch.no_grad()
def sampled(model: Any, generator: torch.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and their log-probs, [groups x size, length]."""
    ids = torch.tensor([PROMPT] * (GROUPS * SIZE))
    logprobs = []
    for _ in range(LENGTH):
        found = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[:, -1], dim=-1)
        token = torch.multinomial(found.exp(), 1, generator=generator)
        logprobs.append(found.gather(1, token))
        ids = torch.cat([ids, token], dim=1)
    return ids[:, len(PROMPT) :].numpy(), torch.cat(logprobs, dim=1).numpy()


def groups_of(model: Any, step: int, generator: torch.Generator) -> Iterator[Group]:
    """The reward is the share of tokens that are the wanted one."""
    tokens, logprobs = sampled(model, generator)
    for number in range(GROUPS):
        samples = []
        for index in range(SIZE):
            row = number * SIZE + index
            reward = float((tokens[row] == WANTED).mean())
            trajectory = make_trajectory(
                f"p/{step * GROUPS + number}/0", index, reward=reward, prompt=PROMPT, tokens=tokens[row].tolist()
            ).replace(logprobs=logprobs[row].astype("<f4"))
            samples.append(Sample(trajectory, RecordRef(trajectory.trajectory_id, 0, row), reward))
        yield Group(f"p/{step * GROUPS + number}/0", 0.0, tuple(samples))


def rewards_while_learning(path: Path, settings: AlgorithmSettings) -> tuple[list[float], PolicyLearner]:
    """The mean reward before each step, in micro-batches that part groups."""
    model = load_model(path, torch.device("cpu"))
    companions = open_companions(model, str(path), settings, TRAINING)
    learner = PolicyLearner(model, companions, settings, TRAINING, LENGTH)
    generator, rewards = torch.Generator().manual_seed(0), []
    for step in range(STEPS):
        shaped: list[float] = []
        taken: list[TrainingSample] = []
        everything: list[float] = []
        for group in groups_of(model, step, generator):
            everything += [sample.reward for sample in group.samples]
            credit = credit_group(group, settings, LIMITS)
            if skip_reason_of(credit, settings) is None:
                shaped += credit.rewards.tolist()
                taken += credit.training_samples
        rewards.append(float(np.mean(everything)))
        for start in range(0, len(taken), 13):
            learner.accumulate(collate(taken[start : start + 13]))
        assert learner.finish_step(deviation(np.array(shaped))).applied
    return rewards, learner


def settings_of(name: str, teacher: Path) -> AlgorithmSettings:
    own: dict[str, Any] = {
        "distillation": {"teacher": {"path": str(teacher)}},
        "ppo": {"critic": {"learning_rate": 2e-2}},
        # The teacher's and the pairs' losses are of another size than a centred reward's.
    }
    return AlgorithmSettings.model_validate({"name": name, **own.get(name, {})})


@pytest.fixture(scope="module")
def taught(bandit: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """What GRPO comes to, and where its model is."""
    rewards, learner = rewards_while_learning(bandit, AlgorithmSettings())
    directory = tmp_path_factory.mktemp("teacher")
    learner.model.save_pretrained(directory)
    return rewards, directory


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "grpo"])
def test_it_learns(name: str, bandit: Path, taught: tuple[list[float], Path]) -> None:
    rewards, _ = rewards_while_learning(bandit, settings_of(name, taught[1]))
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.15


def test_grpo_learns_and_so_it_does_in_several_updates_a_step(bandit: Path, taught: tuple[list[float], Path]) -> None:
    once = taught[0]
    settings = AlgorithmSettings(ratio="proximal", num_iterations=2, num_mini_batches=2)
    often, learner = rewards_while_learning(bandit, settings)
    assert np.mean(once[-2:]) > np.mean(once[:2]) + 0.15
    assert np.mean(often[-2:]) > np.mean(once[-2:])
    assert learner.step == STEPS
