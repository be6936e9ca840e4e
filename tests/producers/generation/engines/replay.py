"""What an engine's output is held against: transformers' own forward pass, weights switched where the engine did."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from streamrl.producers.generation.engines.port import Engine, GenerationRequest
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import FinishReason, SamplingParams

PROMPTS = [[5 + i + j for j in range(1 + 3 * i)] for i in range(6)]
"""Of 1 to 16 tokens."""

_requests = iter(range(1 << 30))


@dataclass
class Sampled:
    """A whole completion with the version of each token."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def spans(self) -> list[tuple[PolicyVersion, int, int]]:
        """Runs of equal versions as (version, start, end)."""
        starts = [i for i, v in enumerate(self.versions) if i == 0 or v != self.versions[i - 1]]
        return [(self.versions[a], a, b) for a, b in zip(starts, [*starts[1:], len(self.versions)], strict=True)]


def request(prompt: Sequence[int], **sampling: Any) -> GenerationRequest:
    """A request with a name of its own."""
    return GenerationRequest(f"request-{next(_requests)}", list(prompt), SamplingParams(**sampling))


async def sample(engine: Engine, prompt: Sequence[int], **sampling: Any) -> Sampled:
    """Run one request to its end."""
    return await sample_and_adopt(engine, prompt, {}, **sampling)


async def sample_and_adopt(
    engine: Engine, prompt: Sequence[int], versions: Mapping[PolicyVersion, Path], **sampling: Any
) -> Sampled:
    """Run one request to its end, and adopt the next version each time another 60 tokens of it have arrived."""
    result = Sampled(list(prompt))
    waiting = list(versions.items())
    async for delta in engine.generate(request(prompt, **sampling)):
        assert len(delta.token_ids) == len(delta.logprobs)
        result.tokens.extend(delta.token_ids)
        result.logprobs.extend(delta.logprobs)
        result.versions.extend([delta.version] * len(delta.token_ids))
        result.finish_reason = delta.finish_reason
        if waiting and len(result.tokens) >= 60 * (1 + len(versions) - len(waiting)):
            version, directory = waiting.pop(0)
            await engine.adopt(directory, version)
    assert not waiting
    return result


def load(directory: Path) -> Any:
    """A model in float32 for reference."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.no_grad()
def full_forward(model: Any, sampled: Sampled, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs (T) of the completion by one fresh forward pass over prompt and completion."""
    ids = torch.tensor([sampled.prompt + sampled.tokens])
    logits = model(input_ids=ids).logits[0, len(sampled.prompt) - 1 : -1] / temperature
    logprobs: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(sampled.tokens)[:, None])[:, 0]
    return logprobs


@torch.no_grad()
def mixed_forward(models: Mapping[PolicyVersion, Any], sampled: Sampled) -> torch.Tensor:
    """Log-probs (T) with the key-value cache kept over changes of weights: each span is fed to its own version."""
    cache = DynamicCache()
    inputs = sampled.prompt + sampled.tokens[:-1]
    found, fed = [], 0
    for version, _, end in sampled.spans():
        until = len(sampled.prompt) - 1 + end
        logits = models[version](input_ids=torch.tensor([inputs[fed:until]]), past_key_values=cache).logits[0]
        found.append(logits[len(sampled.prompt) - 1 :] if fed == 0 else logits)
        fed = until
    logprobs = torch.cat(found).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(sampled.tokens)[:, None])[:, 0]


def spanwise_forward(models: Mapping[PolicyVersion, Any], sampled: Sampled) -> torch.Tensor:
    """Log-probs (T) with the cache computed anew at each change of weights: each span is its own version's alone."""
    of_version = {version: full_forward(models[version], sampled) for version in set(sampled.versions)}
    return torch.stack([of_version[version][n] for n, version in enumerate(sampled.versions)])


def worst(sampled: Sampled, expected: torch.Tensor) -> float:
    """Largest absolute difference of the reported log-probs, in nats."""
    return (torch.tensor(sampled.logprobs) - expected).abs().max().item()
