"""Reward functions that know the fake engine's completions."""

import time

from streamrl.producers.generation.engines.port import GenerationRequest
from streamrl.schemas.trajectories import SamplingParams
from tests.fakes.engine import fake_tokens


def length(completion_ids: list[list[int]]) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def by_sample(completion_ids: list[list[int]], prompts: list[str]) -> list[float]:
    """Hangs at sample 1 of a prompt and raises at its sample 2."""
    if completion_ids[0] == _sample(1, prompts[0]):
        time.sleep(60)
    if completion_ids[0] == _sample(2, prompts[0]):
        raise ValueError("third")
    return [1.0]


def _sample(index: int, prompt: str) -> list[int]:
    token_ids = [ord(character) for character in prompt]
    return fake_tokens(GenerationRequest(f"d/0/0/{index}", token_ids, SamplingParams(max_completion_length=8)), 8)
