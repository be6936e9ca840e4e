"""Runs without prompts: the openai client asks, rates, and is answered as it taught, with a game played beside it; and
an agent that knows nothing of ours is trained by what its sessions are worth.

Long tests both; ``tests/producers/gateway`` and ``tests/simulation`` have their parts in one process.
"""

import asyncio
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import streamrl
from streamrl.bus.embedded.node import free_ports
from tests.command import ended
from tests.pipeline.conftest import Start
from tests.pipeline.local_run import PATIENCE_S, LocalRun
from tests.pipeline.unaware_agent import ROUNDS, TOKENS, spell
from tests.progress import patience

if TYPE_CHECKING:
    import openai

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

MARKERS = "aeiou"
"""Of which a policy that knows nothing says one in twenty; a single letter it may never find."""
AT_ONCE = 32
"""Questions or sessions, of which there are as many in a step."""
WITHIN_S = 60.0
"""Some 3 s on two cores that have little else to do; the tests share them."""
GAME: dict[str, Any] = {"numbers": 100, "guesses": 4, "max_tokens": 8}
"""One that is hardly ever won: where it pays, a policy takes its digits for what the requester wants."""


def key_of(run: LocalRun) -> str:
    config = str(run.directory / "config.resolved.toml")
    done = ended("gateway", "keys", "add", "teacher", "--run", config, "--train")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def share_of_markers(said: Sequence[str], most: int) -> float:
    return sum(letter in MARKERS for text in said for letter in text) / most


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

    @property
    def told(self) -> str:
        """What came of it, and how long that took from the end of the first round on."""
        seconds = self.ended_at[-1] - self.ended_at[0]
        return f"{self.rewards[0]:.2f} -> {self.rewards[-1]:.2f} in {len(self.rewards)} rounds, {seconds:.1f} s"


async def rated(client: "openai.AsyncOpenAI", name: str, number: int) -> float:
    """Ask once, and rate the answer by the share of markers in it."""
    answer = await client.completions.create(model=name, prompt=f"say {number % 8}", max_tokens=TOKENS)
    reward = share_of_markers([answer.choices[0].text], TOKENS)
    await client.post("/feedback", cast_to=object, body={"id": answer.id, "reward": reward})
    return reward


async def spelt(client: "openai.AsyncOpenAI", name: str, number: int) -> float:
    """Let an agent play at an address that is a session's, and reward the session; the agent hears of neither."""
    session = f"agent-{uuid.uuid4().hex}"
    address = str(client.base_url).replace("/v1", f"/sessions/{session}/v1")
    said = await spell(client.with_options(base_url=address), name, f"a{number % 8}")
    reward = share_of_markers(said, ROUNDS * TOKENS)
    await client.post("/feedback", cast_to=object, body={"session": session, "reward": reward, "dataset": "agent"})
    return reward


def with_chat_template(model: Path, directory: Path) -> Path:
    """The model as one that answers conversations: it reads them as one text."""
    shutil.copytree(model, directory)
    (directory / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    return directory


def games_of_several_turns(run: LocalRun) -> list[dict[str, Any]]:
    """Those that were trained, without what the game said between two turns."""
    rows = streamrl.Run(run.directory).trajectories(tokens=True).to_pylist()
    return [row for row in rows if row["dataset"] == "guess" and row["step"] is not None and 0 in row["loss_mask"]]


def check_the_game(run: LocalRun) -> None:
    """What became of the environment's episodes: accounts, one of its steps again, and its turns as they are shown."""
    handle = streamrl.Run(run.directory)
    report = handle.audit()
    assert report.is_balanced, report.violations
    assert report.turns > report.sessions > 0
    first = min(games_of_several_turns(run), key=lambda row: row["step"])
    (replayed,) = handle.replay(first["step"])
    assert replayed.rebuilt.verdict == "bit-equal"
    shown = ended("show", first["trajectory_id"], "--run", str(run.directory))
    assert shown.returncode == 0, shown.stderr
    assert "turns of session env-" in shown.stdout
    assert "2: tokens [" in shown.stdout


def check_the_sessions(run: LocalRun) -> None:
    """The agent's trajectories are of all its calls, with what it told the policy between them."""
    rows = streamrl.Run(run.directory).trajectories(tokens=True).to_pylist()
    trained = [row for row in rows if row["dataset"] == "agent" and row["step"] is not None]
    assert trained
    assert all(row["session"].startswith("agent-") for row in trained)
    # A first answer that was the padding is no text to come back: its session is split.
    several = [row for row in trained if len(row["turns"]) == ROUNDS]
    assert len(several) > len(trained) / 2
    assert all(sum(row["loss_mask"]) == sum(turn["end"] - turn["start"] for turn in row["turns"]) for row in trained)


async def taught(
    run: LocalRun,
    port: int,
    play: Callable[..., Coroutine[Any, Any, float]],
    until: Callable[[], object] = lambda: True,
) -> Lesson:
    """Play with a run until most is rewarded, or the time is up; end the run, once something else is so as well."""
    import openai  # takes a second, in every process that collects tests

    run.wait_until(lambda: (run.directory / "config.resolved.toml").exists(), "its configuration")
    name, base_url = run.directory.name, f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key_of(run), max_retries=40) as client:
        lesson = Lesson(lambda number: play(client, name, number))
        async with patience(PATIENCE_S):
            while True:
                try:
                    assert [model.id async for model in client.models.list()] == [name]
                    await lesson.round()
                    break
                except openai.APIConnectionError:
                    await asyncio.sleep(0.2)
        while lesson.ended_at[-1] - lesson.ended_at[0] < WITHIN_S and not lesson.is_learnt:
            await lesson.round()
    print(lesson.told)
    async with patience(PATIENCE_S):
        # The lesson may be over before another process has begun.
        while not await asyncio.to_thread(until):
            await asyncio.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()[-4000:]
    assert "Traceback" not in run.text()
    assert lesson.rewards[0] < 0.2, lesson.told
    assert lesson.is_learnt, f"{lesson.told}: {run.text()[-2000:]}"
    return lesson


def a_run(start: Start, port: int, **sections: dict[str, Any]) -> LocalRun:
    return start(
        run={"workers": 1},
        data={"path": None, "requests_only": True},
        rewards={"functions": ["exact_match"]},
        loop={"groups_per_step": AT_ONCE, "num_generations": 1, "max_completion_length": 8, "max_staleness": 4},
        gateway={"enabled": True, "port": port},
        algorithm={"name": "reinforce_plus_plus"},
        training={"max_steps": 100_000, "learning_rate": 3e-2, "checkpoint_every": 100_000},
        **sections,
    )


async def test_the_policy_learns_what_feedback_rewards(start: Start) -> None:
    (port,) = free_ports(1)
    # One episode at a time: a few of a step's groups, so that it is still the requester's rewards that teach.
    games = {"names": ["guess"], "max_concurrent": 1}
    run = a_run(start, port, environments=games, **{"environments.options.guess": GAME})
    await taught(run, port, rated, lambda: games_of_several_turns(run))
    await asyncio.to_thread(check_the_game, run)


async def test_an_agent_without_our_code_is_trained_by_its_sessions(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    run = a_run(start, port, model={"path": str(with_chat_template(tiny_model, tmp_path / "chat-model"))})
    await taught(run, port, spelt)
    await asyncio.to_thread(check_the_sessions, run)
