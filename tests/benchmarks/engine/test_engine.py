"""Both contenders are asked for the same, and what is compared is of equal work."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engine.__main__ import _compared, _requests
from benchmarks.engine.pipeline import Stretch
from benchmarks.engine.workload import SHAPES, Shape, Workload, build_model, build_tokenizer
from streamrl.producers.generation.tokenizer import ModelTokenizer

WORKLOAD = Workload()
TINY = Shape("tiny", "float32", 300, 32, 64, 1, 1, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engine") / "model"
    assert build_model(TINY, directory, WORKLOAD.max_model_len) > 0
    return directory


def test_lengths_repeat_and_prompts_do_not() -> None:
    assert WORKLOAD.limits() == WORKLOAD.limits()
    assert max(WORKLOAD.limits()) <= WORKLOAD.longest
    assert not set(WORKLOAD.prompts(1)) & set(WORKLOAD.prompts(2))
    assert WORKLOAD.prompts(1) == WORKLOAD.prompts(1) != replace(WORKLOAD, seed=1).prompts(1)


def test_vllm_alone_is_asked_for_every_sample_of_our_orders(model: Path) -> None:
    tokenizer = ModelTokenizer(str(model))
    asked = _requests(tokenizer, WORKLOAD, 3)
    assert len(asked["prompts"]) == len(asked["limits"]) == WORKLOAD.trajectories
    assert sum(asked["limits"]) == WORKLOAD.tokens
    assert all(0 < len(prompt) <= WORKLOAD.longest_prompt for prompt in asked["prompts"])
    assert tokenizer.decode(asked["prompts"][0]) == WORKLOAD.prompts(3)[0]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_tokenizer_has_as_many_tokens_as_its_model_and_loses_no_text(shape: Shape) -> None:
    tokenizer = build_tokenizer(shape.vocab_size)
    assert len(tokenizer) == shape.vocab_size
    text = WORKLOAD.prompts(0)[0]
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens) == text
    # A vocabulary of a language model's size has tokens of several letters.
    assert (len(tokens) < 0.7 * len(text)) == (shape.vocab_size > 1000)


def test_the_ratio_is_of_pairs_with_the_faster_vllm_and_of_equal_work() -> None:
    alone = [{"tokens": WORKLOAD.tokens, "seconds": seconds, "cpu_s": 1.0} for seconds in (1.0, 2.0)]
    spent = {"engine": 1.0, "engine_thread": 1.0, "broker": 0.128}
    ours = [Stretch(WORKLOAD.tokens, seconds, spent) for seconds in (1.25, 2.5)]
    slower = [{**one, "seconds": 2.0 * one["seconds"]} for one in alone]
    fronts = {"outside": slower, "inside": alone}
    row = _compared(TINY, 1_000_000, WORKLOAD, fronts, ours, seed=0)
    assert row["engine_core_of_vllm_alone"] == "inside"
    assert row["ratio"] == row["ratio_low"] == row["ratio_high"] == 0.8
    assert row["us_per_trajectory"] == {"broker": 1000.0}
    assert row["us_per_token"]["engine_thread"] == round(1e6 / WORKLOAD.tokens, 2)
    with pytest.raises(AssertionError, match="unequal work"):
        _compared(TINY, 1, WORKLOAD, fronts, [ours[0], replace(ours[1], tokens=1)], seed=0)
