"""``[rewards]``: which functions score a completion. Knows their names, never imports them."""

import difflib
import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from producers.rewards.builtin import BUILT_IN, DATASET, THINK_ANSWER, BuiltInOptions
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
    def weight_by_name(self) -> dict[str, float]:
        """The weight of each reward in their sum."""
        return dict(zip(self.names, self.weights or (1.0,) * len(self.functions), strict=True))
