"""The teacher, the batches and the schedule of the warm start."""

import random

import pytest

from benchmarks.peers.policy.cache import fingerprint
from benchmarks.peers.policy.tokenizer import build_mixed_tokenizer
from benchmarks.peers.policy.warm_start import WarmStartRecipe, micro_batches, taught_answer
from benchmarks.peers.tasks import FIXED_TEXTS


def test_the_teacher_is_right_about_short_answers_and_gives_up_on_some_long_ones() -> None:
    recipe, draw = WarmStartRecipe(), random.Random(0)
    assert {taught_answer({"answer": "shorts"}, recipe, draw) for _ in range(50)} == {"shorts"}
    taught = [taught_answer({"answer": "muchlonger"}, recipe, draw) for _ in range(400)]
    assert set(taught) == {"muchlo", "muchlonger"}
    assert {taught_answer({"answer": "a\nb\nc"}, recipe, draw) for _ in range(50)} == {"a\nb", "a\nb\nc"}
    assert taught.count("muchlo") / 400 == pytest.approx(recipe.give_up_share, abs=0.1)


def test_every_lesson_is_in_one_micro_batch_within_the_budget() -> None:
    lessons = [([1] * size, [2] * size) for size in (40, 1, 3, 9, 2, 30, 7)]
    batches = micro_batches(lessons, 60)
    assert sorted(pair for batch in batches for pair in batch) == sorted(lessons)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(len(p) + len(a) for p, a in batch) <= 60


def test_the_learning_rate_rises_stays_and_falls_to_nothing() -> None:
    recipe = WarmStartRecipe(steps=100, decay_steps=20, warmup_steps=10, learning_rate=1.0)
    assert [recipe.learning_rate_at(step) for step in (5, 50, 81)] == [0.5, 1.0, 1.0]
    assert recipe.learning_rate_at(100) == pytest.approx(0.05)


def test_another_recipe_is_another_policy() -> None:
    assert fingerprint(WarmStartRecipe()) != fingerprint(WarmStartRecipe(steps=7))


def test_fixed_texts_are_one_token_each_and_text_makes_the_round_trip() -> None:
    tokenizer = build_mixed_tokenizer()
    for text in FIXED_TEXTS:
        assert len(tokenizer(text)["input_ids"]) == 1
    mixed = f"{FIXED_TEXTS[0]}Zebra\n"
    assert tokenizer.decode(tokenizer(mixed)["input_ids"]) == mixed
