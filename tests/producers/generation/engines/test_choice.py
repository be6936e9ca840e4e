"""The settings name the engine."""

import importlib.util
import os
import warnings

import pytest

from streamrl.producers.generation.engines.factory import build_engine
from streamrl.producers.generation.engines.vllm_decoder import process_environment, set_vllm_environment
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.errors import ModelError


def test_transformers_is_the_default() -> None:
    engine = build_engine(GenerationSettings(max_num_seqs=3), "anywhere")
    assert (engine.name, engine.max_num_seqs) == ("transformers", 3)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed in this interpreter")
def test_a_missing_vllm_says_how_to_install_it() -> None:
    with pytest.raises(ModelError, match=r"requirements-vllm\.txt") as caught:
        build_engine(GenerationSettings(engine="vllm"), "anywhere")
    assert "\n" not in str(caught.value)


def test_only_variables_that_vllm_reads_here_stay_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"VLLM_PLUGINS": "mine", "VLLM_LOGGING_LEVEL": "INFO"})
    before = dict(os.environ)
    with warnings.catch_warnings():
        set_vllm_environment(3)
    changed = {name for name in os.environ.keys() | before if os.environ.get(name) != before.get(name)}
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert os.environ["VLLM_PLUGINS"] == ""
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
    # Programs that this process starts later, such as a user's, see nothing that concerns them.
    assert {name for name in changed if not name.startswith("VLLM_")} <= {"OMP_NUM_THREADS"}
    assert process_environment(3)["OMP_NUM_THREADS"] == "3"
