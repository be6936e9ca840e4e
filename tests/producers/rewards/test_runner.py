import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgpack
import pytest

from streamrl.producers.rewards import runner as module
from streamrl.producers.rewards.runner import RewardRunner, ScoreRequest, Scores, packed_request
from streamrl.producers.rewards.settings import RewardSettings
from streamrl.schemas.errors import RewardLoadError
from streamrl.schemas.trajectories import ChatTurn, Prompt
from tests.ended_children import crashing
from tests.progress import calm_s

pytestmark = pytest.mark.processes

HERE = "tests.producers.rewards.functions"
ROOT = Path(__file__).parents[3]


def request(text: str, *, prompt: Prompt | None = None) -> ScoreRequest:
    plain = Prompt(prompt_id="d/0", dataset="d", content="question", columns={"answer": "42"})
    return ScoreRequest(prompt or plain, text, [5, 6, 7])


@asynccontextmanager
async def running(*names: str, timeout_s: float = 1.0, concurrency: int = 64) -> AsyncIterator[RewardRunner]:
    functions = tuple(name if name == "dataset" else f"{HERE}:{name}" for name in names)
    runner = RewardRunner(RewardSettings(functions=functions, timeout_s=timeout_s, concurrency=concurrency))
    await runner.start()
    try:
        yield runner
    finally:
        await runner.close()


async def score_all(runner: RewardRunner, texts: list[str]) -> list[Scores]:
    return await asyncio.gather(*(runner.score(request(text)) for text in texts))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hang", "timed out after 1 s"),
        ("regex", "timed out after 1 s"),
        ("raise", "ValueError: a reason over two lines"),
        ("exit", "its process ended with exit code 3"),
        ("segfault", "its process was killed by SIGSEGV"),
        ("sys.exit", "SystemExit: 4"),
        ("nan", "expected a finite number, got nan"),
        ("inf", "expected a finite number, got inf"),
        ("huge", "expected a finite number, got inf"),
        ("two", "expected a list of 1 reward, got 2"),
        ("empty", "expected a list of 1 reward, got 0"),
        ("text", "expected a number or None, got str"),
        ("bare", "expected a list of 1 reward, got float"),
        ("nothing", "expected a list of 1 reward, got NoneType"),
    ],
)
async def test_a_failing_reward_is_recorded_and_harms_no_other(text: str, reason: str) -> None:
    with crashing(signal.SIGSEGV):
        async with running("obedient", "length") as runner:
            before, failed, after = await score_all(runner, ["abc", text, "abcde"])
            later = await runner.score(request("ab"))
    assert failed == Scores({"obedient": None, "length": 3.0}, {"obedient": reason})
    assert [scores.rewards["obedient"] for scores in (before, after, later)] == [3.0, 5.0, 2.0]
    assert [scores.errors for scores in (before, after, later)] == [{}, {}, {}]


async def test_none_means_not_applicable_and_is_no_error() -> None:
    async with running("obedient") as runner:
        assert await runner.score(request("none")) == Scores({"obedient": None}, {})


async def test_only_the_failing_call_is_blamed_when_many_wait() -> None:
    texts = ["exit" if number in (20, 70, 130) else "x" * (number + 1) for number in range(200)]
    async with running("obedient", timeout_s=5) as runner:
        results = await score_all(runner, texts)
    assert [number for number, scores in enumerate(results) if scores.errors] == [20, 70, 130]
    assert all(
        scores.rewards["obedient"] == len(text) for text, scores in zip(texts, results, strict=True) if "x" * 7 in text
    )


async def test_an_alarm_that_a_call_leaves_running_harms_no_later_call() -> None:
    async with running("obedient") as runner:
        found = await score_all(runner, ["alarm", "rest"])
    assert [scores.rewards for scores in found] == [{"obedient": 5.0}, {"obedient": 4.0}]


async def test_a_call_is_answered_before_the_next_starts() -> None:
    async with running("calls_at_once") as runner:
        found = await score_all(runner, ["a", "b", "c", "d"])
    assert [scores.rewards for scores in found] == [{"calls_at_once": 1.0}] * 4


