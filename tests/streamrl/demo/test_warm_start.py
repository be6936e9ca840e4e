from dataclasses import replace
from itertools import islice

import pytest
import torch

from streamrl.demo.task import build_tokenizer
from streamrl.demo.warm_start import ModelShape, WarmStartRecipe, lessons, train_step, warm_start

TINY = ModelShape(
    hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
)
RECIPE = WarmStartRecipe(shape=TINY, steps=40, decay_steps=10, check_every=10, num_checked=16)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_a_short_warm_start_lowers_the_loss_and_reports_it() -> None:
    lines: list[str] = []
    first = warm_start(replace(RECIPE, steps=1, decay_steps=1), seed=0, progress=lines.append)
    last = warm_start(RECIPE, seed=0, progress=lines.append)
    assert first.loss > 4.5
    assert last.loss < 3.3
    assert [line.split(",")[0] for line in lines] == [f"warm start: step {step} of 40" for step in (10, 20, 30, 40)]


def test_a_seed_gives_the_same_weights_again() -> None:
    short = replace(RECIPE, steps=3, decay_steps=1)
    states = [warm_start(short, seed=seed, progress=lambda line: None).model.state_dict() for seed in (0, 0, 1)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["lm_head.weight"], states[2]["lm_head.weight"])


def test_parting_a_batch_by_length_changes_no_gradient() -> None:
    """The step's loss is the mean over its tokens, however they were padded."""
    taught = list(islice(lessons(0, 0.5), 8))
    made = warm_start(replace(RECIPE, steps=1), seed=0, progress=lambda line: None).model
    still = torch.optim.SGD(made.parameters(), lr=0.0)
    whole = train_step(made, still, build_tokenizer(), taught)
    parts = [(train_step(made, still, build_tokenizer(), [one]), len(one[1]) + 1) for one in taught]
    assert whole == pytest.approx(sum(loss * tokens for loss, tokens in parts) / sum(n for _, n in parts), rel=1e-4)


def test_the_learning_rate_warms_up_stays_and_decays() -> None:
    recipe = WarmStartRecipe(learning_rate=1.0, warmup_steps=10, steps=599, decay_steps=100)
    assert [recipe.learning_rate_at(step) for step in (1, 10, 500)] == pytest.approx([0.1, 1.0, 1.0])
    assert [recipe.learning_rate_at(step) for step in (501, 599)] == pytest.approx([0.99, 0.01])
