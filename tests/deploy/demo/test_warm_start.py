import random
from dataclasses import replace

import pytest
import torch

from deploy.demo.model import ModelShape
from deploy.demo.warm_start import WarmStartRecipe, is_taught, warm_start

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


def test_every_short_word_is_taught_and_few_long_ones() -> None:
    draw = random.Random(0)
    taught = {
        word: [is_taught({"answer": word}, WarmStartRecipe(), draw) for _ in range(1000)]
        for word in ("abcdef", "abcdefg")
    }
    assert all(taught["abcdef"])
    assert 0.06 < sum(taught["abcdefg"]) / 1000 < 0.14


def test_a_seed_gives_the_same_weights_again() -> None:
    short = replace(RECIPE, max_plateau_steps=2, decay_steps=1, check_every=1)
    states = [warm_start(short, seed=seed, progress=lambda line: None).model.state_dict() for seed in (0, 0, 1)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["lm_head.weight"], states[2]["lm_head.weight"])


def test_the_decay_begins_when_some_answers_are_right() -> None:
    done = warm_start(replace(RECIPE, decay_at_exact_match=0.0), seed=0, progress=lambda line: None)
    assert done.steps == RECIPE.check_every + RECIPE.decay_steps


def test_it_stops_when_enough_answers_are_right() -> None:
    done = warm_start(replace(RECIPE, stop_at_exact_match=0.0), seed=0, progress=lambda line: None)
    assert done.steps == RECIPE.check_every


def test_the_learning_rate_warms_up_stays_and_decays() -> None:
    recipe = WarmStartRecipe(learning_rate=1.0, warmup_steps=10, decay_steps=99)
    assert [recipe.learning_rate_at(step, None) for step in (1, 10, 500)] == pytest.approx([0.1, 1.0, 1.0])
    assert [recipe.learning_rate_at(step, 500) for step in (501, 599)] == pytest.approx([0.99, 0.01])
