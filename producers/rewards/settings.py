"""``[rewards]``: the functions that score completions. It has only their names, and never imports them."""

import difflib
import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from streamrl.producers.rewards.builtin import BUILT_IN, DATASET, THINK_ANSWER, BuiltInOptions
from streamrl.producers.rewards.judges import (
    CODE_TESTS,
    JUDGE_KEY,
    JUDGE_PROMPT,
    LLM_JUDGE,
    JudgeOptions,
)
from streamrl.producers.rewards.sandbox import RewardConfinement
from streamrl.schemas.secrets import ENV_PREFIX
from streamrl.schemas.settings import Section

_NAMES = (DATASET, *BUILT_IN)
_IMPORT_PATH = re.compile(r"^[^:\s]+:[^:\s]+$")


class RewardSettings(Section):
    """``[rewards]``."""

    functions: Annotated[
        tuple[str, ...],
        Field(
            min_length=1,
            description="'dataset' (a generated data set's own scorer), 'math_verify', 'exact_match', 'format', "
            "'llm_judge', 'code_tests', or 'package.module:function' with TRL's signature.",
        ),
    ] = (DATASET,)
    weights: Annotated[tuple[float, ...], Field(description="One weight per function; unset: 1 each.")] = ()
    format_pattern: Annotated[
        str, Field(description="Regular expression for 'format', which must match the whole completion.")
    ] = THINK_ANSWER
    answer_pattern: Annotated[
        str | None,
        Field(
            description="Regular expression whose first group, at its last match, is the answer that 'math_verify' and "
            "'exact_match' compare; unset: they compare the whole completion."
        ),
    ] = None
    timeout_s: Annotated[
        float, Field(gt=0, le=3600, description="Most seconds that a function may take for one completion.")
    ] = 10.0
    concurrency: Annotated[
        int, Field(ge=1, le=1024, description="Most calls of one async function at the same time.")
    ] = 64
    judge_base_url: Annotated[
        str | None,
        Field(description="URL of the OpenAI-compatible endpoint of 'llm_judge', such as http://localhost:8000/v1."),
    ] = None
    judge_model: Annotated[str, Field(description="Name of the model of 'llm_judge' at the endpoint.")] = ""
    judge_prompt: Annotated[
        str | None,
        Field(
            description="Question of 'llm_judge', in which {prompt}, {completion} and {answer} are replaced. It must "
            "ask for 'SCORE:' and a number from 0 to 10. Unset: it asks for merits and faults, then for the score."
        ),
    ] = None
    code_timeout_s: Annotated[
        float,
        Field(gt=0, le=3600, description="Most seconds that a completion's program and its tests may run."),
    ] = 5.0
    code_network: Annotated[
        bool,
        Field(
            description="Whether the programs that 'code_tests' runs have a network; false needs Linux with user "
            "namespaces."
        ),
    ] = False
    environment: Annotated[
        tuple[str, ...],
        Field(
            description="Variables of the worker's environment that reward processes get, in addition to those that "
            "programs need (PATH, HOME, locale, threads, caches). Name the credentials of a judge here."
        ),
    ] = ()
    network: Annotated[
        bool,
        Field(description="Whether reward processes have a network; false needs Linux with user namespaces."),
    ] = True
    max_processes: Annotated[
        int | None,
        Field(
            ge=8,
            description="Most processes and threads of one function at a time; needs Linux with user namespaces.",
        ),
    ] = None
    max_memory_bytes: Annotated[
        int | None,
        Field(ge=256 << 20, description="Most bytes of address space of each reward process, libraries included."),
    ] = None

    @field_validator("environment")
    @classmethod
    def _plain_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
                got = name.partition("=")[0]  # in NAME=value, the value may be a secret
                raise ValueError(f"expected names of variables such as 'OPENAI_API_KEY', got {got!r}")
            if name.startswith(ENV_PREFIX):
                raise ValueError(f"expected none of StreamRL's own variables, which may be secrets, got {name}")
        return names

    @field_validator("format_pattern", "answer_pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"expected a regular expression, got {pattern!r}: {error}") from error
        return pattern

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for function in self.functions:
            if function not in _NAMES and _IMPORT_PATH.match(function) is None:
                close = difflib.get_close_matches(function, _NAMES, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"expected 'package.module:function' or one of {_NAMES}, got {function!r}{hint}")
        if LLM_JUDGE in self.functions and not (self.judge_base_url and self.judge_model):
            raise ValueError(
                f"expected rewards.judge_base_url and rewards.judge_model for the reward {LLM_JUDGE!r}, got "
                f"{self.judge_base_url!r} and {self.judge_model!r}"
            )
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"expected as many rewards.weights as functions ({len(self.functions)}), got {len(self.weights)}"
            )
        if self.weights and not any(self.weights):
            raise ValueError("expected one of rewards.weights other than 0, got none: every reward would be 0")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Reward names in the order of ``functions``: the part after the colon; repeats get ``_2`` and so on."""
        names: list[str] = []
        for function in self.functions:
            plain = function.rpartition(":")[2]
            candidate, count = plain, 1
            while candidate in names:
                count += 1
                candidate = f"{plain}_{count}"
            names.append(candidate)
        return tuple(names)

    @property
    def worker_names(self) -> tuple[str, ...]:
        """Names of the rewards that workers compute."""
        return self.names

    @property
    def built_in_options(self) -> BuiltInOptions:
        """Options of the built-in rewards."""
        judge = JudgeOptions(self.judge_base_url or "", self.judge_model, self.judge_prompt or JUDGE_PROMPT)
        return BuiltInOptions(self.format_pattern, self.answer_pattern, self.code_timeout_s, judge)

    def environment_of(self, function: str) -> tuple[str, ...]:
        """Variables that the process of a function gets in addition to those that programs need."""
        return (*self.environment, JUDGE_KEY) if function == LLM_JUDGE else self.environment

    def confinement_of(self, function: str) -> RewardConfinement:
        """Limits of the process of a function."""
        runs_code = function == CODE_TESTS
        return RewardConfinement(
            network=self.network and (self.code_network or not runs_code),
            max_processes=self.max_processes,
            max_memory_bytes=self.max_memory_bytes,
            network_setting="rewards.code_network" if runs_code and self.network else "rewards.network",
        )

    @property
    def weight_by_name(self) -> dict[str, float]:
        """The weight of each reward in their sum."""
        return dict(zip(self.names, self.weights or (1.0,) * len(self.functions), strict=True))
