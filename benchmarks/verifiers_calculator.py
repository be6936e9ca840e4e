"""An environment of verifiers, by its own means alone: sums, and a calculator for what stands before an equals sign."""

import random
import re
from math import prod
from typing import Any

import verifiers as vf
from datasets import Dataset


def worked_out(term: str) -> str:
    """The value of numbers with + and *; a question mark for anything else."""
    try:
        return str(sum(prod(map(int, part.split("*"))) for part in term.split("+")))
    except ValueError:
        return "?"


class Calculated(vf.MultiTurnEnv):
    """Ends with an answer: the policy's own, or what the calculator told it, if that is right."""

    @vf.stop
    async def has_answered(self, state: Any, **_: Any) -> bool:
        """Whether the policy asked for nothing."""
        said = state["trajectory"]
        return bool(said) and not (said[-1]["completion"][-1]["content"] or "").endswith("=")

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        """The calculator's turn."""
        asked = re.search(r"[0-9+*]{1,16}(?==$)", messages[-1]["content"])
        told = worked_out(asked[0]) if asked else "?"
        said = [{"role": "user", "content": told}]
        if told == state["answer"]:
            state["final_env_response"] = said
        return said


def is_right(completion: Any, answer: str, **_: Any) -> float:
    """Whether the last number is the answer."""
    numbers = re.findall(r"[0-9]+", "".join(message["content"] or "" for message in completion))
    return float(numbers[-1:] == [answer])


def load_environment(questions: int = 4096, seed: int = 0) -> vf.Environment:
    """As verifiers makes one."""
    draw = random.Random(seed)
    terms = ["+".join(str(draw.randint(11, 99)) for _ in range(draw.choice((3, 4)))) for _ in range(questions)]
    rows = [{"question": f"{term}=", "answer": worked_out(term)} for term in terms]
    return Calculated(
        dataset=Dataset.from_list(rows),
        rubric=vf.Rubric(funcs=[is_right]),
        max_turns=6,
        sampling_args={"stop": ["="], "max_tokens": 32, "extra_body": {"include_stop_str_in_output": True}},
    )
