"""Steps whose sequences share credit or that take several updates: critics, pairs, whitening, epochs, mini-batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.training.companions import open_companions
from streamrl.consumers.training.model import load_model
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.consumers.training.step import PolicyLearner
from streamrl.schemas.errors import ModelError
from streamrl.schemas.identifiers import group_id_of
from tests.consumers.training.factories import make_micro_batch, save_tiny_model, split_micro_batch

CPU = torch.device("cpu")
TRAINING = TrainingSettings(learning_rate=1e-2)
CRITIC = {"learning_rate": 1e-2}
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"name": "ppo", "critic": CRITIC},
    "ppo, own critic": {"name": "ppo", "critic": {**CRITIC, "trunk": "own"}},
    "ppo, KL in the reward": {"name": "ppo", "beta": 0.1, "kl_in_reward": True, "critic": CRITIC},
    "dpo": {"name": "dpo"},
    "ipo": {"name": "ipo"},
    "reinforce++": {"name": "reinforce_plus_plus"},
    "epochs": {"ratio": "proximal", "num_iterations": 2, "num_mini_batches": 2, "beta": 0.05},
    "dpo, epochs": {"name": "dpo", "num_iterations": 2, "num_mini_batches": 3},
    "ppo, epochs": {"name": "ppo", "num_iterations": 2, "num_mini_batches": 2, "critic": CRITIC},
}


def make_learner(path: Path, settings: dict[str, Any], **training: Any) -> PolicyLearner:
    algorithm = AlgorithmSettings.model_validate(settings)
    options = TRAINING.model_copy(update=training)
    model = load_model(path, CPU)
    return PolicyLearner(model, open_companions(model, str(path), algorithm, options), algorithm, options, 9)


def pairs(count: int, first: int = 0) -> list[MicroBatch]:
    """Groups of a better and a worse sample; of the second group the worse one comes first."""
    return [
        make_micro_batch(2, seed=seed, advantages=[-1.0, 1.0] if seed == 1 else [1.0, -1.0])
        for seed in range(first, first + count)
    ]


def step(learner: PolicyLearner, batches: Sequence[MicroBatch]) -> dict[str, float]:
    for batch in batches:
        learner.accumulate(batch)
    outcome = learner.finish_step(1.0)
    assert outcome.applied, outcome.problem
    return outcome.metrics


def weights(learner: PolicyLearner) -> dict[str, Tensor]:
    own = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    return own | ({} if learner.critic is None else learner.critic.weights())


def logprobs_of(model: Any, batch: MicroBatch) -> Tensor:
    """Of every token but the first, [B, S - 1], the plain way."""
    tokens = torch.tensor(batch.input_ids)
    found = torch.log_softmax(model(input_ids=tokens).logits[:, :-1], dim=-1)
    return found.gather(2, tokens[:, 1:, None]).squeeze(2)


@pytest.mark.parametrize("name", SETTINGS)
def test_accumulated_micro_batches_equal_one_batch(model_path: Path, name: str) -> None:
    """Also where the two sequences of a pair are in different ones."""
    found = []
    for cut in (lambda batch: [batch], lambda batch: split_micro_batch(batch, [1, 1])):
        learner = make_learner(model_path, SETTINGS[name])
        # A critic that has learnt nothing yet would tell nothing: its own trunk has no gradient in the first step.
        for first in (0, 3) if learner.critic is not None else (0,):
            metrics = step(learner, [part for batch in pairs(3, first) for part in cut(batch)])
        found.append((metrics, weights(learner)))
    (whole, expected), (parts, others) = found
    assert parts == pytest.approx(whole, rel=1e-3, abs=1e-5)
    for tensor, other in expected.items():
        torch.testing.assert_close(others[tensor], other, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("name", ["ppo", "ppo, own critic", "ppo, epochs", "epochs"])
def test_a_learner_with_restored_state_goes_on_bit_equal(model_path: Path, tmp_path: Path, name: str) -> None:
    straight, halves = (make_learner(model_path, SETTINGS[name]) for _ in range(2))
    for first in (0, 3):
        step(straight, pairs(3, first))
    step(halves, pairs(3))
    halves.model.save_pretrained(tmp_path)
    resumed = make_learner(tmp_path, SETTINGS[name])
    if resumed.critic is not None and resumed.critic.own_trunk is not None:
        # Begun from what is not the initial model, and put right by what was kept.
        assert not torch.equal(next(resumed.critic.parameters()), next(straight.critic.parameters()))  # type: ignore[union-attr]
    resumed.step = 1
    resumed.load_optimizer_tensors(halves.optimizer_tensors())
    if SETTINGS[name].get("beta"):
        resumed._reference = straight._reference  # the initial model, which the directory above is not
    assert step(resumed, pairs(3, 3)) is not None
    assert all(torch.equal(tensor, weights(straight)[key]) for key, tensor in weights(resumed).items())


def test_a_pairs_gradient_is_that_of_its_loss(model_path: Path) -> None:
    """DPO's loss written out over whole sequences, and one AdamW step on it."""
    learner, plain = make_learner(model_path, SETTINGS["dpo"]), load_model(model_path, CPU)
    # Away from the reference, or both scores would be 0.
    with torch.no_grad():
        for own, other in zip(learner.model.parameters(), plain.parameters(), strict=True):
            noise = 0.05 * torch.randn(own.shape, generator=torch.Generator().manual_seed(own.numel()))
            own += noise
            other += noise
    reference = load_model(model_path, CPU)
    losses = []
    for batch in pairs(3):
        mask = torch.tensor(batch.loss_mask)[:, 1:]
        scores = [(logprobs_of(model, batch) * mask).sum(dim=1) for model in (plain, reference)]
        signs = torch.tensor(batch.advantages)
        losses.append(-torch.nn.functional.logsigmoid(0.1 * (signs * (scores[0] - scores[1].detach())).sum()))
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients: list[Tensor] = []
    for batch in pairs(3):
        learner.accumulate(batch)
    outcome = learner.finish_step(1.0, lambda: gradients.extend(p.grad.clone() for p in learner.model.parameters()))
    assert outcome.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for own, other in zip(gradients, plain.parameters(), strict=True):
        torch.testing.assert_close(own, other.grad, rtol=1e-4, atol=1e-6)


