"""``[rewards]``: which functions score a completion. Knows their names, never imports them."""

import difflib
import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from streamrl.producers.rewards.builtin import BUILT_IN, DATASET, THINK_ANSWER, BuiltInOptions
from streamrl.producers.rewards.judges import (
    CODE_TESTS,
    JUDGE_PATTERN,
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
            "'llm_judge', 'code_tests', or 'package.module:function' in TRL's signature.",
        ),
    ] = (DATASET,)
    weights: Annotated[tuple[float, ...], Field(description="One per function; none: 1 each.")] = ()
    format_pattern: Annotated[
        str, Field(description="Regular expression that 'format' wants a whole completion to match.")
    ] = THINK_ANSWER
    answer_pattern: Annotated[
        str | None,
        Field(
            description="Regular expression whose first group, at its last match, is the answer that 'math_verify' and "
            "'exact_match' judge; none: they judge the whole completion."
        ),
    ] = None
    timeout_s: Annotated[float, Field(gt=0, le=3600, description="Most seconds one completion may take.")] = 10.0
    load_timeout_s: Annotated[float, Field(gt=0, description="Most seconds a function may take to import.")] = 120.0
    concurrency: Annotated[
        int, Field(ge=1, le=1024, description="Calls of one async function that may wait at the same time.")
    ] = 64
    judge_base_url: Annotated[
        str | None,
        Field(description="Where 'llm_judge' finds an OpenAI-compatible endpoint, such as http://localhost:8000/v1."),
    ] = None
    judge_model: Annotated[str, Field(description="The model that 'llm_judge' asks for.")] = ""
    judge_prompt: Annotated[
        str | None,
        Field(
            description="What 'llm_judge' asks; {prompt}, {completion} and {answer} stand for the row's. None: what is "
            "right and wrong, and a score from 0 to 10."
        ),
    ] = None
    judge_pattern: Annotated[
        str,
        Field(
            description="Regular expression whose first group, at its last match in what the judge says, is a number."
        ),
    ] = JUDGE_PATTERN
    judge_scale: Annotated[
        float, Field(gt=0, description="The number that is a reward of 1; the reward is 0 to 1.")
    ] = 10.0
    judge_max_tokens: Annotated[int, Field(ge=1, description="Tokens that the judge may answer with.")] = 512
    judge_key_variable: Annotated[
        str,
        Field(description="Environment variable with the endpoint's API key, handed to 'llm_judge' alone."),
    ] = "OPENAI_API_KEY"
    code_timeout_s: Annotated[
        float,
        Field(gt=0, le=3600, description="Most seconds that a completion's program may run, tests included."),
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
            description="Variables of the worker's environment that reward processes get besides what programs need to "
            "run (PATH, HOME, locale, threads, caches); name here what a judge logs in with."
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
        int | None, Field(ge=256 << 20, description="Most address space of each of its processes, libraries included.")
    ] = None
    max_file_bytes: Annotated[int, Field(ge=0, description="Longest file that they may write.")] = 16 << 30
    max_open_files: Annotated[int, Field(ge=64, description="Most files that each of them may have open.")] = 4096

    @field_validator("environment")
    @classmethod
    def _plain_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
                got = name.partition("=")[0]  # whoever writes NAME=value may write a secret
                raise ValueError(f"expected names of variables such as 'OPENAI_API_KEY', got {got!r}")
            if name.startswith(ENV_PREFIX):
                raise ValueError(f"expected no variable of StreamRL's own, which may be a secret, got {name}")
        return names

    @field_validator("format_pattern", "answer_pattern", "judge_pattern")
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
                f"expected rewards.judge_base_url and rewards.judge_model beside {LLM_JUDGE!r}, got "
                f"{self.judge_base_url!r} and {self.judge_model!r}"
            )
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"expected as many rewards.weights as functions ({len(self.functions)}), got {len(self.weights)}"
            )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Reward names in the order of ``functions``: what stands behind the colon; repeats get ``_2`` and so on."""
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
        """Names of the rewards that workers give."""
        return self.names

    @property
    def built_in_options(self) -> BuiltInOptions:
        """What the rewards that come along are made with."""
        judge = JudgeOptions(
            base_url=self.judge_base_url or "",
            model=self.judge_model,
            prompt=self.judge_prompt or JUDGE_PROMPT,
            pattern=self.judge_pattern,
            scale=self.judge_scale,
            max_tokens=self.judge_max_tokens,
            key_variable=self.judge_key_variable,
        )
        return BuiltInOptions(self.format_pattern, self.answer_pattern, self.code_timeout_s, judge)

    def environment_of(self, function: str) -> tuple[str, ...]:
        """Variables that the process of a function gets beside what programs need to run."""
        return (*self.environment, self.judge_key_variable) if function == LLM_JUDGE else self.environment

    def confinement_of(self, function: str) -> RewardConfinement:
        """What the process of a function may take."""
        runs_code = function == CODE_TESTS
        return RewardConfinement(
            network=self.network and (self.code_network or not runs_code),
            max_processes=self.max_processes,
            max_memory_bytes=self.max_memory_bytes,
            max_file_bytes=self.max_file_bytes,
            max_open_files=self.max_open_files,
            network_setting="rewards.code_network" if runs_code and self.network else "rewards.network",
        )

    @property
    def weight_by_name(self) -> dict[str, float]:
        """The weight of each reward in their sum."""
        return dict(zip(self.names, self.weights or (1.0,) * len(self.functions), strict=True))
