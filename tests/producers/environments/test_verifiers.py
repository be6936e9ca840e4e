"""Environments of the library verifiers as they are, played through a real gateway."""

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from streamrl.producers.environments.adapters import _verifiers_player
from streamrl.producers.environments.driver import dataset_of
from tests.fakes.waiting import until
from tests.producers.environments.test_driver import playing, report
from tests.producers.gateway.gateway_harness import CharacterTokenizer, ScriptedEngine, running_gateway

pytestmark = pytest.mark.processes

TASKSET = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str = ""

class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def is_there(self, trace: vf.Trace) -> float:
        return float(self.data.answer in str(trace.last_reply))

class SumConfig(vf.TasksetConfig):
    most: int = 3

class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for number in range(self.config.most):
            yield SumTask(SumData(idx=number, prompt=f"{number}+1", answer=str(number + 1)), self.config.task)

__all__ = ["SumTaskset"]
"""
PACKAGE = """
import verifiers as vf
from datasets import Dataset

class AskedTwice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": "sure?"}]

def is_there(completion, answer, **_):
    return float(answer in completion[-1]["content"])

def load_environment(most=3):
    rows = [{"question": f"{number}+1", "answer": str(number + 1)} for number in range(most)]
    rubric = vf.Rubric(funcs=[is_there], weights=[1.0])
    return AskedTwice(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=2, sampling_args={"max_tokens": 7})
"""


class OneText(CharacterTokenizer):
    """Of a model that reads a conversation as one text."""

    def encode_chat(
        self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        return self.encode_text("".join(turn["content"] for turn in turns))


@pytest.mark.parametrize(
    ("kind", "source", "options", "turns"),
    [
        pytest.param(
            "verifiers.v1.envs",
            TASKSET,
            {"taskset": {"most": 1}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}},
            1,
            id="taskset",
            marks=pytest.mark.long,
        ),
        pytest.param("verifiers.envs", PACKAGE, {"most": 1}, 2, id="package"),
    ],
)
async def test_an_environment_of_verifiers_is_played_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, source: str, options: dict[str, object], turns: int
) -> None:
    if find_spec("verifiers") is None or find_spec(kind) is None:  # not every release has both kinds
        pytest.skip(f"needs {kind}: pip install verifiers")
    name = f"sums_of_{kind.replace('.', '_')}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    _verifiers_player.cache_clear()
    engine = ScriptedEngine(says={"0+1": "1"})
    environment = f"verifiers:{name}"
    async with (
        running_gateway(tmp_path, engines=[engine], tokenizer=OneText()) as it,
        playing(it, environment, options={environment: options}, environment=("PYTHONPATH", "PATH")) as role,
    ):
        await until(lambda: len(it.trajectories) == 2 or role.counts.errors > 0, timeout_s=120)
        assert role.counts.errors == 0
        assert {one.dataset for one in it.trajectories} == {dataset_of(environment)}
        assert [list(one.rewards.values()) for one in it.trajectories] == [[1.0], [1.0]]
        assert {len(one.turns) for one in it.trajectories} == {turns}
        assert {one.sampling.max_completion_length for one in engine.requests} == {7 if turns == 2 else 128}
        await report(it, 1, finished=True)
