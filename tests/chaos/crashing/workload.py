"""A trajectories topic that does not change: the same records for every run, so that all runs take the same steps."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Outgoing
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import FinishReason, Trajectory
from tests.fakes import messages

PARTITIONS = 4
GENERATIONS = 4
PROMPT_LENGTH, SHORTEST, LONGEST = 6, 4, 12
FIRST_TEXT_TOKEN, VOCABULARY = 2, 97
SAMPLED_BY = PolicyVersion(1, 0)
REWARD = "share_of_a"
A_WHILE_AGO = 1.7e9


def make_records(model: Path, groups: int, seed: int = 0) -> list[Outgoing]:
    """``groups`` groups by the model's own probabilities, with a repeat, garbage and a group of equal rewards in
    between; ``topic`` is still without the run's name."""
    score = _scorer(model)
    numbers = np.random.default_rng(seed)
    records: list[Outgoing] = []
    for number in range(groups):
        prompt = numbers.integers(FIRST_TEXT_TOKEN, VOCABULARY, PROMPT_LENGTH)
        for index in range(GENERATIONS):
            tokens = numbers.integers(FIRST_TEXT_TOKEN, VOCABULARY, int(numbers.integers(SHORTEST, LONGEST + 1)))
            reward = 0.5 if number == 3 else float(numbers.random())
            trajectory = _trajectory(number, index, prompt, tokens, score(prompt, tokens), reward)
            records.append(_outgoing(trajectory, number))
    records.insert(len(records) // 3, records[5])
    records.insert(len(records) // 2, Outgoing(TRAJECTORIES.name, b"\xff garbage", "vandal", 1))
    return _shuffled_a_little(records, seed)


async def publish(address: str, run: str, records: Sequence[Outgoing]) -> None:
    bus = KafkaBus(KafkaSettings(bootstrap_servers=address))
    publisher = await bus.publisher("workload")
    try:
        futures = [await publisher.submit(record._replace(topic=f"{run}.{record.topic}")) for record in records]
        for future in futures:
            await future
    finally:
        await publisher.close()


def _trajectory(number: int, index: int, prompt: Any, tokens: Any, logprobs: Any, reward: float) -> Trajectory:
    group = f"static/{number}/0"
    return messages.trajectory(
        group,
        index,
        len(tokens),
        version=SAMPLED_BY,
        created_at=A_WHILE_AGO + number,
        num_generations=GENERATIONS,
        prompt_token_ids=prompt.astype("<i4"),
        token_ids=tokens.astype("<i4"),
        logprobs=logprobs,
        finish_reason=FinishReason.LENGTH,
        rewards={REWARD: reward},
        predicted_length=LONGEST,
        worker_id="static",
        position=number,
    )


def _outgoing(trajectory: Trajectory, number: int) -> Outgoing:
    return Outgoing.of(TRAJECTORIES.name, trajectory, key=trajectory.group_id, partition=number % PARTITIONS)


def _scorer(model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def score(prompt: Any, tokens: Any) -> Any:
        ids = torch.tensor(np.concatenate([prompt, tokens])[None])
        with torch.no_grad():
            logits = policy(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return chosen.numpy().astype("<f4")

    return score


def _shuffled_a_little(records: list[Outgoing], seed: int) -> list[Outgoing]:
    """Groups interleave on the topic, as they do when several workers write."""
    generator = random.Random(seed)
    order = sorted(range(len(records)), key=lambda index: index + generator.uniform(0, 6))
    return [records[index] for index in order]
