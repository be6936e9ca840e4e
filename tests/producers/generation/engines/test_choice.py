"""The settings name the engine."""

import importlib.util
import os

import pytest

from producers.generation.engines.factory import build_engine
from producers.generation.engines.vllm_decoder import vllm_environment
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


def test_what_vllm_reads_from_the_environment_is_there_only_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    before = dict(os.environ)
    with vllm_environment():
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
        assert os.environ["VLLM_PLUGINS"] == ""
        assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
    assert dict(os.environ) == before