async def test_user_code_cannot_reach_the_pipes() -> None:
    async with running("obedient") as runner:
        assert await score_all(runner, ["print", "input"]) == [
            Scores({"obedient": 5.0}, {}),
            Scores({"obedient": 0.0}, {}),
        ]


async def test_a_function_gets_the_arguments_trl_documents() -> None:
    async with running("report_arguments") as runner:
        chat = Prompt(
            prompt_id="d/0",
            dataset="d",
            content=(ChatTurn(role="user", content="question"),),
            columns={"answer": "42", "prompt": "left out"},
        )
        assert await runner.score(request("text")) == Scores({"report_arguments": 1.0}, {})
        assert await runner.score(request("text", prompt=chat)) == Scores({"report_arguments": 1.0}, {})


def test_a_reward_gets_the_prompt_as_the_data_has_it() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    turn = ChatTurn.model_validate(call)
    worded = Prompt(prompt_id="d/0", dataset="d", content="Q: 12*7?", stated="12*7?")
    chat = Prompt(prompt_id="d/0", dataset="d", content=(ChatTurn(role="system", content="s"), turn), stated=(turn,))
    as_given = Prompt(prompt_id="d/0", dataset="d", content=(turn,))
    for prompt, expected in ((worded, "12*7?"), (chat, [call]), (as_given, [call])):
        assert msgpack.unpackb(packed_request(ScoreRequest(prompt, "84", [1])))["prompt"] == expected


async def test_a_process_keeps_its_state_between_calls() -> None:
    async with running("count_calls") as runner:
        results = await score_all(runner, ["a", "b", "c"])
    assert [scores.rewards["count_calls"] for scores in results] == [1.0, 2.0, 3.0]


async def test_async_functions_run_concurrently_and_time_out_alone() -> None:
    async with running("waits") as runner:
        began = calm_s()
        results = await score_all(runner, ["sleep 0.3"] * 20 + ["sleep 9", "raise"])
        assert calm_s() - began < 2.5
    assert [scores.rewards["waits"] for scores in results] == [1.0] * 20 + [None, None]
    assert results[20].errors == {"waits": "timed out after 1 s"}
    assert results[21].errors == {"waits": "RuntimeError: no"}


@pytest.mark.parametrize(
    ("text", "reason"), [("exit", "its process ended with exit code 5"), ("block 9", "timed out after 0.5 s")]
)
async def test_an_async_function_that_ends_or_blocks_its_process_pays_alone(text: str, reason: str) -> None:
    async with running("waits", timeout_s=0.5) as runner:
        results = await score_all(runner, ["sleep 0.2", "sleep 0.2", text, "sleep 0.2"])
    assert [scores.errors for scores in results] == [{}, {}, {"waits": reason}, {}]
    assert [scores.rewards["waits"] for scores in results] == [1.0, 1.0, None, 1.0]


async def test_concurrent_async_calls_are_limited() -> None:
    async with running("waits", concurrency=2) as runner:
        began = time.monotonic()
        await score_all(runner, ["sleep 0.1"] * 8)
        assert time.monotonic() - began >= 0.4


