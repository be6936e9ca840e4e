from pathlib import Path

import pytest

from streamrl.demo.task import Question
from streamrl.demo.warm_start import ModelShape, build_model, save
from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.schemas.trajectories import Prompt

TINY = ModelShape(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    directory: Path = tmp_path_factory.mktemp("model")
    save(build_model(TINY, seed=0), directory)
    return ModelTokenizer(str(directory))


def prompt(text: str) -> Prompt:
    return Prompt(prompt_id="p/0", dataset="p", content=text, columns={})


def test_a_worker_sees_one_token_for_each_character(tokenizer: ModelTokenizer) -> None:
    question = Question("+", (12, 34, 56))
    for text in (question.text, question.worked(" "), question.worked("\n")):
        assert len(tokenizer.encode_prompt(prompt(text))) == len(text)


@pytest.mark.parametrize("text", ["a b\nc  d", "don't  stop\t\t é 漢 x ", "52*7=\n50*7=350"])
def test_any_text_survives_the_round_trip(tokenizer: ModelTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode_prompt(prompt(text))) == text


def test_special_tokens_and_unused_ids_are_not_shown(tokenizer: ModelTokenizer) -> None:
    letters = tokenizer.encode_prompt(prompt("ab"))
    assert tokenizer.decode([*letters, 319, 1, 0]) == "ab"
