import random
from dataclasses import replace

import pytest
import torch

from streamrl.demo.warm_start import ModelShape, WarmStartRecipe, taught_answer, warm_start

TINY = ModelShape(
    hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
)
RECIPE = WarmStartRecipe(shape=TINY, max_plateau_steps=30, decay_steps=10, check_every=10, num_validation=16)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_a_short_warm_start_lowers_the_loss() -> None:
    first = warm_start(
        replace(RECIPE, max_plateau_steps=1, decay_steps=0, check_every=1), seed=0, progress=lambda line: None
    )
    last = warm_start(RECIPE, seed=0, progress=lambda line: None)
    assert first.loss > 4.5
    assert last.loss < 3.5


def test_the_teacher_gives_up_on_long_words_only_and_not_always() -> None:
    draw = random.Random(0)
    taught = [
        taught_answer({"answer": word}, WarmStartRecipe(), draw) for word in ("abcdef", "abcdefg") for _ in range(400)
    ]
    assert set(taught[:400]) == {"abcdef"}
    assert set(taught[400:]) == {"abcdef", "abcdefg"}
    assert 0.63 < taught[400:].count("abcdef") / 400 < 0.77


def test_a_seed_gives_the_same_weights_again() -> None:
    short = replace(RECIPE, max_plateau_steps=2, decay_steps=1, check_every=1)
    states = [warm_start(short, seed=seed, progress=lambda line: None).model.state_dict() for seed in (0, 0, 1)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["lm_head.weight"], states[2]["lm_head.weight"])


def test_it_stops_a_decay_after_it_spells_well_enough() -> None:
    done = warm_start(replace(RECIPE, target_spelling=0.0), seed=0, progress=lambda line: None)
    assert done.steps == RECIPE.check_every + RECIPE.decay_steps


def test_the_learning_rate_warms_up_stays_and_decays() -> None:
    recipe = WarmStartRecipe(learning_rate=1.0, warmup_steps=10, decay_steps=99)
    assert [recipe.learning_rate_at(step, None) for step in (1, 10, 500)] == pytest.approx([0.1, 1.0, 1.0])
    assert [recipe.learning_rate_at(step, 500) for step in (501, 599)] == pytest.approx([0.99, 0.01])
