"""Every algorithm of the shelf against naive code, and what must hold of all of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from streamrl.consumers.algorithms.settings import PRESETS, AlgorithmSettings
from streamrl.consumers.algorithms.shelf import ALGORITHMS, Algorithm, algorithm_of
from tests.consumers.algorithms.naive import make_case
from tests.consumers.algorithms.references import REFERENCES, Reference, computed

BY_NAME = {each.name: each for each in REFERENCES}


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference.name)
@pytest.mark.parametrize("seed", [0, 1])
def test_value_and_gradient_are_those_of_the_published_formula(reference: Reference, seed: int) -> None:
    value, gradient = reference.errors(make_case(seed))
    assert value < 1e-6
    assert gradient < 1e-6


@pytest.mark.parametrize("name", ["GRPO", "CISPO", "DPPO", "GSPO", "online DPO", "KL k3, weighted", "decoupled PPO"])
def test_a_wrong_formula_would_be_noticed(name: str) -> None:
    """Each against the formula of another."""
    others = [other for other in REFERENCES if other.leaf == "pi" and other.name != name]
    for other in others:
        wrong = Reference(name, BY_NAME[name].settings, other.naive)
        assert max(wrong.errors(make_case())) > 1e-4, other.name


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference.name)
def test_the_cut_into_micro_batches_changes_nothing(reference: Reference) -> None:
    case = make_case(3)
    leaf = getattr(case, reference.leaf)
    found = []
    for sizes in ((6,), (1,) * 6, (2, 4), (5, 1), (1, 3, 2)):
        made = computed(case, reference.algorithm, sizes)
        loss = made.loss if reference.leaf == "pi" else made.value_loss
        assert loss is not None
        found.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    for loss, gradient in found[1:]:
        torch.testing.assert_close(loss, found[0][0], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradient, found[0][1], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference.name)
def test_masked_tokens_have_exactly_no_gradient(reference: Reference) -> None:
    case = make_case(4)
    masked = case.mask == 0
    # What stands there may be anything: padding, or what an environment wrote.
    mu, rest = case.mu.clone(), case.start_value.clone()
    mu[masked], rest[masked] = -300.0, 1e30
    made = computed(replace(case, mu=mu, start_value=rest), reference.algorithm)
    loss = made.loss if reference.leaf == "pi" else made.value_loss
    assert loss is not None
    (gradient,) = torch.autograd.grad(loss, getattr(case, reference.leaf))
    assert torch.isfinite(gradient).all()
    assert (gradient[masked] == 0.0).all()
    assert loss.item() == pytest.approx(reference.naive(case).item(), abs=1e-9)


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference.name)
def test_on_policy_every_ratio_is_one_and_nothing_is_clipped(reference: Reference) -> None:
    case = make_case(5)
    same = case.pi.detach()
    on_policy = replace(case, mu=same, start=same)
    for sums in computed(on_policy, reference.algorithm).sums:
        tokens = sums.metrics["ratio"].item()
        assert tokens == round(tokens)
        assert (float(sums.metrics["ratio_min"]), float(sums.metrics["ratio_max"])) == (1.0, 1.0)
        assert float(sums.metrics["clip_low"]) == float(sums.metrics["clip_high"]) == 0.0
        assert float(sums.metrics.get("is_masked", torch.zeros(()))) == 0.0
        assert float(sums.metrics["mismatch_kl"]) == 0.0


def test_every_name_has_a_reference_and_a_class() -> None:
    assert set(ALGORITHMS) == set(PRESETS) == {reference.algorithm.name for reference in REFERENCES}


def test_a_pair_is_the_best_and_the_worst_usable_completion() -> None:
    rewards, usable = np.array([5.0, 1.0, 3.0, 3.0]), np.array([False, True, True, True])
    found = algorithm_of(AlgorithmSettings(name="dpo")).advantages(rewards, usable)
    np.testing.assert_array_equal(found, [np.nan, -1.0, 1.0, np.nan])


@pytest.mark.parametrize("rewards", [[2.0, 2.0, 2.0], [1.0]])
def test_without_a_difference_there_is_no_pair(rewards: list[float]) -> None:
    usable = np.ones(len(rewards), dtype=np.bool_)
    assert np.isnan(algorithm_of(AlgorithmSettings(name="ipo")).advantages(np.array(rewards), usable)).all()


@pytest.mark.parametrize(
    ("selection", "kept"),
    [({}, [1]), ({"threshold": 0.5}, [1, 2, 3]), ({"threshold": 9.0}, [])],
)
def test_rejection_sampling_keeps_the_best_or_what_is_good_enough(selection: dict[str, float], kept: list[int]) -> None:
    algorithm = algorithm_of(AlgorithmSettings.model_validate({"name": "rft", "selection": selection}))
    found = algorithm.advantages(np.array([0.0, 2.0, 0.5, 1.0]), np.ones(4, dtype=np.bool_))
    assert [number for number, value in enumerate(found) if value == 1.0] == kept
    assert np.isnan(np.delete(found, kept)).all()


def test_all_but_group_baselines_and_pairs_teach_by_one_sample_too() -> None:
    alone = np.array([2.0])
    for name in ("ppo", "reinforce_plus_plus", "rft"):
        assert (algorithm_of(AlgorithmSettings(name=name)).advantages(alone, np.array([True])) != 0.0).all()


def test_which_steps_are_sums_of_their_sequences() -> None:
    separable = {name: algorithm_of(settings).is_separable for name, settings in _all_defaults().items()}
    whole = {"ppo", "dpo", "ipo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}
    assert {name for name, alone in separable.items() if not alone} == whole
    assert not algorithm_of(AlgorithmSettings(num_iterations=2)).is_separable


def _all_defaults() -> dict[str, AlgorithmSettings]:
    return {name: AlgorithmSettings.model_validate({"name": name, "teacher": {"path": "teacher"}}) for name in PRESETS}


def test_six_names_are_one_class_with_other_settings() -> None:
    plain = [name for name, kind in ALGORITHMS.items() if kind is Algorithm]
    assert plain == ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "dppo"]
