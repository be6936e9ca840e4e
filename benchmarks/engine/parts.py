"""What the event loop does for one trajectory, part by part, timed by itself in this process."""

import time
from collections.abc import Callable

import numpy as np

from streamrl.bus.port import Outgoing
from streamrl.producers.generation.engines.port import TokenDelta
from streamrl.producers.generation.rollout import SampledCompletion
from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import FinishReason, Prompt, Trajectory

CALLS, REPEATS = 50, 5
CHUNK = 32


def parts_of(tokenizer: ModelTokenizer, prompt: str, tokens: float) -> dict[str, float]:
    """Microseconds of each part for a completion of so many tokens: the fastest of some repeats."""
    number = int(tokens)
    asked = Prompt(prompt_id="d/0", dataset="d", content=prompt)
    prompt_ids = tokenizer.encode_prompt(asked)
    sampled = [index % 300 for index in range(number)]
    text, version = tokenizer.decode(sampled), PolicyVersion(1, 0)

    def gathered() -> SampledCompletion:
        completion = SampledCompletion()
        for start in range(0, number, CHUNK):
            chunk = sampled[start : start + CHUNK]
            completion.extend(TokenDelta(chunk, [-1.5] * len(chunk), version, FinishReason.LENGTH))
        return completion

    def validated() -> Trajectory:
        completion = gathered()
        token_ids, logprobs = completion.arrays()
        return Trajectory(
            trajectory_id="d/0/0/0",
            group_id="d/0/0",
            prompt_id="d/0",
            dataset="d",
            sample_index=0,
            num_generations=8,
            temperature=1.0,
            bucket=0,
            predicted_length=number,
            worker_id="bench",
            attempt=0,
            admitted_version=version,
            position=0,
            due_step=0,
            created_at=0.0,
            prompt_token_ids=np.array(prompt_ids, dtype="<i4"),
            token_ids=token_ids,
            logprobs=logprobs,
            loss_mask=np.ones(number, dtype="<u1"),
            version_spans=completion.version_spans(),
            finish_reason=FinishReason.LENGTH,
            prompt_text=prompt,
            completion_text=text,
            rewards={"exact_match": 0.0},
            reward_errors={},
            started_at=0.0,
            finished_at=1.0,
        )

    trajectory = validated()
    gathering = _us(gathered)
    return {
        "tokenise (a group's prompt, once)": _us(lambda: tokenizer.encode_prompt(asked)),
        "gather tokens": gathering,
        "detokenise": _us(lambda: tokenizer.decode(sampled)),
        "validate": round(_us(validated) - gathering, 1),
        "encode": _us(lambda: Outgoing.of("t", trajectory, key="d/0/0", partition=0)),
    }


def _us(call: Callable[[], object]) -> float:
    fastest = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        fastest = min(fastest, time.perf_counter() - began)
    return round(1e6 * fastest / CALLS, 1)