async def test_the_data_sets_own_scorer_scores_its_answers() -> None:
    columns = {"answer": "-4", "metadata": {"source_dataset": "chain_sum", "difficulty": {"num_terms": [2, 6]}}}
    prompt = Prompt(prompt_id="chain_sum/0", dataset="chain_sum", content="4 - 1 - 7 =", columns=columns)
    other = Prompt(prompt_id="nothing/0", dataset="nothing", content="?", columns=columns)
    async with running("dataset", timeout_s=30) as runner:
        right = await runner.score(request("-4", prompt=prompt))
        wrong = await runner.score(request("no number", prompt=prompt))
        unknown = await runner.score(request("1", prompt=other))
    assert right == Scores({"dataset": 1.0}, {})
    assert wrong == Scores({"dataset": 0.0}, {})
    assert unknown.rewards == {"dataset": None}
    assert unknown.errors["dataset"].startswith("DataError: expected one of the")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (f"{HERE}:obedeint", "did you mean 'obedient'"),
        (f"{HERE}:not_callable", "got int"),
        (f"{HERE}:positional", "'completions' by position only"),
        ("no.such.module:f", "ModuleNotFoundError"),
        ("tests.producers.rewards.exits_at_import:f", "its process ended with exit code 7"),
    ],
)
async def test_a_function_that_cannot_be_loaded_is_named_at_the_start(function: str, message: str) -> None:
    runner = RewardRunner(RewardSettings(functions=(f"{HERE}:length", function)))
    with pytest.raises(RewardLoadError) as raised:
        await runner.start()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_a_function_that_loads_too_slowly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.producers.rewards.runner.LOAD_TIMEOUT_S", 0.001)
    runner = RewardRunner(RewardSettings(functions=(f"{HERE}:length",)))
    with pytest.raises(RewardLoadError, match=r"within 0\.001 s"):
        await runner.start()


async def test_the_users_own_directory_is_found_but_never_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def score(completions): return [7.0]")
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')")
    monkeypatch.chdir(tmp_path)
    runner = RewardRunner(RewardSettings(functions=("mine:score",)))
    await runner.start()
    assert await runner.score(request("a")) == Scores({"score": 7.0}, {})
    await runner.close()


async def test_processes_started_by_a_hanging_reward_end_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    async with running("starts_a_program") as runner:
        scores = await runner.score(request(str(pid_file)))
    assert scores.errors == {"starts_a_program": "timed out after 1 s"}
    assert await is_gone(int(pid_file.read_text()))


async def test_a_function_that_does_not_load_again_fails_its_calls_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = (
        "import os\ndef score(completions):\n    os._exit(9) if completions[0] == 'exit' else None\n    return [1.0]\n"
    )
    (tmp_path / "fickle.py").write_text(good)
    monkeypatch.chdir(tmp_path)
    runner = RewardRunner(RewardSettings(functions=("fickle:score",)))
    await runner.start()
    (tmp_path / "fickle.py").write_text("1 / 0  # a line that makes the file longer, so that no cache is used\n" * 9)
    first, second = await score_all(runner, ["exit", "a"])
    assert first.errors == {"score": "its process ended with exit code 9"}
    assert second.errors["score"].startswith("cannot be loaded again")
    (tmp_path / "fickle.py").write_text(good)
    assert await runner.score(request("a")) == Scores({"score": 1.0}, {})
    await runner.close()


@pytest.mark.parametrize("text", ["abc", "regex"])
async def test_nothing_outlives_the_worker(text: str) -> None:
    code = f"""
import asyncio
from tests.ended_children import crashing
from tests.producers.rewards.test_runner import *
async def main():
    async with running("obedient", timeout_s=60) as runner:
        call = asyncio.create_task(runner.score(request({text!r})))
        await asyncio.sleep(0.3)
        print(runner._queues[0]._process.process.pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    os.kill(pid, 0)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    assert await is_gone(pid)


async def test_closing_twice_and_closing_unstarted_are_fine() -> None:
    runner = RewardRunner(RewardSettings(functions=(f"{HERE}:length",)))
    await runner.close()
    await runner.start()
    await runner.close()
    await runner.close()


async def is_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        await asyncio.sleep(0.05)
    return False


async def test_a_process_whose_start_is_cancelled_twice_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    may_start, said = asyncio.Event(), list[str]()

    class Started:
        def kill(self) -> None:
            said.append("killed")

        async def wait(self) -> int:
            said.append("ended")
            return -9

    async def create(*_command: str, **_options: object) -> Started:
        await may_start.wait()
        return Started()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create)
    starting = asyncio.create_task(module._spawn((), {}))
    await asyncio.sleep(0)
    for _ in range(2):
        starting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    may_start.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert said == ["killed", "ended"]
