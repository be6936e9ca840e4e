"""The settings of prompt values in ``[dispatch]``."""

from typing import Annotated

from pydantic import Field, field_validator

from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.schemas.identifiers import is_plain_name


class ValuedDispatch(DispatchSettings):
    """``[dispatch]``: how orders are distributed over workers, and how often each prompt is ordered."""

    value: Annotated[
        bool,
        Field(
            description="Order prompts less often whose samples would all earn the same, by what their earlier groups "
            "earned. It changes which prompts are trained; orders and trajectories carry the probability. Unset: on "
            "with algorithm.dynamic_sampling, else off."
        ),
    ] = False
    value_history: Annotated[
        tuple[str, ...],
        Field(description="Earlier runs on the same broker, over the same prompts, whose groups dispatch.value uses."),
    ] = ()

    @field_validator("value_history")
    @classmethod
    def _names_of_runs(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [name for name in names if not is_plain_name(name)]:
            raise ValueError(f"expected names of runs (1 to 64 of a-z, 0-9, '.', '_' and '-'), got {wrong[0]!r}")
        return names


SECTIONS = {"dispatch": ValuedDispatch}
