"""``[coordinator]`` and ``[scaling]``."""

from typing import Annotated

from pydantic import Field

from streamrl.schemas.settings import Section


class ScalingSettings(Section):
    """``[scaling]``: when workers join and leave, between run.workers and run.max_workers."""

    settle_steps: Annotated[
        int, Field(ge=0, description="Number of steps to ignore after the number of workers changed.")
    ] = 1
    margin: Annotated[
        float,
        Field(ge=0, lt=1, description="A worker leaves if without it generation takes this share less than training."),
    ] = 0.15
    idle_steps: Annotated[
        int, Field(ge=1, description="Number of steps in a row for which scaling.margin must hold.")
    ] = 3


class CoordinatorSettings(Section):
    """``[coordinator]``."""

    finish_timeout_s: Annotated[
        float,
        Field(ge=0, description="After a restart, seconds in which a finished run may still continue before it ends."),
    ] = 60.0
    relays: Annotated[
        tuple[str, ...],
        Field(
            description="Addresses of relays to announce after those that send heartbeats, if any do yet; "
            "empty: the relay that `streamrl run` starts."
        ),
    ] = ()
