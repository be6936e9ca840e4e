from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.training import step as step_module
from streamrl.consumers.training.companions import open_companions
from streamrl.consumers.training.model import load_model
from streamrl.consumers.training.optimizer import learning_rate_at
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.consumers.training.step import PolicyLearner
from streamrl.schemas.errors import OutOfMemory
from tests.consumers.training.factories import make_micro_batch, split_micro_batch

CPU = torch.device("cpu")


def make_learner(
    path: Path, algorithm: AlgorithmSettings | None = None, training: TrainingSettings | None = None
) -> PolicyLearner:
    algorithm = algorithm or AlgorithmSettings()
    model = load_model(path, CPU)
    training = training or TrainingSettings(learning_rate=1e-2)
    companions = open_companions(model, str(path), algorithm, training)
    return PolicyLearner(model, companions, algorithm, training, max_completion_length=9)


def gradient_of(learner: PolicyLearner, batches: Sequence[MicroBatch]) -> tuple[float, list[Tensor]]:
    """Loss and the gradient left after the accumulation, not yet normalised."""
    for batch in batches:
        learner.accumulate(batch)
    gradients = [parameter.grad.clone() for parameter in learner.model.parameters()]
    return learner.finish_step(1.0).metrics["loss"], gradients


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_accumulated_micro_batches_equal_one_batch(model_path: Path, loss_type: str, beta: float) -> None:
    algorithm = AlgorithmSettings(loss_type=loss_type, beta=beta)
    batch = make_micro_batch(7)
    loss, gradients = gradient_of(make_learner(model_path, algorithm), [batch])
    for sizes in ([1] * 7, [3, 4], [6, 1]):
        other_loss, others = gradient_of(make_learner(model_path, algorithm), split_micro_batch(batch, sizes))
        assert other_loss == pytest.approx(loss, rel=1e-4)
        for one, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_gradient_is_that_of_the_completions_tokens_and_of_no_others(model_path: Path) -> None:
    """On policy every ratio is 1, so the loss is the advantage times the log-probability of each completion token."""
    batch, model = make_micro_batch(5), load_model(model_path, CPU)
    tokens = torch.tensor(batch.input_ids)  # [B, S]
    log_softmax = torch.log_softmax(model(input_ids=tokens).logits[:, :-1], dim=-1)
    predicted = log_softmax.gather(2, tokens[:, 1:, None]).squeeze(2)  # [B, S - 1], of token i + 1 at i
    behaviour, loss = np.zeros_like(batch.behaviour_logprobs), torch.zeros(())
    for row, (length, advantage) in enumerate(zip(batch.lengths, batch.advantages, strict=True)):
        completion = predicted[row, 2 : length - 1]  # the prompt has three tokens
        behaviour[row, 3:length] = completion.detach()
        loss = loss - float(advantage) * completion.sum()
    loss.backward()
    _, found = gradient_of(make_learner(model_path), [replace(batch, behaviour_logprobs=behaviour)])
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus_baseline"])
def test_the_mismatch_is_reported_by_the_number_of_version_spans(model_path: Path, name: str) -> None:
    """Of each number the mean over its tokens; together they are the mean over all. Held batches tell the same."""
    spans = (1, 2, 9, 1, 4)
    batch = replace(make_micro_batch(5), versions=spans)
    algorithm = AlgorithmSettings(name=name)
    learner = make_learner(model_path, algorithm)
    for part in split_micro_batch(batch, [2, 3]):
        learner.accumulate(part)
    metrics = learner.finish_step(1.0).metrics
    found = {name: value for name, value in metrics.items() if name.startswith("mismatch_kl/spans_")}
    assert set(found) == {f"mismatch_kl/spans_{count}" for count in (1, 2, 4)}
    tokens = dict.fromkeys((1, 2, 4), 0.0)
    for row, count in enumerate(spans):
        tokens[min(count, 4)] += float(batch.loss_mask[row].sum())
    whole = sum(found[f"mismatch_kl/spans_{count}"] * number for count, number in tokens.items())
    assert whole / sum(tokens.values()) == pytest.approx(metrics["mismatch_kl/all/mean"], rel=1e-5)
    assert len(set(found.values())) == 3


def test_samples_without_advantage_count_but_are_not_computed(model_path: Path) -> None:
    learner = make_learner(model_path, AlgorithmSettings(loss_type="grpo"))
    learner.accumulate(make_micro_batch(3, advantages=[0.0, 1.0, 0.0]))
    learner.accumulate(make_micro_batch(2, seed=1, advantages=[0.0, 0.0]))
    metrics = learner.finish_step(1.0).metrics
    assert metrics["tokens/trained"] > metrics["tokens/computed"] > 0
    alone = make_learner(model_path, AlgorithmSettings(loss_type="grpo"))
    alone.accumulate(split_micro_batch(make_micro_batch(3, advantages=[0.0, 1.0, 0.0]), [1, 1, 1])[1])
    assert metrics["loss"] == pytest.approx(alone.finish_step(1.0).metrics["loss"] / 5, rel=1e-5)


