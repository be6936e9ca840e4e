"""``[rewards]``: which functions score a completion. Knows their names, never imports them."""

import difflib
import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from producers.rewards.builtin import BUILT_IN, DATASET, THINK_ANSWER, BuiltInOptions
from producers.rewards.sandbox import RewardConfinement
from schemas.secrets import ENV_PREFIX
from schemas.settings import Section

_NAMES = (DATASET, *BUILT_IN)
_IMPORT_PATH = re.compile(r"^[^:\s]+:[^:\s]+$")


class RewardSettings(Section):
    """``[rewards]``."""

    functions: Annotated[
        tuple[str, ...],
        Field(
            min_length=1,
            description="'dataset' (a generated data set's own scorer), 'math_verify', 'exact_match', 'format', or "
            "'package.module:function' in TRL's signature.",
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
    def built_in_options(self) -> BuiltInOptions:
        """What the rewards that come along are made with."""
        return BuiltInOptions(self.format_pattern, self.answer_pattern)

    @property
    def confinement(self) -> RewardConfinement:
        """What a reward process may take."""
        return RewardConfinement(
            network=self.network,
            max_processes=self.max_processes,
            max_memory_bytes=self.max_memory_bytes,
            max_file_bytes=self.max_file_bytes,
            max_open_files=self.max_open_files,
        )

    @property
    def weight_by_name(self) -> dict[str, float]:
        """The weight of each reward in their sum."""
        return dict(zip(self.names, self.weights or (1.0,) * len(self.functions), strict=True))
