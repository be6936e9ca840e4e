"""The coordinator's and the relay's settings."""

from typing import Annotated

from pydantic import Field

from schemas.settings import Section


class CoordinatorSettings(Section):
    """``[coordinator]``."""

    heartbeat_timeout_s: Annotated[float, Field(gt=0, description="A worker silent for this long is lost.")] = 8.0
    finish_patience_s: Annotated[
        float,
        Field(ge=0, description="After a restart: how long a finished run may still be continued before it is ended."),
    ] = 60.0
    relays: Annotated[
        tuple[str, ...],
        Field(description="Addresses of the relays that serve weights; empty: the relay that `streamrl run` starts."),
    ] = ()


class RelaySettings(Section):
    """``[relay]``."""

    host: Annotated[str, Field(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="0: `streamrl run` picks a free one.")] = 0
