"""The built-in environments: a calculator, a guessing game, and a Python interpreter."""

import ast
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamrl.producers.environments.python_tool import PythonTool
from streamrl.schemas.environments import Environment, EnvironmentStep, Message, PolicyReply

_TERM = re.compile(r"[0-9(][0-9+*() -]*=$")
_LAST_NUMBER = re.compile(r"-?[0-9]+(?=[^0-9]*$)")
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
MOST_DIGITS = 12
"""Digits of a number that the calculator accepts or returns."""


def evaluated(term: str) -> int | None:
    """The value of a term of whole numbers with + - * and parentheses; None for other text."""
    try:
        value = _value(ast.parse(term.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return value if value is not None and abs(value) < 10**MOST_DIGITS else None


def _value(node: ast.AST) -> int | None:
    match node:
        case ast.Constant(value=int(value)) if abs(value) < 10**MOST_DIGITS:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = _value(operand)
            return None if found is None else -found
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            one, other = _value(left), _value(right)
            return None if one is None or other is None else _OPERATORS[type(op)](one, other)
    return None


class Calculator:
    """Sums and products as in the demo. The environment computes each term that the policy writes before a ``=``.

    The policy may answer ``52*7=`` at once, or by way of `` 50*7=`` (350), `` 2*7=`` (14), `` 350+14=`` (364). The
    answer is the last number in the text, whether the policy or the environment wrote it. ``hint``: text before the
    task, for chat models.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, *, seed: int = 0, max_tokens: int = 32, hint: str = "") -> None:
        self._seed, self._hint = seed, hint
        self._answer, self._said = 0, ""
        self.request: Mapping[str, Any] = {
            "stop": ["="],
            "include_stop_str_in_output": True,
            "max_tokens": max_tokens,
        }

    async def reset(self, task: int) -> Sequence[Message]:
        """See ``Environment``."""
        draw = random.Random(f"calculator/{self._seed}/{task}")
        if draw.random() < 1 / 3:
            term = f"{draw.randint(1, 9) * 10 + draw.randint(1, 9)}*{draw.randint(3, 9)}"
        else:
            term = "+".join(str(draw.randint(11, 99)) for _ in range(draw.choice((3, 4))))
        self._answer, self._said = evaluated(term) or 0, ""
        return [{"role": "user", "content": f"{self._hint}{term}="}]

    async def step(self, reply: PolicyReply) -> EnvironmentStep:
        """See ``Environment``."""
        self._said += reply.content
        asked = _TERM.search(self._said)
        if asked is not None and reply.finish_reason == "stop":
            value = evaluated(asked[0][:-1])
            result = "?" if value is None else str(value)
            self._said += result
            return EnvironmentStep([{"role": "user", "content": result}])
        found = _LAST_NUMBER.search(self._said)
        is_right = found is not None and len(found[0]) <= MOST_DIGITS and int(found[0]) == self._answer
        return EnvironmentStep(reward=float(is_right), done=True)

    async def close(self) -> None:
        """Do nothing."""


class GuessingGame:
    """Guess a number: each turn is one guess, answered by whether the number is higher or lower.

    The reward is 1 if the first guess is right, and ``1 / guesses`` less for each further guess.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, *, numbers: int = 10, guesses: int = 4, seed: int = 0, max_tokens: int = 2) -> None:
        self._numbers, self._guesses, self._seed = numbers, guesses, seed
        self._wanted, self._made = 0, 0
        self.request: Mapping[str, Any] = {"max_tokens": max_tokens}

    async def reset(self, task: int) -> Sequence[Message]:
        """See ``Environment``."""
        self._wanted = random.Random(f"guess/{self._seed}/{task}").randrange(self._numbers)
        self._made = 0
        return [{"role": "user", "content": f"0-{self._numbers - 1}?"}]

    async def step(self, reply: PolicyReply) -> EnvironmentStep:
        """See ``Environment``."""
        self._made += 1
        found = re.search(r"[0-9]{1,9}", reply.content)
        if found is not None and int(found[0]) == self._wanted:
            return EnvironmentStep(reward=1 - (self._made - 1) / self._guesses, done=True)
        if self._made >= self._guesses:
            return EnvironmentStep(done=True)
        answer = "?" if found is None else "<" if self._wanted < int(found[0]) else ">"
        return EnvironmentStep([{"role": "user", "content": answer}])

    async def close(self) -> None:
        """Do nothing."""


SHIPPED: dict[str, Callable[..., Environment]] = {
    "calculator": Calculator,
    "guess": GuessingGame,
    "python": PythonTool,
}
"""Built-in environments by their names in the settings."""
