"""A completion ends with the token that completes a stop string, in both engines, and keeps all its tokens."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from streamrl.producers.generation.engines.factory import build_engine
from streamrl.producers.generation.engines.threaded import ThreadedEngine
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.schemas.errors import EngineError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import FinishReason
from tests.producers.generation.engines.conftest import Build
from tests.producers.generation.engines.replay import Sampled, full_forward, load, sample, worst

PROMPT = [5, 6, 7, 8]
ENGINES = [
    "transformers",
    pytest.param("vllm", marks=pytest.mark.vllm),
]


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_completion_ends_with_its_stop_string(build: Build, no_eos_dir: Path) -> None:
    running = build(no_eos_dir)
    tokenizer, wanted = ModelTokenizer(str(no_eos_dir)), {"max_completion_length": 40, "seed": 3}
    await running.start()
    try:
        await running.adopt(no_eos_dir, PolicyVersion(1, 0))
        free = await sample(running, PROMPT, **wanted)
        # What tokens 11 to 13 say; the model may have said it before.
        stop = tokenizer.decode(free.tokens[:14])[len(tokenizer.decode(free.tokens[:11])) :]
        end = next(n for n in range(1, 40) if stop in tokenizer.decode(free.tokens[:n]))
        stopped = await sample(running, PROMPT, stop=("no such text", stop), **wanted)
        at_the_limit = await sample(running, PROMPT, stop=(stop,), **wanted | {"max_completion_length": end})
        too_late = await sample(running, PROMPT, stop=(stop,), **wanted | {"max_completion_length": end - 1})
        others = await sample(running, PROMPT, **wanted)
    finally:
        await running.close()
    assert 0 < end <= 14
    assert stopped.tokens == at_the_limit.tokens == free.tokens[:end]
    assert stopped.finish_reason is at_the_limit.finish_reason is FinishReason.STOP
    assert (too_late.tokens, too_late.finish_reason) == (free.tokens[: end - 1], FinishReason.LENGTH)
    assert others.tokens == free.tokens
    assert worst(stopped, torch.tensor(free.logprobs[:end])) < 1e-4
    assert worst(stopped, full_forward(load(no_eos_dir), stopped)) < 1e-3


def with_special(model: Path, directory: Path, text: str, end: str | None) -> Path:
    """The model, where this token is special, and where the tokenizer names this end."""
    shutil.copytree(model, directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([text])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_special_token_ends_a_completion_as_a_stop_string_and_as_the_tokenizers_end(
    build: Build, no_eos_dir: Path, tmp_path: Path
) -> None:
    async def sampled(model: Path, **stop: Any) -> Sampled:
        running = build(model)
        await running.start()
        try:
            await running.adopt(no_eos_dir, PolicyVersion(1, 0))
            return await sample(running, PROMPT, max_completion_length=40, seed=3, **stop)
        finally:
            await running.close()

    free = await sampled(no_eos_dir)
    text = ModelTokenizer(str(no_eos_dir)).decode_with_special([token := free.tokens[12]])
    special = with_special(no_eos_dir, tmp_path / "special", text, None)
    end = free.tokens.index(token) + 1
    assert len((await sampled(special)).tokens) == 40
    for model, stop in ((special, (text,)), (with_special(no_eos_dir, tmp_path / "end", text, text), ())):
        found = await sampled(model, stop=stop)
        assert (found.tokens, found.finish_reason) == (free.tokens[:end], FinishReason.STOP)


async def test_an_engine_without_a_tokenizer_refuses_stop_strings(no_eos_dir: Path) -> None:
    built: Any = build_engine(GenerationSettings(), no_eos_dir)
    engine = ThreadedEngine(built._decoder, max_num_seqs=2)
    await engine.start()
    try:
        with pytest.raises(EngineError, match="no tokenizer"):
            await sample(engine, PROMPT, max_completion_length=5, stop=("a",))
    finally:
        await engine.close()
