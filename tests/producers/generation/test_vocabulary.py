"""Which tokens end a completion, wherever a model names them, and what a tokenizer calls special."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrl.producers.generation.engines.model_files import read_facts
from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.producers.generation.vocabulary import end_tokens, load_tokenizer, special_tokens, tokenizer_size
from streamrl.schemas.errors import ModelError
from tests.producers.generation.chat_templates import FAMILIES, save_tokenizer

VOCABULARY = 300
SIZES: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
FAMILY = FAMILIES["phi3"]
IDS = st.integers(-1, VOCABULARY + 5)
NAMED = st.none() | IDS | st.lists(IDS, max_size=3)


def write(directory: Path, *, config: Any = None, generation: Any = None, eos: str | None = None) -> str:
    """A model's files that name these ends; generation "absent": without the file."""
    directory.mkdir(exist_ok=True)
    save_tokenizer(FAMILY, directory, eos_token=eos)
    (directory / "config.json").write_text(json.dumps(SIZES | {"eos_token_id": config}))
    if generation != "absent":
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return str(directory)


def listed(named: int | list[int] | None) -> set[int]:
    return {named} if isinstance(named, int) else set(named or ())


@given(config=st.none() | st.integers(0, 9) | st.lists(st.integers(0, 9)), generation=NAMED, eos=st.none() | IDS)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_named_end_ends_a_completion(tmp_path: Path, config: Any, generation: Any, eos: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"eos_token_id": config}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    ends = end_tokens(str(tmp_path), SimpleNamespace(eos_token_id=eos, decode=lambda ids: f"t{ids[0]}"))
    places = {"generation_config": listed(generation), "config": listed(config), "tokenizer": listed(eos)}
    assert ends.ids == {one for named in places.values() for one in named if 0 <= one < VOCABULARY}
    for number, named in ends.places.items():
        assert named == tuple(place for place, numbers in places.items() if number in numbers)
        assert f"'t{number}' ({number}: {', '.join(named)})" in str(ends)
    assert bool(ends.ids) != (str(ends) == "no token (generation_config, config and tokenizer name none)")


@pytest.mark.parametrize("generation", ["absent", None])
def test_the_tokenizers_end_counts_for_engines_and_for_text(tmp_path: Path, generation: Any) -> None:
    path = write(tmp_path / "m", generation=generation, eos="<|end|>")
    tokenizer = ModelTokenizer(path)
    (end,) = tokenizer.encode_more("<|end|>")
    assert read_facts(path, None).ends == tokenizer.ends
    assert str(tokenizer.ends) == f"'<|end|>' ({end}: tokenizer)"
    assert tokenizer.is_special(end)


def test_a_tokens_text_names_an_end_and_other_text_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m", generation=["<|end|>", 7])
    tokenizer = ModelTokenizer(path)
    assert tokenizer.ends.ids == {*tokenizer.encode_more("<|end|>"), 7}
    for wrong in ("end", "7", True, 1.5, [["<|end|>"]], {"a": 1}):
        write(tmp_path / "m", generation=wrong)
        with pytest.raises(ModelError, match=r"as eos_token_id in generation_config of .*m, got") as refused:
            end_tokens(path, load_tokenizer(path))
        assert "\n" not in str(refused.value)
        with pytest.raises(ModelError, match="eos_token_id"):
            read_facts(path, None)


def test_a_model_may_name_no_end(tmp_path: Path) -> None:
    assert read_facts(write(tmp_path / "m"), None).ends.ids == frozenset()


def test_special_are_all_that_the_tokenizers_files_mark(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "m", eos="<|end|>"))
    assert set(special_tokens(tokenizer).values()) == {*FAMILY.special, FAMILY.end}
    assert len(tokenizer) == 256 + len({*FAMILY.special})
    assert tokenizer_size(tokenizer) == 256
    tokenizer.add_tokens(["&&"])
    assert tokenizer_size(tokenizer) == len(tokenizer)
