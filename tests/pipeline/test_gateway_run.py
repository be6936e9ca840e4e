"""A run without prompts: the openai client asks, rates, and is answered as it taught; an agent's sessions are trained
beside it, and a game is played.
"""

import asyncio
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import streamrl
from tests.command import ended
from tests.pipeline.conftest import Start
from tests.pipeline.local_run import PATIENCE_S, LocalRun
from tests.pipeline.unaware_agent import ROUNDS, TOKENS, spell

if TYPE_CHECKING:
    import openai

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(400)]

MARKER, SPELT = "a", "b"
"""What is rewarded in answers to questions, and in an agent's sessions: neither could be learnt from the other."""
AT_ONCE = 16
"""Questions, and sessions of the agent: together a step's groups."""
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


@dataclass
class Lesson:
    """What is rewarded again and again: mean rewards round by round, and when each was over (seconds)."""

    play: Callable[[int], Coroutine[Any, Any, float]]
    rewards: list[float] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)

    async def round(self) -> None:
        found = await asyncio.gather(*(self.play(number) for number in range(AT_ONCE)))
        self.rewards.append(sum(found) / AT_ONCE)
        self.ended_at.append(time.monotonic())

    @property
    def is_learnt(self) -> bool:
        return self.rewards[-1] > 0.5

    def told(self, what: str, began: float) -> str:
        learnt = [at - began for at, reward in zip(self.ended_at, self.rewards, strict=True) if reward > 0.5]
        rounds = f"{len(self.rewards)} rounds of {AT_ONCE}"
        return f"{what}: {self.rewards[0]:.2f} -> {self.rewards[-1]:.2f} in {rounds}, above 0.5 after {learnt[:1]} s"


async def rated(client: "openai.AsyncOpenAI", name: str, number: int) -> float:
    """Ask once, and rate the answer by the share of the marker in it."""
    answer = await client.completions.create(model=name, prompt=f"say {number % 8}", max_tokens=TOKENS)
    reward = answer.choices[0].text.count(MARKER) / TOKENS
    await client.post("/feedback", cast_to=object, body={"id": answer.id, "reward": reward})
    return reward


async def spelt(client: "openai.AsyncOpenAI", name: str, number: int) -> float:
    """Let an agent play at an address that is a session's, and reward the session; the agent hears of neither."""
    session = f"agent-{uuid.uuid4().hex}"
    address = str(client.base_url).replace("/v1", f"/sessions/{session}/v1")
    said = await spell(client.with_options(base_url=address), name, f"{SPELT}{number % 8}")
    reward = "".join(said).count(SPELT) / (ROUNDS * TOKENS)
    await client.post("/feedback", cast_to=object, body={"session": session, "reward": reward, "dataset": "agent"})
    return reward


def with_chat_template(model: Path, directory: Path) -> Path:
    """The model as one that answers conversations: it reads them as one text."""
    shutil.copytree(model, directory)
    (directory / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    return directory


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


def check_the_sessions(run: LocalRun) -> None:
    """The agent's trajectories are of all its calls, with what it told the policy between them."""
    rows = streamrl.Run(run.directory).trajectories(tokens=True).to_pylist()
    trained = [row for row in rows if row["dataset"] == "agent" and row["step"] is not None]
    assert trained
    assert all(row["session"].startswith("agent-") for row in trained)
    # A turn that ends at once is one token, so it may end before the other begins.
    assert {len(row["turns"]) for row in trained} == {ROUNDS}
    assert all(sum(row["loss_mask"]) == sum(turn["end"] - turn["start"] for turn in row["turns"]) for row in trained)


async def test_what_feedback_and_sessions_reward_the_policy_soon_says(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    import openai  # takes a second, in every process that collects tests

    port = free_port()
    run = start(
        run={"workers": 1},
        model={"path": str(with_chat_template(tiny_model, tmp_path / "chat-model"))},
        data={"path": None, "requests_only": True},
        rewards={"functions": ["exact_match"]},
        loop={"groups_per_step": 2 * AT_ONCE, "num_generations": 1, "max_completion_length": 8, "max_staleness": 4},
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
        asked, agent = (
            Lesson(lambda number: rated(client, name, number)),
            Lesson(lambda number: spelt(client, name, number)),
        )
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    assert [model.id async for model in client.models.list()] == [name]
                    await asyncio.gather(asked.round(), agent.round())
                    break
                except openai.APIConnectionError:
                    await asyncio.sleep(0.2)
        began = time.monotonic()
        while time.monotonic() - began < WITHIN_S and not (asked.is_learnt and agent.is_learnt):
            await asyncio.gather(asked.round(), agent.round())
    told = f"{asked.told('questions', began)}; {agent.told('sessions of the agent', began)}"
    print(told)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()[-4000:]
    assert "Traceback" not in run.text()
    for lesson in (asked, agent):
        assert lesson.rewards[0] < 0.2, told
        assert lesson.rewards[-1] > 0.5, f"{told}: {run.text()[-2000:]}"
    await asyncio.to_thread(check_the_game, run)
    await asyncio.to_thread(check_the_sessions, run)
