"""A run without prompts: the openai client asks, rates, and is answered as it taught; a game is played beside it."""

import asyncio
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

import streamrl
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
GAME: dict[str, Any] = {"numbers": 2, "guesses": 4, "max_tokens": 8}
"""One that a model which knows nothing wins at times: turns of no reward at all would teach nothing."""


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


def check_the_game(run: LocalRun) -> None:
    """What became of the environment's episodes: accounts, one of its steps again, and its turns as they are shown."""
    handle = streamrl.Run(run.directory)
    report = handle.audit()
    assert report.is_balanced, report.violations
    assert report.turns > report.sessions > 0
    rows = [row for row in handle.trajectories(tokens=True).to_pylist() if row["dataset"] == "guess"]
    # What the game said between two turns is not trained.
    several = [row for row in rows if row["step"] is not None and 0 in row["loss_mask"]]
    assert several, f"no episode of several turns was trained, of {len(rows)}: {run.text()[-2000:]}"
    first = min(several, key=lambda row: row["step"])
    (replayed,) = handle.replay(first["step"])
    assert replayed.rebuilt.verdict == "bit-equal"
    shown = ended("show", first["trajectory_id"], str(run.directory))
    assert shown.returncode == 0, shown.stderr
    assert "turns of session env-" in shown.stdout
    assert "2: tokens [" in shown.stdout


async def test_what_feedback_rewards_the_policy_soon_says(start: Start) -> None:
    import openai  # takes a second, in every process that collects tests

    port = free_port()
    run = start(
        run={"workers": 1},
        data={"path": None, "requests_only": True},
        rewards={"functions": ["exact_match"]},
        loop={"groups_per_step": AT_ONCE, "num_generations": 1, "max_completion_length": 8, "max_staleness": 4},
        gateway={"enabled": True, "port": port},
        # One episode at a time: a few of a step's groups, so that it is still the requester's rewards that teach.
        environments={"names": ["guess"], "max_concurrent": 1},
        **{"environments.options.guess": GAME},
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
    await asyncio.to_thread(check_the_game, run)
