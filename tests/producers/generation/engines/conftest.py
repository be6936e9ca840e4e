"""Tiny random Qwen2 models with a tokenizer, and the same models after imagined optimizer steps."""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from producers.generation.engines.factory import build_decoder, build_engine
from producers.generation.engines.model_files import ModelFacts, read_facts
from producers.generation.engines.port import Engine
from producers.generation.engines.threaded import ThreadedEngine
from producers.generation.settings import GenerationSettings
from producers.generation.tokenizer import ModelTokenizer
from tests.producers.generation.engines.sharp_model import sharp_model

VOCAB = 128
EOS = 1
UNKNOWN = {"unk_token": "<pad>"}
SPECIAL = {"eos_token": "<eos>", "pad_token": "<pad>"}

MakeVersion = Callable[[int], Path]
Build = Callable[..., Engine]
SLOTS = 8


class KeptDecoder:
    """A loaded vLLM decoder for one engine after another: starting its processes takes long.

    They end with the thread that loaded it, the tests' own. An engine's first weights are those of the one before.
    """

    def __init__(self, decoder: Any, facts: ModelFacts, adopt: str = "in_flight") -> None:
        self._decoder, self._facts, self._adopt = decoder, facts, adopt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def of(self, model: Path, adopt: str = "in_flight") -> "KeptDecoder":
        """The same under another model's facts, of equal sizes; it takes weights as ``generation.adopt`` says."""
        return KeptDecoder(self._decoder, read_facts(str(model), None), adopt)

    def load(self) -> ModelFacts:
        self._decoder._facts = self._facts
        self._decoder._settings = self._decoder._settings.model_copy(update={"adopt": self._adopt})
        return self._facts

    def close(self) -> None:
        self._decoder.clear()


# The vLLM environment runs this folder's tests of vLLM, and need not have what the others are written with.
collect_ignore = [] if importlib.util.find_spec("hypothesis") else ["test_stop_matcher.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of vLLM are skipped where it is not installed."""
    if importlib.util.find_spec("vllm") is not None:
        return
    skip = pytest.mark.skip(reason="the vllm package is not installed in this interpreter; use .venv-vllm")
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(skip)


def build_model(directory: Path, eos_token_id: int | None, *, tied: bool = False) -> Path:
    """Write a two-layer Qwen2 with sharp random weights."""
    model = sharp_model(VOCAB, 1024, eos_token_id, tied=tied)
    model.generation_config.eos_token_id = eos_token_id
    model.save_pretrained(directory)
    letters = {"<pad>": 0, "<eos>": EOS} | {chr(index + 30): index for index in range(2, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(letters, **UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends by itself now and then."""
    return build_model(tmp_path_factory.mktemp("model"), EOS)


@pytest.fixture(scope="session")
def no_eos_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without an end-of-sequence token."""
    return build_model(tmp_path_factory.mktemp("no_eos"), None)


@pytest.fixture(scope="session")
def undecided_dir(no_eos_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as unsure as one in training, of 2 to 3 nats a token: truncation takes much, and logits are not large."""
    directory = tmp_path_factory.mktemp("undecided")
    model = AutoModelForCausalLM.from_pretrained(no_eos_dir, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.4)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def no_eos_version(no_eos_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeVersion:
    """Writes version n of the model without an end token: clearly different weights, the same for the same n."""

    def make(number: int) -> Path:
        directory = tmp_path_factory.mktemp(f"version-{number}-")
        model = AutoModelForCausalLM.from_pretrained(no_eos_dir)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
        model.save_pretrained(directory)
        return directory

    return make


@pytest.fixture(scope="session")
def vllm_decoder(no_eos_dir: Path) -> Iterator[KeptDecoder]:
    """Of the model without an end token, with room for SLOTS completions."""
    decoder = build_decoder(GenerationSettings(engine="vllm", max_num_seqs=SLOTS), no_eos_dir)
    yield KeptDecoder(decoder, decoder.load())
    decoder.close()


@pytest.fixture
def build(engine: str, request: pytest.FixtureRequest) -> Build:
    """Builds an engine with SLOTS slots of the kind that the test's parameter names; vLLM's processes are shared."""
    if engine != "vllm":
        settings = GenerationSettings(max_num_seqs=SLOTS, device="cpu")
        return lambda model, chunk_tokens=32, adopt="in_flight": build_engine(
            settings.model_copy(update={"chunk_tokens": chunk_tokens, "adopt": adopt}), model
        )
    kept: KeptDecoder = request.getfixturevalue("vllm_decoder")
    return lambda model, chunk_tokens=32, adopt="in_flight": ThreadedEngine(
        kept.of(model, adopt), SLOTS, chunk_tokens, open_tokenizer=partial(ModelTokenizer, str(model))
    )