def test_computing_samples_without_advantage_changes_no_gradient(model_path: Path) -> None:
    batch = make_micro_batch(4, advantages=[0.0, 1.0, 0.0, -1.0])
    found = {}
    for computes in (False, True):
        training = TrainingSettings(learning_rate=1e-2, compute_zero_advantage=computes)
        learner = make_learner(model_path, training=training)
        learner.accumulate(batch)
        gradients = [parameter.grad.clone() for parameter in learner.model.parameters()]
        found[computes] = gradients, learner.finish_step(1.0).metrics
    assert found[True][1]["tokens/computed"] == found[True][1]["tokens/trained"]
    assert found[False][1]["tokens/computed"] < found[False][1]["tokens/trained"]
    for short, whole in zip(found[False][0], found[True][0], strict=True):
        torch.testing.assert_close(short, whole, rtol=1e-4, atol=1e-6)


def test_a_batch_without_any_gradient_is_still_a_step(model_path: Path) -> None:
    learner = make_learner(model_path)
    learner.accumulate(make_micro_batch(2, advantages=[0.0, 0.0]))
    outcome = learner.finish_step(0.0)
    assert (outcome.applied, outcome.metrics["loss"], learner.step) == (True, 0.0, 1)


def test_a_bad_gradient_changes_nothing(model_path: Path) -> None:
    learner = make_learner(model_path)
    learner.accumulate(make_micro_batch(3))
    learner.finish_step(1.0)
    weights = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    moments = learner.optimizer_tensors()
    learner.accumulate(make_micro_batch(3, seed=1, advantages=[1.0, np.inf, 1.0]))
    outcome = learner.finish_step(1.0)
    assert (outcome.applied, learner.step) == (False, 1)
    assert "finite" in outcome.problem
    assert all(torch.equal(tensor, weights[name]) for name, tensor in learner.model.state_dict().items())
    assert all(torch.equal(tensor, moments[name]) for name, tensor in learner.optimizer_tensors().items())
    learner.accumulate(make_micro_batch(3, seed=2))
    assert learner.finish_step(1.0).applied


def test_steps_raise_the_probability_of_rewarded_completions(model_path: Path) -> None:
    learner = make_learner(model_path)
    batch = make_micro_batch(4, advantages=[1.0, 1.0, 1.0, 1.0])
    ratios = []
    for _ in range(4):
        learner.accumulate(batch)
        ratios.append(learner.finish_step(1.0).metrics["ratio"])
    assert ratios == sorted(ratios)
    assert ratios[-1] > ratios[0] + 0.05


def test_scaling_by_the_batch_divides_by_its_deviation(model_path: Path) -> None:
    found = {}
    for deviation in (1.0, 2.0):
        learner = make_learner(model_path, AlgorithmSettings(scale_rewards="batch"))
        learner.accumulate(make_micro_batch(4))
        found[deviation] = learner.finish_step(deviation).metrics["grad_norm"]
    assert found[1.0] / found[2.0] == pytest.approx(2.0001 / 1.0001)


def test_discarding_forgets_the_gradient(model_path: Path) -> None:
    learner = make_learner(model_path)
    learner.accumulate(make_micro_batch(4))
    learner.discard()
    learner.accumulate(make_micro_batch(3, seed=1))
    fresh = make_learner(model_path)
    fresh.accumulate(make_micro_batch(3, seed=1))
    assert learner.finish_step(1.0).metrics == fresh.finish_step(1.0).metrics


def test_a_learner_with_restored_moments_goes_on_bit_equal(model_path: Path, tmp_path: Path) -> None:
    training = TrainingSettings(learning_rate=1e-2, lr_schedule="cosine", warmup_steps=2, max_steps=6, weight_decay=0.1)
    straight = make_learner(model_path, training=training)
    halves = make_learner(model_path, training=training)
    for step in range(3):
        halves.accumulate(make_micro_batch(4, seed=step))
        halves.finish_step(1.0)
    halves.model.save_pretrained(tmp_path)
    resumed = make_learner(tmp_path, training=training)
    resumed.step = 3
    resumed.load_optimizer_tensors(halves.optimizer_tensors())
    for learner, first in ((straight, 0), (resumed, 3)):
        for step in range(first, 6):
            learner.accumulate(make_micro_batch(4, seed=step))
            learner.finish_step(1.0)
    expected = straight.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.model.state_dict().items())


