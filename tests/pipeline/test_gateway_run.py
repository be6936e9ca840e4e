"""A run without prompts, as its requesters meet it: the openai client asks, rates, and is answered as it taught."""

import asyncio
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest

from tests.command import ended
from tests.pipeline.conftest import Start
from tests.pipeline.local_run import PATIENCE_S, LocalRun

if TYPE_CHECKING:
    import openai

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(400)]

MARKER = "a"
TOKENS = 4
AT_ONCE = 32
WITHIN_S = 180.0
"""Half a minute on two idle cores; the tests share them."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def key_of(run: LocalRun) -> str:
    config = str(run.directory / "config.resolved.toml")
    done = ended("gateway", "keys", "add", "teacher", "--run", config, "--train")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def rated(client: "openai.AsyncOpenAI", name: str, number: int) -> float:
    """Ask once, and rate the answer by the share of the marker in it."""
    answer = await client.completions.create(model=name, prompt=f"say {number % 8}", max_tokens=TOKENS)
    reward = answer.choices[0].text.count(MARKER) / TOKENS
    await client.post("/feedback", cast_to=object, body={"id": answer.id, "reward": reward})
    return reward


async def test_what_feedback_rewards_the_policy_soon_says(start: Start) -> None:
    import openai  # takes a second, in every process that collects tests

    port = free_port()
    run = start(
        run={"workers": 1},
        data={"path": None, "requests_only": True},
        rewards={"functions": ["exact_match"]},
        loop={"groups_per_step": AT_ONCE, "num_generations": 1, "max_completion_length": 8, "max_staleness": 4},
        gateway={"enabled": True, "port": port},
        algorithm={"name": "reinforce_plus_plus"},
        training={"max_steps": 100_000, "learning_rate": 3e-2, "checkpoint_every": 100_000},
    )
    run.wait_until(lambda: (run.directory / "config.resolved.toml").exists(), "its configuration")
    name = run.directory.name
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key=key_of(run), max_retries=40
    ) as client:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    assert [model.id async for model in client.models.list()] == [name]
                    before = [await rated(client, name, number) for number in range(AT_ONCE)]
                    break
                except openai.APIConnectionError:
                    await asyncio.sleep(0.2)
        began = time.monotonic()
        taught = list[float]()
        while time.monotonic() - began < WITHIN_S:
            taught = await asyncio.gather(*(rated(client, name, number) for number in range(AT_ONCE)))
            if sum(taught) / AT_ONCE > 0.5:
                break
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()[-4000:]
    assert "Traceback" not in run.text()
    assert sum(before) / AT_ONCE < 0.2
    assert sum(taught) / AT_ONCE > 0.5, f"after {WITHIN_S} s {sum(taught) / AT_ONCE}: {run.text()[-2000:]}"
