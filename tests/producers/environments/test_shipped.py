import pytest

from streamrl.producers.environments.shipped import Calculator, GuessingGame, evaluated
from streamrl.schemas.environments import EnvironmentStep, PolicyReply


def said(text: str, reason: str = "stop") -> PolicyReply:
    return PolicyReply(text, (), reason, {"role": "assistant", "content": text})


@pytest.mark.parametrize(
    ("term", "value"),
    [
        ("52*7", 364),
        ("-(2+3)*4", -20),
        (" 1 + 1 ", 2),
        ("2**9", None),
        ("9999999999999", None),
        ("999999*9999999", None),
        ("1/2", None),
        ("a", None),
        ("", None),
        ("(" * 300 + "1" + ")" * 300, None),
    ],
)
def test_the_calculator_takes_whole_numbers_and_nothing_else(term: str, value: int | None) -> None:
    assert evaluated(term) == value


async def test_a_sum_is_worked_out_with_the_calculator() -> None:
    for task in range(20):
        game = Calculator(seed=1)
        (question,) = await game.reset(task)
        term = question["content"].removesuffix("=")
        answer = evaluated(term)
        first = await game.step(said(f" {term}="))
        assert [message["content"] for message in first.messages] == [str(answer)]
        assert await game.step(said("", "stop")) == EnvironmentStep(reward=1.0, done=True)
        assert [*await game.reset(task)] == [question], "the same number, the same task"
        assert (await game.step(said(f"{answer}", "stop"))).reward == 1.0, "without the calculator"
        await game.reset(task)
        assert (await game.step(said("so 1", "stop"))).reward == 0.0
        await game.reset(task)
        assert [one["content"] for one in (await game.step(said("x="))).messages] == []
        assert game.request["stop"] == ["="]


async def test_a_number_is_guessed_in_fewer_turns_for_more() -> None:
    game = GuessingGame(numbers=10, guesses=4)
    await game.reset(3)
    wanted = game._wanted
    other = (wanted + 1) % 10
    told = await game.step(said(str(other)))
    assert told.messages[0]["content"] == ("<" if wanted < other else ">")
    assert (await game.step(said("x"))).messages[0]["content"] == "?"
    assert await game.step(said(f"{wanted}")) == EnvironmentStep(reward=0.5, done=True)
    await game.reset(3)
    steps = [await game.step(said("nothing")) for _ in range(4)]
    assert [step.done for step in steps] == [False, False, False, True]
    assert steps[-1].reward == 0.0