@pytest.mark.parametrize("float32_head", [False, True])
def test_bfloat16_activations_keep_float32_weights(model_path: Path, float32_head: bool) -> None:
    training = TrainingSettings(dtype="bfloat16", cast_lm_head_to_fp32=float32_head)
    learner = make_learner(model_path, AlgorithmSettings(beta=0.01), training)
    learner.accumulate(make_micro_batch(4))
    assert learner.finish_step(1.0).applied
    assert {parameter.dtype for parameter in learner.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1, 1, 1]), ("linear", [0.5, 1, 0.5, 0]), ("cosine", [0.5, 1, 0.5, 0])],
)
def test_the_learning_rate_warms_up_and_follows_its_schedule(schedule: str, expected: list[float]) -> None:
    settings = TrainingSettings(
        learning_rate=1.0,
        warmup_steps=2,
        max_steps=10,
        lr_schedule=schedule,
    )
    assert [learning_rate_at(step, settings) for step in (0, 2, 6, 10)] == pytest.approx(expected)


def with_history(path: Path, norms: Sequence[float]) -> PolicyLearner:
    learner = make_learner(path, training=TrainingSettings(max_grad_norm=0.01))
    learner.load_optimizer_tensors({"recent_grad_norms": torch.tensor(norms, dtype=torch.float64)})
    return learner


@pytest.mark.parametrize(
    ("norms", "most", "applied"),
    [
        ([1e-3] * 10, 5.0, False),
        ([1e-3] * 10, 1000.0, True),
        ([1e-3] * 9, 5.0, True),
        ([1e-3] * 4 + [5.0] * 6, 5.0, True),
    ],
)
def test_a_spiking_gradient_is_not_applied(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, norms: list[float], most: float, applied: bool
) -> None:
    monkeypatch.setattr(step_module, "MAX_GRAD_NORM_RATIO", most)
    learner = with_history(model_path, norms)
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    learner.accumulate(make_micro_batch(4))
    outcome = learner.finish_step(1.0)
    assert (outcome.applied, learner.step) == (applied, int(applied))
    assert outcome.metrics["grad_norm"] > 0.1
    assert applied or "expected a gradient norm of at most 5.0 x 0.01" in outcome.problem
    assert applied or all(torch.equal(t, before[name]) for name, t in learner.model.state_dict().items())
    kept = learner.optimizer_tensors()["recent_grad_norms"].tolist()
    assert kept == norms + [outcome.metrics["grad_norm"]] * applied


def test_the_last_fifty_norms_are_remembered(model_path: Path) -> None:
    learner = with_history(model_path, [float(number) for number in range(60)])
    assert learner.optimizer_tensors()["recent_grad_norms"].tolist() == [float(number) for number in range(10, 60)]


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_an_oversized_micro_batch_leaves_the_sums_unchanged(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Out of memory in the middle: halves, after a gradient that is lost was gathered anew, are the whole."""
    first, second = make_micro_batch(3), make_micro_batch(6, seed=1)
    loss, gradients = gradient_of(make_learner(model_path), [first, second])
    learner = make_learner(model_path)
    learner.accumulate(first)
    before = [parameter.grad.clone() for parameter in learner.model.parameters()]
    with monkeypatch.context() as patch:
        fail_in(learner, moment, patch)
        with pytest.raises(OutOfMemory, match=r"6 samples.*DefaultCPUAllocator") as shortage:
            learner.accumulate(second)
    assert shortage.value.gradient_lost == (moment == "backward")
    found = [parameter.grad for parameter in learner.model.parameters()]
    assert any(not torch.equal(one, other) for one, other in zip(before, found, strict=True)) == (moment == "backward")
    again = [*second.halves()]
    if shortage.value.gradient_lost:
        learner.discard()
        again.insert(0, first)
    split_loss, others = gradient_of(learner, again)
    assert split_loss == pytest.approx(loss, rel=1e-4)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def fail_in(learner: PolicyLearner, moment: str, patch: pytest.MonkeyPatch) -> None:
    """Let memory run out in the first layer: forward, or backward, when the layers above have their gradient."""

    def fail(*_: object) -> None:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: not enough memory: you tried"
        )

    layer = learner.model.model.layers[0]
    plain = layer.forward

    def forward(hidden: Tensor, *args: object, **options: object) -> Tensor:
        if moment == "forward":
            fail()
        output: Tensor = plain(hidden, *args, **options)
        output.register_hook(fail)
        return output

    patch.setattr(layer, "forward", forward)


def test_other_errors_are_not_taken_for_a_lack_of_memory(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make_learner(model_path)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("expected a tensor")

    monkeypatch.setattr(learner.model.model.layers[0], "forward", broken)
    with pytest.raises(RuntimeError, match="expected a tensor"):
        learner.accumulate(make_micro_batch(2))