def test_several_passes_clip_against_the_policy_of_the_steps_start(model_path: Path) -> None:
    """Decoupled PPO written out: pi0 is fixed, and so is its weight, while pi moves."""
    settings = {"ratio": "proximal", "num_iterations": 3, "epsilon": 0.01, "epsilon_high": 0.01}
    learner, plain = make_learner(model_path, settings), load_model(model_path, CPU)
    batch = make_micro_batch(5)
    metrics = step(learner, [batch])
    mask, behaviour = (torch.tensor(each)[:, 1:] for each in (batch.loss_mask, batch.behaviour_logprobs))
    advantages = torch.tensor(batch.advantages)[:, None]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-8, weight_decay=0.0)
    start = None
    for _ in range(3):
        found = logprobs_of(plain, batch)
        start = found.detach() if start is None else start
        ratio, weight = torch.exp(found - start), torch.exp(start - behaviour).clamp(max=2.0)
        loss = -weight * torch.minimum(ratio * advantages, ratio.clamp(0.99, 1.01) * advantages)
        optimizer.zero_grad()
        ((loss * mask).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    assert metrics["clip_ratio/region_mean"] > 0.1
    assert metrics["optim/updates"] == 3.0
    for own, other in zip(learner.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-5)


def test_every_pass_takes_every_group_once_and_none_in_two(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make_learner(model_path, {"num_iterations": 2, "num_mini_batches": 3})
    seen: list[set[str]] = []
    gather = learner._gather

    def watched(parts: list[Any], **options: Any) -> str:
        rows = [
            group_id_of(ref.trajectory_id)
            for part in parts
            for ref, wanted in zip(part.held.batch.refs, part.rows.tolist(), strict=True)
            if wanted
        ]
        assert all(rows.count(name) == 2 for name in rows)
        seen.append(set(rows))
        return gather(parts, **options)

    monkeypatch.setattr(learner, "_gather", watched)
    step(learner, pairs(7))
    everything = {f"p/{seed}/0" for seed in range(7)}
    for pass_ in (seen[:3], seen[3:]):
        assert set().union(*pass_) == everything
        assert sorted(len(each) for each in pass_) == [2, 2, 3]
    assert seen[:3] != seen[3:]


def test_a_critic_learns_the_returns_and_leaves_the_policy_alone(model_path: Path) -> None:
    critic = {"learning_rate": 5e-2, "cliprange_value": None, "lam": 1.0}
    # A policy that hardly moves: the critic stands on its states.
    learner = make_learner(model_path, {"name": "ppo", "critic": critic}, learning_rate=1e-9)
    batch = make_micro_batch(6, advantages=[1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    first = step(learner, [batch])
    for _ in range(15):
        last = step(learner, [batch])
    assert first["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert last["critic/explained_variance"] > 0.3
    assert last["critic/loss"] < 0.6 * first["critic/loss"]
    # Without credit there is nothing for the policy to learn, whatever the critic does.
    still = make_learner(model_path, {"name": "ppo", "critic": CRITIC})
    before = {name: tensor.clone() for name, tensor in still.model.state_dict().items()}
    still.accumulate(make_micro_batch(4, advantages=[0.0] * 4))
    still.finish_step(0.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in still.model.state_dict().items())


def test_an_update_that_is_not_fit_is_left_out_and_a_step_without_any_is_not_taken(model_path: Path) -> None:
    settings = {"num_mini_batches": 2}
    bad = make_micro_batch(2, seed=1, advantages=[np.inf, 1.0])
    learner = make_learner(model_path, settings)
    for batch in (make_micro_batch(2), bad):
        learner.accumulate(batch)
    outcome = learner.finish_step(1.0)
    assert (outcome.applied, learner.step) == (True, 1)
    assert (outcome.metrics["optim/updates"], outcome.metrics["optim/updates_skipped"]) == (1.0, 1.0)
    before = weights(learner)
    learner.accumulate(bad)
    outcome = learner.finish_step(1.0)
    assert (outcome.applied, learner.step) == (False, 1)
    assert "finite" in outcome.problem
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())


def test_a_micro_batch_that_runs_out_of_memory_is_split(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, learner = (make_learner(model_path, SETTINGS["ppo"]) for _ in range(2))
    step(expected, [make_micro_batch(6)])
    layer = learner.model.model.layers[0]
    plain = layer.forward

    def small(hidden: Tensor, *arguments: Any, **options: Any) -> Tensor:
        output: Tensor = plain(hidden, *arguments, **options)
        if len(hidden) > 2 and torch.is_grad_enabled():
            output.register_hook(_fail)
        return output

    monkeypatch.setattr(layer, "forward", small)
    step(learner, [make_micro_batch(6)])
    for name, tensor in weights(expected).items():
        torch.testing.assert_close(weights(learner)[name], tensor, rtol=1e-3, atol=1e-5)


def _fail(_: object) -> None:
    raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried")


def test_a_teacher_of_another_vocabulary_is_refused_in_one_line(model_path: Path, tmp_path: Path) -> None:
    teacher = save_tiny_model(tmp_path / "teacher", vocab_size=11)
    with pytest.raises(
        ModelError, match="expected a teacher with the policy's vocabulary of 23 tokens, got 11"
    ) as told:
        make_learner(model_path, {"name": "distillation", "teacher": {"path": str(teacher)}})
    assert "\n" not in str(told.value)


def test_distillation_comes_nearer_to_its_teacher(model_path: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    teacher = load_model(model_path, CPU)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    teacher.save_pretrained(tmp_path)
    settings = {"name": "distillation", "teacher": {"path": str(tmp_path)}, "importance_sampling_mode": "none"}
    learner = make_learner(model_path, settings)
    batch = make_micro_batch(8, advantages=[1.0] * 8)
    metrics = step(learner, [batch])
    mask = torch.tensor(batch.loss_mask)[:, 1:]
    ours, theirs = (logprobs_of(model, batch) * mask for model in (load_model(model_path, CPU), teacher))
    expected = (ours - theirs).sum() / mask.sum()
    assert metrics["distillation/reverse_kl"] == pytest.approx(expected.item(), rel=1e-4)
