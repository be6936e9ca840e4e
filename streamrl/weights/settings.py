"""``[relay]``: how weights get from the trainer's store to the workers."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from streamrl.schemas.settings import Section


class RelaySettings(Section):
    """``[relay]``."""

    host: Annotated[str, Field(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="0: `streamrl run` picks a free one.")] = 0
    store: Annotated[
        Path | None,
        Field(
            description="Directory for the weights that this relay fetches from the relay before it, best in memory "
            "(/dev/shm). Not set: it serves the trainer's own store in run.directory, as the first of the chain."
        ),
    ] = None
    site: Annotated[
        str, Field(description="Name of this host's network: weights cross each link between sites once.")
    ] = ""
    address: Annotated[
        str | None,
        Field(
            description="Address at which others reach this relay, as `http://name:port`. Not set: relay.host, or this "
            "host's name if relay.host is 0.0.0.0."
        ),
    ] = None
    max_bytes_per_s: Annotated[
        int,
        Field(ge=0, description="Most bytes of weights per second to all other hosts together; 0: no limit."),
    ] = 0
