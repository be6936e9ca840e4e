"""What ``[run]`` and ``[training]`` say of trainers that stand by."""

from typing import Annotated

from pydantic import Field

from streamrl.schemas.settings import Section


class StandbyTrainers(Section):
    """``[run]``."""

    standby_trainers: Annotated[
        int, Field(ge=0, le=4, description="Trainers that `streamrl run` keeps loaded, to take over from the first.")
    ] = 0


class Takeover(Section):
    """``[training]``."""

    takeover_after_s: Annotated[
        float, Field(gt=0, description="A standby takes over when the leading trainer was not heard of for so long.")
    ] = 4.0


SECTIONS: dict[str, type[Section]] = {"run": StandbyTrainers, "training": Takeover}
