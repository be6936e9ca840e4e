"""The settings name the engine."""

import importlib.util

import pytest

from producers.generation.engines.factory import build_engine
from producers.generation.settings import GenerationSettings
from schemas.errors import ModelError


def test_transformers_is_the_default() -> None:
    engine = build_engine(GenerationSettings(max_num_seqs=3), "anywhere")
    assert (engine.name, engine.max_num_seqs) == ("transformers", 3)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed in this interpreter")
def test_a_missing_vllm_says_how_to_install_it() -> None:
    with pytest.raises(ModelError, match=r"requirements-vllm\.txt") as caught:
        build_engine(GenerationSettings(engine="vllm"), "anywhere")
    assert "\n" not in str(caught.value)
