"""What is known of a model before it runs."""

from pathlib import Path

import pytest

from producers.generation.engines.model_files import read_facts
from schemas.errors import ModelError
from tests.producers.generation.engines.conftest import EOS, VOCAB


def test_facts_come_from_the_directory(model_dir: Path, no_eos_dir: Path) -> None:
    facts = read_facts(str(model_dir), None)
    assert (facts.vocab_size, facts.max_length, facts.eos_token_ids) == (VOCAB, 1024, {EOS})
    assert facts.tensors["lm_head.weight"].shape == (VOCAB, 64)
    assert read_facts(str(no_eos_dir), None).eos_token_ids == frozenset()


def test_the_length_can_be_lowered_but_not_raised(model_dir: Path) -> None:
    assert read_facts(str(model_dir), 100).max_length == 100
    assert read_facts(str(model_dir), 5000).max_length == 1024


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected a causal language model at") as caught:
        read_facts(str(tmp_path / "nowhere"), None)
    assert "\n" not in str(caught.value)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ModelError, match="expected a causal language model"):
        read_facts(str(tmp_path), None)
