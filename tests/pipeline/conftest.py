"""A tiny character model in a Hugging Face directory, and runs that end with their test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.local_run import LocalRun, write_config

Start = Callable[..., LocalRun]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    directory = tmp_path_factory.mktemp("tiny-model")
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {"<pad>": 0, "<eos>": 1, **{text: number + 2 for number, text in enumerate(characters)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path, bootstrap_servers: str, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Start a run on the tests' broker, under a name of its own."""
    started: list[LocalRun] = []

    def starter(*arguments: str, own_broker: bool = False, **sections: dict[str, Any]) -> LocalRun:
        name = f"t{abs(hash(request.node.name)) % 10**8}-{len(started)}"
        config = write_config(tmp_path, tiny_model, name, **sections)
        broker = () if own_broker else (f"--kafka.bootstrap_servers={bootstrap_servers}",)
        started.append(LocalRun.start(config, name, *broker, *arguments))
        return started[-1]

    yield starter
    for run in started:
        run.end()
