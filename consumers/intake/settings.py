"""``[intake]``: how much is read ahead, how long a group may take, and when bad input stops the trainer."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.settings import Section


class IntakeSettings(Section):
    """``[intake]``."""

    max_poll_records: Annotated[int, Field(ge=1, description="Most records taken from the bus at once.")] = 500
    high_water_bytes: Annotated[int, Field(ge=1, description="Bytes held in memory above which reading pauses.")] = (
        512 << 20
    )
    low_water_bytes: Annotated[int, Field(ge=0, description="Bytes below which reading goes on.")] = 256 << 20
    group_timeout_s: Annotated[
        float, Field(gt=0, description="Seconds after its first sample at which a group is closed with what is there.")
    ] = 120.0
    orphan_lineage: Annotated[
        Literal["train", "skip"],
        Field(description="What to do with samples of weights that a trainer crash orphaned; always counted."),
    ] = "train"
    max_consecutive_poison: Annotated[
        int, Field(ge=1, description="Unusable records in a row that stop the trainer.")
    ] = 50
    max_poison_share: Annotated[
        float, Field(gt=0, le=1, description="Share of unusable records among the last 1,000 that stops the trainer.")
    ] = 0.2

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low_water_bytes >= self.high_water_bytes:
            raise ValueError(
                f"intake.low_water_bytes must be below intake.high_water_bytes ({self.high_water_bytes}), "
                f"got {self.low_water_bytes}"
            )
        return self
