import os
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from streamrl.producers.rewards.judges import (
    JudgeError,
    JudgeOptions,
    LlmJudge,
    code_tests,
    filled,
    program_in,
    score_in,
)
from streamrl.producers.rewards.runner import RewardRunner, ScoreRequest
from streamrl.producers.rewards.settings import RewardSettings
from streamrl.schemas.trajectories import Prompt


class Endpoint:
    """An endpoint with OpenAI's chat completions API. ``says``: its next answers, as a text or an HTTP status."""

    def __init__(self) -> None:
        self.says: list[str | int] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        said = self.says.pop(0)
        if isinstance(said, int):
            return web.Response(status=said, text="too many\nrequests")
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": said}}]})


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    made, app = Endpoint(), web.Application()
    app.router.add_post("/v1/chat/completions", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield made
    await runner.cleanup()


async def test_the_judge_is_asked_about_prompt_completion_and_answer_and_its_last_number_counts(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    options = JudgeOptions(endpoint.url, "m", "T: {prompt} C: {completion} A: {answer}")
    endpoint.says = ["SCORE: 3, no: SCORE: 7.5"]
    judge = LlmJudge(options)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    reply = [{"role": "assistant", "content": "four {answer}"}]
    assert await judge(prompts=[turns], completions=[reply], answer=["4"]) == [0.75]
    await judge.close()
    (asked,) = endpoint.asked
    assert (asked["model"], asked["temperature"], endpoint.keys) == ("m", 0, ["Bearer sk-1"])
    # A placeholder inside a completion is not filled in.
    assert asked["messages"] == [
        {"role": "user", "content": "T: system: Be brief.\n\nuser: 2+2? C: four {answer} A: 4"}
    ]


async def test_an_endpoint_that_refuses_or_says_no_number_is_an_error_with_what_it_said(endpoint: Endpoint) -> None:
    judge = LlmJudge(JudgeOptions(endpoint.url, "m"))
    endpoint.says = [429, "fine, I think"]
    with pytest.raises(JudgeError, match="got status 429: too many requests"):
        await judge(prompts=["?"], completions=["!"])
    with pytest.raises(JudgeError, match=re.escape("got ...'fine, I think'")):
        await judge(prompts=["?"], completions=["!"])
    await judge.close()


@pytest.mark.parametrize(
    ("said", "reward"),
    [("SCORE: 10", 1.0), ("SCORE: 12", 1.0), ("SCORE: -3", 0.0), ("A score 4?\n**Score:** 7.5/10, a score 2", 0.75)],
)
def test_a_judges_number_becomes_a_reward_from_0_to_1(said: str, reward: float) -> None:
    assert score_in(said) == reward


def test_placeholders_are_filled_once() -> None:
    assert filled("{prompt}|{completion}", prompt="{completion}", completion="x", answer="") == "{completion}|x"


@pytest.mark.processes
async def test_a_judge_runs_in_a_reward_process_with_its_key_and_no_other_secret(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-2")
    settings = RewardSettings(
        functions=("llm_judge", "format"),
        judge_base_url=endpoint.url,
        judge_model="m",
    )
    assert settings.environment_of("format") == ()
    runner = RewardRunner(settings, ("llm_judge",))
    endpoint.says = ["SCORE: 4"]
    await runner.start()
    try:
        prompt = Prompt(prompt_id="p/0", dataset="p", content="2+2?", columns={"answer": "4"})
        scores = await runner.score(ScoreRequest(prompt, "four", [1]))
    finally:
        await runner.close()
    assert (scores.rewards, scores.errors) == ({"llm_judge": 0.4}, {})
    assert endpoint.keys == ["Bearer sk-2"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "tests", "reward"),
    [
        ("def f(x): return x + 1", "assert f(1) == 2", 1.0),
        ("def f(x): return x", "assert f(1) == 2", 0.0),
        ("import os; os._exit(0)", "assert False", 0.0),
        ("import sys; sys.exit(0)", "assert False", 0.0),
        ("while True: pass", "assert True", 0.0),
        ("open('big', 'wb').write(bytes(1 << 22))", "assert True", 0.0),
        ("import sys\nassert sys.stdin.closed and sys.argv[1:] == []", "assert True", 1.0),
        ("def f(x): return x + 1", ["assert f(1) == 2", "assert f(2) == 3"], 1.0),
        ("def f(x): return x + 1", ["assert f(1) == 2", "assert f(2) == 4"], 0.0),
    ],
)
def test_a_program_is_worth_1_if_its_tests_get_through(program: str, tests: str | list[str], reward: float) -> None:
    completion = f"Here:\n```python\n{program}\n```"
    assert code_tests(0.7)(completions=[completion], tests=[tests]) == [reward]


@pytest.mark.processes
def test_a_program_sees_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-3")
    program = "import os\nassert 'OPENAI_API_KEY' not in os.environ\nassert os.getcwd() == os.environ['HOME']"
    assert code_tests(5.0)(completions=[program], tests=["assert True"]) == [1.0]
    assert "OPENAI_API_KEY" in os.environ


def test_rows_without_tests_get_no_reward_and_data_without_the_column_is_refused() -> None:
    assert code_tests(1.0)(completions=["x = 1"], tests=[None]) == [None]
    with pytest.raises(ValueError, match="a column 'tests'"):
        code_tests(1.0)(completions=["x = 1"])


@pytest.mark.parametrize(
    "tests",
    [
        *("", "[1, 2]", '{"inputs": ["1"], "outputs": ["2"]}', "def check(candidate):\n    assert candidate(1) == 2"),
        *("META = {'author': 'x'}\nimport math\n", "pass", "assert f(1) ==", {"inputs": ["1"]}, [1, 2], True),
    ],
)
def test_tests_that_every_program_would_pass_are_refused(tests: Any) -> None:
    with pytest.raises(ValueError, match=r"^expected (tests that call the program|Python code)"):
        code_tests(1.0)(completions=["x = 1"], tests=[tests])


def test_the_last_block_is_the_program() -> None:
    assert program_in("```python\na = 1\n```\nor\n```py\na = 2\n```") == "a = 2\n"
    assert program_in("a = 3") == "a = 3"


def test_a_judge_needs_an_address_and_a_model() -> None:
    with pytest.raises(ValueError, match=re.escape("rewards.judge_base_url and rewards.judge_model")):
        RewardSettings(functions=("llm_judge",))


def test_a_program_has_no_network_unless_that_is_said() -> None:
    settings = RewardSettings(functions=("code_tests", "format"))
    assert (settings.confinement_of("code_tests").network, settings.confinement_of("format").network) == (False, True)
    assert settings.confinement_of("code_tests").network_setting == "rewards.code_network"
    assert RewardSettings(code_network=True).confinement_of("code_tests").network
    assert not RewardSettings(network=False, code_network=True).confinement_of("code_tests").network
