"""The settings of graders in ``[rewards]``."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from streamrl.producers.rewards.settings import RewardSettings


class GradedRewards(RewardSettings):
    """``[rewards]``: functions that score completions, some of them called by graders."""

    graded: Annotated[
        tuple[str, ...],
        Field(
            description="Which of the functions are called by graders, not by workers: slow judges, judges behind an "
            "endpoint, code that is run. Unset: workers call all functions, and there are no graders."
        ),
    ] = ()
    graders: Annotated[
        int,
        Field(
            ge=0,
            le=64,
            description="Grader processes that `streamrl run` starts if rewards.graded is set; more may join.",
        ),
    ] = 1

    @model_validator(mode="after")
    def _graded_are_functions(self) -> Self:
        if unknown := [function for function in self.graded if function not in self.functions]:
            raise ValueError(f"expected rewards.graded to name some of rewards.functions, got {unknown}")
        return self

    @property
    def graded_names(self) -> tuple[str, ...]:
        """Names of the rewards that graders compute."""
        named = zip(self.functions, self.names, strict=True)
        return tuple(name for function, name in named if function in self.graded)

    @property
    def worker_names(self) -> tuple[str, ...]:
        """Names of the rewards that workers compute."""
        return tuple(name for name in self.names if name not in self.graded_names)


SECTIONS = {"rewards": GradedRewards}
