"""``[rewards]``: which functions score a completion. Knows their names, never imports them."""

import re
from typing import Annotated, Self

from pydantic import Field, model_validator

from producers.rewards.loading import DATASET
from schemas.settings import Section

_IMPORT_PATH = re.compile(r"^[^:\s]+:[^:\s]+$")


class RewardSettings(Section):
    """``[rewards]``."""

    functions: Annotated[
        tuple[str, ...],
        Field(
            min_length=1, description="'dataset' (the data set's own scorer) or 'package.module:function', TRL-style."
        ),
    ] = (DATASET,)
    weights: Annotated[tuple[float, ...], Field(description="One per function; none: 1 each.")] = ()
    timeout_s: Annotated[float, Field(gt=0, le=3600, description="Most seconds one completion may take.")] = 10.0
    load_timeout_s: Annotated[float, Field(gt=0, description="Most seconds a function may take to import.")] = 120.0
    concurrency: Annotated[
        int, Field(ge=1, le=1024, description="Calls of one async function that may wait at the same time.")
    ] = 64

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for function in self.functions:
            if function != DATASET and _IMPORT_PATH.match(function) is None:
                raise ValueError(f"expected 'dataset' or 'package.module:function' in functions, got {function!r}")
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
    def weight_by_name(self) -> dict[str, float]:
        """The weight of each reward in their sum."""
        return dict(zip(self.names, self.weights or (1.0,) * len(self.functions), strict=True))
