from pathlib import Path

import pytest

from producers.generation.tokenizer import ModelTokenizer
from schemas.trajectories import Prompt
from streamrl.demo.task import held_out_entries, prompt_text
from streamrl.demo.warm_start import ModelShape, build_model, save

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


def test_a_worker_sees_one_token_for_the_instruction_and_one_for_each_letter(tokenizer: ModelTokenizer) -> None:
    entry = held_out_entries(seed=0, num_entries=1)[0]
    ids = tokenizer.encode_prompt(prompt(prompt_text(entry)))
    assert len(ids) == 1 + len(entry["answer"]) + 1


@pytest.mark.parametrize(
    "text", ["a b\nc  d", "don't  stop\t\t é 漢 x ", "Spell this word backward (example: sun -> nus): Ab\n"]
)
def test_any_text_survives_the_round_trip(tokenizer: ModelTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode_prompt(prompt(text))) == text


def test_special_tokens_and_unused_ids_are_not_shown(tokenizer: ModelTokenizer) -> None:
    letters = tokenizer.encode_prompt(prompt("ab"))
    assert tokenizer.decode([*letters, 319, 1, 0]) == "ab"
