"""A pretrained model on both engines: it loads, answers, is trained on its own samples, and takes the new weights.

On vLLM it is a long test; with small models ``test_vllm_decoder.py`` and ``test_on_policy.py`` have the same.
"""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.training.checkpoints.storage import open_storage
from streamrl.consumers.training.policy import PolicyPaths, TrainedPolicy
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.producers.generation.engines.factory import build_engine
from streamrl.producers.generation.engines.port import Engine
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef
from streamrl.schemas.trajectories import ChatTurn, Prompt
from tests.producers.generation.engines.replay import Sampled, full_forward, load, sample

pytestmark = pytest.mark.timeout(900)

NEW = PolicyVersion(1, 1)
TOKENS = 8
ROUNDING = 0.2
"""Median distance of log-probabilities (nats) under one model: bfloat16 has 8 bits. Some .02 to .11, by what is said;
under the model of one optimizer step before it is 0.9 to 1.6."""


def chat(tokenizer: ModelTokenizer, text: str) -> list[int]:
    content = (ChatTurn(role="user", content=text),)
    return tokenizer.encode_prompt(Prompt(prompt_id="p/0", dataset="p", content=content))


def batch_of(samples: list[Sampled], advantages: list[float]) -> MicroBatch:
    lengths = np.array([len(one.prompt) + len(one.tokens) for one in samples])
    ids = np.zeros((len(samples), lengths.max()), np.int64)
    mask, behaviour = np.zeros(ids.shape, np.float32), np.zeros(ids.shape, np.float32)
    for row, one in enumerate(samples):
        begin = len(one.prompt)
        ids[row, : lengths[row]] = [*one.prompt, *one.tokens]
        mask[row, begin : lengths[row]] = 1.0
        behaviour[row, begin : lengths[row]] = one.logprobs
    return MicroBatch(
        input_ids=ids,
        loss_mask=mask,
        behaviour_logprobs=behaviour,
        advantages=np.array(advantages, np.float32),
        lengths=lengths,
        refs=tuple(RecordRef(f"p/0/0/{row}", 0, row) for row in range(len(samples))),
        temperatures=np.ones(len(samples), np.float32),
    )


async def four_of(engine: Engine, prompt: list[int]) -> list[Sampled]:
    """The same four every time, as far as rounding lets them be."""
    return await asyncio.gather(*(sample(engine, prompt, seed=n, max_completion_length=TOKENS) for n in range(4)))


def off_by(samples: list[Sampled], model: object) -> float:
    """Median distance, over all tokens, of the engine's log-probabilities from a forward pass in float32.

    Not their mean: unlikely tokens are off by several tenths, and how many of them are sampled is chance.
    """
    return float(torch.cat([torch.tensor(one.logprobs) - full_forward(model, one) for one in samples]).abs().median())


@pytest.mark.parametrize("name", ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.long])])
async def test_a_real_model_is_sampled_trained_and_published(name: str, pretrained_model: Path, tmp_path: Path) -> None:
    engine = build_engine(GenerationSettings(engine=name, max_num_seqs=8, max_model_len=256), pretrained_model)
    tokenizer = ModelTokenizer(str(pretrained_model))
    await engine.start()
    try:
        greedy = await sample(engine, chat(tokenizer, "What is 3 + 4?"), temperature=0.0, max_completion_length=TOKENS)
        assert tokenizer.decode(greedy.tokens).startswith("3 + 4 = 7")

        # Without the template's 30 tokens: backward passes in bfloat16 take half a second a token on old processors.
        asked = tokenizer.encode_prompt(Prompt(prompt_id="p/1", dataset="p", content="Of all colours my favourite is"))
        samples = await four_of(engine, asked)
        old = load(pretrained_model)
        assert off_by(samples, old) < ROUNDING

        stores = PolicyPaths(
            str(pretrained_model), open_storage(tmp_path / "checkpoints", tmp_path), tmp_path / "weights"
        )
        training = TrainingSettings(learning_rate=3e-4, dtype="bfloat16", device="cpu", threads=1)
        policy = TrainedPolicy(stores, AlgorithmSettings(), training, TOKENS, None)
        policy.accumulate(batch_of(samples[:2], [1.0, -1.0]))
        outcome = policy.finish_step(1.0)
        assert outcome.applied
        assert outcome.metrics["ratio"] == pytest.approx(1.0, abs=ROUNDING)
        policy.snapshot().export(NEW, time.time())

        await engine.adopt(tmp_path / "weights" / str(NEW), NEW)
        trained = load(tmp_path / "weights" / str(NEW))
        again = await four_of(engine, asked)
        assert {version for one in again for version in one.versions} == {NEW}
        assert off_by(again, trained) < ROUNDING
        # And they are not those of before: a step of Adam this long moves every weight by about 3e-4.
        assert off_by(again, old) > 4 * off_by(again, trained)
    finally:
        await engine.close()
