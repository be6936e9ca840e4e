"""Each example as a user runs it: a process, from the repository's root, by the command that it names."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.own_environment import SayItAgain
from examples.own_loss import RankedPolicy
from examples.own_reward import share_of_letter, short
from streamrl.consumers.algorithms.losses import TokenBatch
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.schemas.environments import PolicyReply
from tests.pipeline.local_run import ENVIRONMENT, PATIENCE_S

ROOT = Path(__file__).parents[2]
LINES_OF_THE_LOOP = 150
"""So that the example stays one that is read in one sitting."""
CELLS = """
import json, sys
names = {}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]), names)
print(names["run"].summary["steps"], names["audit"].is_balanced, names["replayed"].rebuilt.verdict)
"""
"""A program that executes a notebook's cells in order, as `Run all` does."""
WITHOUT_TRL = """
import runpy, sys
sys.modules["trl"] = None
runpy.run_module("examples.trl_stream", run_name="__main__")
"""


def ended(*arguments: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """A Python program that has ended."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def said_by(module: str, *arguments: str) -> str:
    """Standard output of an example that ended well."""
    done = ended("-m", f"examples.{module}", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.processes
def test_the_loop_in_one_process_takes_ten_steps_and_leaves_nothing(tmp_path: Path) -> None:
    said = said_by("loop", str(tmp_path))
    assert re.findall(r"^step +(\d+)  reward \d\.\d{3}$", said, re.MULTILINE) == [str(step) for step in range(1, 11)]
    assert (tmp_path / "loop" / "checkpoints" / "step_10").is_dir()


def test_the_loop_is_read_in_one_sitting() -> None:
    assert len((ROOT / "examples" / "loop.py").read_text().splitlines()) <= LINES_OF_THE_LOOP


@pytest.mark.processes
def test_own_rewards_are_learnt_and_the_notebook_reads_the_run(tmp_path: Path) -> None:
    said = said_by("own_reward", os.path.relpath(tmp_path / "runs", ROOT))
    first, last = re.findall(r"share_of_letter: (\d\.\d{3}) -> (\d\.\d{3})", said)[0]
    assert float(last) > float(first)
    assert re.search(r"^balanced: run own-reward, \d+ records, every one with exactly one fate$", said, re.MULTILINE)
    # The notebook names its run relative to its own folder.
    (tmp_path / "examples").mkdir()
    read = ended("-c", CELLS, str(ROOT / "examples" / "read_a_run.ipynb"), cwd=tmp_path / "examples")
    assert read.returncode == 0, read.stdout + read.stderr
    assert read.stdout.splitlines()[-1] == "16 True bit-equal"


def test_the_notebook_has_no_outputs() -> None:
    cells = json.loads((ROOT / "examples" / "read_a_run.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert not [cell for cell in code if cell["outputs"] or cell["execution_count"] is not None]


def test_the_own_rewards_judge_by_the_columns() -> None:
    assert share_of_letter(["eeab", "", "xx"], letter=["e", "e", "x"]) == [0.5, 0.0, 1.0]
    assert short(["", "abcd", "abcdefgh"], longest=[8, 8, 4]) == [1.0, 0.5, 0.0]


async def test_the_own_environment_has_two_turns_with_a_reward_each() -> None:
    game = SayItAgain(longest=6)
    assert game.request == {"max_tokens": 6}
    assert await game.reset(13) == [{"role": "user", "content": "3letters?"}]
    first = await game.step(PolicyReply("ab12", (), "stop", {}))
    assert (first.reward, first.done, first.messages) == (0.25, False, [{"role": "user", "content": "again?"}])
    second = await game.step(PolicyReply("aaxx", (), "stop", {}))
    assert (second.reward, second.done) == (0.25, True)
    await game.close()


def test_the_own_loss_ranks_rewards_and_caps_weights() -> None:
    algorithm = RankedPolicy(AlgorithmSettings(), RankedPolicy.Options(largest_weight=2.0))
    everyone = np.ones(4, bool)
    assert algorithm.advantages(np.array([0.0, 99.0, 1.0, 1.0]), everyone).tolist() == [-1.0, 1.0, 0.0, 0.0]
    logprobs = torch.log(torch.tensor([[0.9, 0.2]])).requires_grad_()
    behaviour = torch.log(torch.tensor([[0.3, 0.4]]))
    tokens = TokenBatch(logprobs, behaviour, torch.tensor([0.5]), torch.ones(1, 2))
    losses, cut = algorithm.surrogate(tokens)
    losses.sum().backward()
    # Ratios of 3, cut to 2, and of 1/2; the gradient is minus weight times advantage.
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, torch.tensor([[-1.0, -0.25]]))
    assert cut.tolist() == [[1.0, 0.0]]


@pytest.mark.processes
def test_without_trl_its_example_ends_with_one_line() -> None:
    done = ended("-c", WITHOUT_TRL)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: expected the package trl, which this example needs, got none: pip install trl\n"


@pytest.mark.long
def test_the_own_environment_is_played_and_trained(tmp_path: Path) -> None:
    said = said_by("own_environment", str(tmp_path))
    first, last = re.findall(r"^mean reward of an episode: (\d\.\d{3}) -> (\d\.\d{3})", said, re.MULTILINE)[0]
    assert float(last) > float(first)
    assert re.search(r"^the last episode: \dletters\? .*again\?.*tokens 0 to \d+, \d+ to \d+$", said, re.MULTILINE)


@pytest.mark.long
def test_the_own_loss_trains(tmp_path: Path) -> None:
    said = said_by("own_loss", str(tmp_path))
    rewards = [float(reward) for reward in re.findall(r"^  step +\d+  reward (\d\.\d{3})", said, re.MULTILINE)]
    assert len(rewards) == 4
    assert rewards[-1] > 2 * rewards[0]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: make test-long brings it")
def test_trl_trains_on_the_runs_samples(tmp_path: Path) -> None:
    said = said_by("trl_stream", str(tmp_path))
    assert re.findall(r"^  step (\d)  reward \d\.\d{3}", said, re.MULTILINE) == ["1", "2", "3", "4"]
