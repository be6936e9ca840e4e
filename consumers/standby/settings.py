"""Settings of standby trainers, in ``[run]``."""

from typing import Annotated

from pydantic import Field

from streamrl.schemas.settings import Section


class StandbyTrainers(Section):
    """``[run]``."""

    standby_trainers: Annotated[
        int, Field(ge=0, le=4, description="Standby trainers that `streamrl run` keeps loaded, to take over.")
    ] = 0


SECTIONS: dict[str, type[Section]] = {"run": StandbyTrainers}
